"""Torch's private names that this package uses, in one place.

NOTE [ Sharded parameters ]

A parameter that FSDP2 gathers is a ``Parameter``, and views of it have it as their base. Two kinds of aliases do not
show that, and an operator may save them:

* ``weight.detach()`` under ``fully_shard``. Its storage shrinks to nothing when the parameters are resharded, at the
  end of the module's forward, and is filled again before backward. A copy under way must not lose its bytes, and they
  must never come back as a copy. Torch has no public way to recognise it, so FSDP2's own records are read.
* ``weight.to_local()`` of a ``DTensor``: a view of the local shard, which is a plain tensor.

NOTE [ Dynamo ]

Below a compiled frame, Dynamo looks at every Python function that runs eagerly, hooks and finalisers too, and would
compile them. Where it is loaded, it is told once to skip the files of this package. Loading it for that would take
seconds. Disabling Dynamo for a call costs more CPU time than many calls here, so that is done only where it is active.
"""

from __future__ import annotations

import functools
import operator
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from spillway.errors import UnsupportedError

Function = TypeVar("Function", bound=Callable[..., Any])
Hooks = tuple[Callable[..., Any], Callable[..., Any]]

next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the next autograd node of the calling thread."""
graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the running backward of the calling thread; -1 for none."""
top_hooks: Callable[[bool], Hooks | None] = _top_saved_tensors_default_hooks
"""The innermost saved-tensor hooks; the argument is always True."""
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
push_hooks: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks
why_hooks_are_disabled: Callable[[], str | None] = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


def in_backward() -> bool:
    """Whether the calling thread is inside a backward."""
    return graph_task() != -1


def refuse_transforms() -> None:
    """Raise :class:`~spillway.errors.UnsupportedError` where there are no hooks: in ``torch.func`` transforms, say."""
    disabled = why_hooks_are_disabled()
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise UnsupportedError(
            "got a call inside of a torch.func transform (grad, vjp, jvp, vmap), expected plain autograd; torch.func "
            "allows no saved-tensor hooks: call it around the transform's function only without Spillway"
        )
    if disabled is not None:
        raise UnsupportedError(
            f"got a call where saved-tensor hooks are disabled ({disabled}), expected one where they are not; leave "
            f"out torch.autograd.graph.disable_saved_tensors_hooks, or do without Spillway there"
        )


# Sharded parameters.

_STATES = "torch.distributed._composable_state"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param"
_DTENSOR = "torch.distributed.tensor"
_RECORDS = ("all_gather_outputs", "_unsharded_inner_tensors")
_MOST_NODES = 8


class Gathered:
    """The storages that FSDP2 gathers parameters into, as one pass meets them. See NOTE [ Sharded parameters ].

    A storage is made when its module is first gathered, so missing ones are looked for again. After the first step all
    are known, and a query is one search in a set.
    """

    def __init__(self) -> None:
        self._waiting = [weakref.ref(parameter) for parameter in _parameters()]
        first = self._waiting[0]() if self._waiting else None
        missing = [name for name in _RECORDS if first is not None and not hasattr(first, name)]
        if missing:
            raise UnsupportedError(
                f"got a torch {torch.__version__} whose FSDP2 keeps no {' and no '.join(missing)}, expected one that "
                f"does, since a gathered parameter that moves would be lost; use a torch that Spillway was tested with"
            )
        # By number. If a model dies within the pass and another storage gets its number, that one is kept.
        self._storages: set[int] = set()

    def holds(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is the storage of a gathered parameter."""
        if self._waiting:
            self._waiting = [reference for reference in self._waiting if not self._note(reference())]
        return storage._cdata in self._storages

    def _note(self, parameter: Any) -> bool:
        """Whether the parameter's storages are known by now."""
        if parameter is None:
            return True
        for tensor in (*parameter.all_gather_outputs, *parameter._unsharded_inner_tensors):
            self._storages.add(tensor.untyped_storage()._cdata)
        return hasattr(parameter, "_unsharded_param")


def _parameters() -> Iterator[Any]:
    """FSDP2's records of all sharded parameters of this process."""
    states = sys.modules.get(_STATES)
    if states is None or _FSDP not in sys.modules:
        return
    seen = set()
    for reference in list(states._module_state_mapping.values()):
        state = reference()
        if state is None or id(state) in seen:
            continue
        # Modules that are wrapped as one share their state.
        seen.add(id(state))
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            yield from () if group is None else group.fsdp_params


def is_local_part(tensor: torch.Tensor) -> bool:
    """Whether it is a view of the local shard of a ``DTensor`` parameter, as ``to_local()`` gives."""
    if tensor._base is None or _DTENSOR not in sys.modules:
        return False
    node: Any = tensor.grad_fn
    for _ in range(_MOST_NODES):
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            storage = tensor.untyped_storage()
            parts = storage_parts(leaf) if isinstance(leaf, torch.nn.Parameter) else []
            return any(part.untyped_storage() is storage for part in parts)
        following: tuple[Any, ...] = () if node is None else node.next_functions
        if len(following) != 1:
            return False
        node = following[0][0]
    return False


# Wrapper subclasses.


def storage_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors that a tensor is made of: itself, or the parts of a wrapper subclass."""
    if not is_wrapper(tensor):
        return [tensor]
    parts = (getattr(tensor, name) for name in flatten(tensor)[0])
    return [plain for part in parts if isinstance(part, torch.Tensor) for plain in storage_parts(part)]


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether it is made of other tensors, and names them (``__tensor_flatten__``)."""
    return type(tensor) is not torch.Tensor and bool(is_traceable_wrapper_subclass(tensor))


def flatten(tensor: torch.Tensor) -> tuple[list[str], Any]:
    """The names of a wrapper's parts, and the context to rebuild it with."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return names, context


# Dynamo.

callback: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined, unused-ignore]
"""Dynamo's callback for frames of the calling thread; ``None`` where it is inactive."""
_disable: Callable[..., Any] = torch._disable_dynamo  # type: ignore[attr-defined, unused-ignore]


@functools.cache
def _skip(rules: Any) -> None:
    rules.add(__name__.partition(".")[0])


def keep_out() -> None:
    """Tell Dynamo, if it is loaded, to skip the files of this package. See NOTE [ Dynamo ]."""
    rules: Any = sys.modules.get("torch._dynamo.trace_rules")
    # Another thread may be loading it now.
    if rules is not None and hasattr(rules, "_recompile_re"):
        _skip(rules)


def untraced(function: Function) -> Function:
    """A function that Dynamo does not look into, nor at its callees.

    For functions called from a hook, or from code that is not traced. Where Dynamo traces the caller, it must be told
    by ``torch._disable_dynamo`` alone.
    """
    disabled = _disable(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if callback() is None else disabled)(*args, **kwargs)

    return call  # type: ignore[return-value]


# checkpointing

tree_leaves: Callable[[Any], list[Any]] = _pytree.tree_leaves
"""The leaves of nested lists, tuples, dictionaries and registered classes, in order."""
tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _pytree.tree_flatten
"""The leaves, and the structure around them."""
tree_unflatten: Callable[..., Any] = _pytree.tree_unflatten
"""The structure with these leaves: ``tree_unflatten(leaves, treespec)``."""
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""The version of a tensor: each in-place write raises it, also by a view."""
storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""A number of a storage: unique while the storage lives."""
base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""The tensor of which this one is a view, if it is one."""
node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""The number of an autograd node. Later nodes of a thread have higher ones."""
schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
"""The schema of an operator: its name, arguments and returns."""
overload_of: Callable[[Any], str] = operator.attrgetter("_overloadname")
"""The name of an overload: ``"default"``, ``"Tensor"``."""
Overload = torch._ops.OpOverload
"""The class of operators: ``torch.ops.aten.mm.default``."""
Overloads = torch._ops.OpOverloadPacket
"""The class of all overloads of an operator: ``torch.ops.aten.mm``."""
AnyOperator = torch._ops.OperatorBase
"""The base class of operators, also of those of higher order."""
LABEL_BEGINS: Any = torch.ops.profiler._record_function_enter_new.default
"""The operator that opens a label of ``torch.profiler.record_function``."""
LABEL_ENDS: Any = torch.ops.profiler._record_function_exit._RecordFunction
"""The operator that closes a label."""
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of active dispatch modes."""
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""The number of active function modes."""
function_mode_stack: Callable[[], list[Any]] = torch.overrides._get_current_function_mode_stack
"""The active function modes, from the outermost."""
disable_dispatch: Callable[[], AbstractContextManager[object]] = torch._C._DisableTorchDispatch
"""A context in which neither modes nor code of subclasses see operators."""
disable_modes: Callable[[], AbstractContextManager[object]] = _disable_current_modes
"""A context without dispatch modes. Code of subclasses runs."""
disable_function: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction
"""A context without ``__torch_function__``, of modes and of subclasses."""
disable_subclass_function: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunctionSubclass
"""A context without ``__torch_function__`` of subclasses."""
preserve_versions: Callable[..., AbstractContextManager[object]] = _unsafe_preserve_version_counter
"""A context after which these tensors (a tuple) have their versions from before it."""
copy_many: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copies the content of each tensor of the second list into its partner in the first one, in few kernels."""
is_plain_backward: Callable[[], bool] = torch.autograd._is_checkpoint_valid
"""Whether the running backward is a ``backward()`` without ``inputs=``."""
disable_dynamo: Callable[[Function], Function] = _disable
"""A function that Dynamo leaves out, also where it traces the caller."""
sharing_versions: Callable[[], AbstractContextManager[object]] = functools.partial(
    torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.ADInplaceOrView, False
)
"""A context below autograd in which an alias shares the version counter of its tensor, as it does above."""
dispatch_to_subclasses: Callable[[], AbstractContextManager[object]] = functools.partial(
    torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.Python, False
)
"""A context inside a dispatch mode in which the code of subclasses runs."""


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have the running backward call this at its end."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


def without_dynamo(function: Any) -> Any:
    """The function that ``torch.compile`` or ``torch.compiler.disable`` has wrapped, or the function itself."""
    return getattr(function, "_torchdynamo_orig_callable", function)


_PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)


def _reduced(put: Callable[..., object]) -> Callable[[Any], object]:
    return lambda allowed: put(*(allowed if isinstance(allowed, tuple) else (allowed,)))


KERNEL_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_mkldnn_deterministic, torch._C._set_mkldnn_deterministic),
    (torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch._C._get_cublas_allow_fp16_accumulation, torch._C._set_cublas_allow_fp16_accumulation),
    (
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
        _reduced(torch._C._set_cublas_allow_fp16_reduced_precision_reduction),
    ),
    (
        torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
        _reduced(torch._C._set_cublas_allow_bf16_reduced_precision_reduction),
    ),
    *(
        (
            functools.partial(torch._C._get_fp32_precision_getter, *place),
            functools.partial(torch._C._set_fp32_precision_setter, *place),
        )
        for place in _PRECISIONS
    ),
)
"""Getters and setters of the process's settings that choose kernels: attention, TF32, determinism."""
