"""Torch's private names that this package uses, in one place.

NOTE [ Sharded parameters ]

A parameter that FSDP2 gathers is a ``Parameter``, and views of it have it as their base. Two kinds of aliases do not
show that, and an operator may save them:

* ``weight.detach()`` under ``fully_shard``. Its storage shrinks to nothing when the parameters are resharded, at the
  end of the module's forward, and is filled again before backward. A copy under way must not lose its bytes, and
  backward must never get a copy of it. Torch has no public way to recognise it, so FSDP2's own records are read.
* ``weight.to_local()`` of a ``DTensor``: a view of the local shard, which is a plain tensor.

NOTE [ Dynamo ]

Below a compiled frame, Dynamo looks at every Python function that runs eagerly, hooks and finalisers too, and would
compile them. If it is loaded, it is told once to skip the files of this package. Loading it for that would take
seconds. Disabling Dynamo for a call costs more CPU time than many calls here, so that is done only while it is active.
"""

from __future__ import annotations

import functools
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn import Module
from torch.nn.modules.module import _global_forward_pre_hooks, _has_any_global_hook
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only
from torch.utils.checkpoint import GraphExecGroup
from torch.utils.hooks import RemovableHandle

from spillway.errors import UnsupportedError

# The graph of autograd.

next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the next autograd node of the calling thread."""
graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the running backward of the calling thread; -1 for none."""
node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")
"""The number of an autograd node, whose Python object may be made again. Later nodes of a thread have higher ones."""
base_of: Callable[[torch.Tensor], torch.Tensor | None] = operator.attrgetter("_base")
"""The tensor that a tensor is a view of, or ``None``."""
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""How often autograd saw a tensor written in place. An inference tensor has none."""
preserve_versions: Callable[..., AbstractContextManager[object]] = _unsafe_preserve_version_counter
"""A context after which these tensors (a tuple) have their versions from before it."""
sharing_versions: Callable[[], AbstractContextManager[object]] = functools.partial(
    torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.ADInplaceOrView, False
)
"""A context below autograd in which an alias shares the version counter of its tensor, as it does above."""
below_autograd = torch._C._AutoDispatchBelowAutograd
"""A context in which operators skip autograd, whose graph has no node for them."""
exec_group: Callable[[], GraphExecGroup | None] = GraphExecGroup._get_current_group
"""The ``GraphExecGroup`` that the calling thread is in, or ``None``."""


def in_backward() -> bool:
    """Whether the calling thread is inside a backward."""
    return graph_task() != -1


at_end_of_backward: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback
"""Inside a backward: calls a function when it ends."""


# Saved-tensor hooks.

Hooks = tuple[Callable[..., Any], Callable[..., Any]]
top_hooks: Callable[[bool], Hooks | None] = _top_saved_tensors_default_hooks
"""The innermost saved-tensor hooks; the argument is always True."""
pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
push_hooks: Callable[..., None] = torch._C._autograd._push_saved_tensors_default_hooks
why_hooks_are_disabled: Callable[[], str | None] = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


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


def refuse_dual_numbers() -> None:
    """Raise :class:`~spillway.errors.UnsupportedError` inside of forward-mode differentiation."""
    if torch.autograd.forward_ad._current_level >= 0:
        raise UnsupportedError(
            "got a recomputed function inside of torch.autograd.forward_ad.dual_level, expected plain autograd: a "
            "recomputation has no tangents. Call the function itself there; spillway.offload works with dual numbers"
        )


next_hook: Callable[[], int] = functools.partial(getattr, RemovableHandle, "next_id")
"""The number of the next hook of any tensor, node or module of the process."""
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks"), (*(name for name in vars(Module()) if "_hooks" in name),)


def remove_hooks(owner: torch.Tensor | Module, first: int) -> None:
    """Remove hooks with this number or a later one: those of a tensor's gradient and of its node, or of a module."""
    found: list[Any] = [getattr(owner, name) for name in _HOOKS[isinstance(owner, Module)]]
    if isinstance(owner, torch.Tensor) and owner.requires_grad:
        node = torch.autograd.graph.get_gradient_edge(owner).node
        # The handle of one hook of a node refers to all of that kind.
        handles = node.register_hook(print), node.register_prehook(print)
        found += [each.hooks_dict_ref() for each in handles]
    for hooks in found:
        for number in [each for each in hooks or () if isinstance(each, int) and each >= first]:
            del hooks[number]


is_zero_tensor: Callable[[torch.Tensor], bool] = torch.Tensor._is_zerotensor
"""Whether a tensor is one of autograd's, which are zero and have no memory."""


# Modes and transforms.

dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many dispatch modes are active in the calling thread."""
disable_dispatch = torch._C._DisableTorchDispatch
"""A context without dispatch modes and without ``__torch_dispatch__`` of subclasses."""
disable_modes: Callable[[], AbstractContextManager[object]] = _disable_current_modes
"""A context without dispatch modes."""
function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""The number of active function modes."""
function_mode_stack: Callable[[], list[Any]] = _get_current_function_mode_stack
"""The active function modes, from the outermost."""
disable_function: Callable[[], AbstractContextManager[object]] = torch._C.DisableTorchFunction
"""A context without ``__torch_function__``, of modes and of subclasses."""


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, modes of the caller's do not see what is done: it is no part of the model."""
    with torch.inference_mode(mode=False), disable_dispatch(), disable_function():
        yield


def has_function_modes() -> bool:
    """Whether a ``TorchFunctionMode`` other than that of ``with device:`` sees torch's functions."""
    return any(not isinstance(mode, DeviceContext) for mode in function_mode_stack())


def is_transformed() -> bool:
    """Whether a ``torch.func`` transform or forward-mode differentiation is active."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether ``vmap`` stands behind a tensor: its shape lacks a dimension."""
    functorch: Any = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


# Tensors and storages.

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""The number of a storage, the same for all Python objects of it. A later storage may get it again."""
is_alias_of: Callable[[torch.Tensor, torch.Tensor], bool] = torch._C._is_alias_of  # type: ignore[attr-defined]
"""Whether two tensors share a storage."""
set_conj: Callable[[torch.Tensor, bool], None] = torch._C._set_conj
"""Set a tensor's conjugate bit, in place."""
set_neg: Callable[[torch.Tensor, bool], None] = torch._C._set_neg
"""Set a tensor's negative bit, in place."""
sparse_values: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._values
"""The values of a sparse tensor, sharing its memory, also of one that is not coalesced."""
copy_many: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copies the content of each tensor of the second list into its partner in the first one, in few kernels."""
foreach_norm: Callable[..., tuple[torch.Tensor, ...]] = torch._foreach_norm
"""Norms of a list of tensors, by the kernel of ``clip_grad_norm_``: ``foreach_norm(tensors, order, dtype=...)``."""


def is_declared(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a ``torch.nn.Parameter`` or a ``torch.nn.Buffer``."""
    # `isinstance` asks a metaclass, which costs a microsecond, and a plain tensor is no parameter.
    if type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter):
        return True
    return bool(getattr(tensor, "_is_buffer", False))


def holders_of(tensor: torch.Tensor) -> tuple[int, int]:
    """How many tensors and names hold the tensor's storage, and how many hold the tensor itself.

    Both count a call's own references: one for the storage's Python object, one for the tensor's.
    """
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata), tensor._use_count()  # type: ignore[attr-defined]


current_node: Callable[[], torch.autograd.graph.Node | None] = torch._C._current_autograd_node
"""The node of a graph whose backward runs in this thread."""


refuse_access: Callable[[torch.UntypedStorage, str], None] | None = None
"""Let all access to a storage's bytes raise a ``RuntimeError`` with a text; ``None``: this torch cannot."""
allow_access: Callable[[torch.UntypedStorage], None] | None = None
"""Allow access again."""
if hasattr(torch._C, "_set_storage_data_ptr_access_error_msg") and hasattr(
    torch._C, "_clear_storage_data_ptr_access_error_msg"
):

    def refuse_access(storage: torch.UntypedStorage, text: str) -> None:
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, text)

    def allow_access(storage: torch.UntypedStorage) -> None:
        torch._C._clear_storage_data_ptr_access_error_msg(storage._cdata)


def nested_size(tensor: torch.Tensor) -> list[list[int]]:
    """The sizes of the parts of a strided nested tensor."""
    return tensor._nested_tensor_size().tolist()


# Wrapper subclasses.

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""A tensor of a subclass without bytes of its own: ``make_wrapper(cls, size, dtype=, device=, strides=)``."""


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


# Containers.

tree_flatten: Callable[[Any], tuple[list[Any], Any]] = _pytree.tree_flatten
"""The leaves, and the structure around them."""
tree_unflatten: Callable[..., Any] = _pytree.tree_unflatten
"""The structure with these leaves: ``tree_unflatten(leaves, treespec)``."""
tree_map: Callable[[Callable[[Any], Any], Any], Any] = _pytree.tree_map
"""The same containers with the function's results for leaves."""


# Operators.

Overload = torch._ops.OpOverload
"""The class of operators as a dispatch mode gets them."""
Overloads = torch._ops.OpOverloadPacket
"""The class of all overloads of an operator: ``torch.ops.aten.mm``."""
AnyOperator = torch._ops.OperatorBase
"""The base class of operators, also of those of higher order."""
schema_of: Callable[[Any], torch.FunctionSchema] = operator.attrgetter("_schema")
"""The schema of an operator, which tells what it writes and what it aliases."""
arguments_of: Callable[[Any], list[Any]] = operator.attrgetter("_schema.arguments")
"""The declared arguments of an operator, each with a ``name``."""
overload_of: Callable[[Any], str] = operator.attrgetter("_overloadname")
"""The name of an overload: ``"default"``, ``"Tensor"``."""
LABEL_BEGINS: Any = torch.ops.profiler._record_function_enter_new.default
"""The operator that opens a label of ``torch.profiler.record_function``."""
LABEL_ENDS: Any = torch.ops.profiler._record_function_exit._RecordFunction
"""The operator that closes a label."""


def composite(overload: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the kernel of a composite operator for all devices. ``decompose`` would run another one, for compilers."""
    return overload._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


end_library: Callable[[torch.library.Library], None] = operator.methodcaller("_destroy")
"""Takes a library's kernels out of torch's table again."""


# Modules.

own_call: Callable[[Module], Callable[..., Any]] = operator.attrgetter("_call_impl")
"""The call of a module with its hooks, whatever replaces ``Module.__call__``."""
call_code: types.CodeType = Module._call_impl.__code__
"""The code of :data:`own_call`, whose frame has the called module as ``self``."""
PLACE = "_compiled_call_impl"
"""The attribute of a module that ``Module.__call__`` calls instead of itself, unless it is ``None``."""
CALLING: types.CodeType = Module._wrapped_call_impl.__code__
"""The code of ``Module.__call__``, whose frame has the called module as ``self``."""
IS_REPLICA = "_is_replica"
"""The attribute that ``DataParallel`` sets in the dictionary of a replica."""
COMPILED_MODULE = "torch._dynamo.eval_frame", "OptimizedModule"
"""Home and name of the class of ``torch.compile(module)``, whose child ``_orig_mod`` is the module."""
CHECKPOINT_WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "CheckpointWrapper"
"""Home and name of the class of FSDP's ``checkpoint_wrapper``."""
children_of: Callable[[Module], dict[str, Module | None]] = operator.attrgetter("_modules")
"""The modules of a module by their keys, the same one under several keys, too."""
hooks_of: Callable[[Module], tuple[dict[int, Any], ...]] = operator.attrgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
)
"""The hooks of a module around its forward and its backward."""
global_pre_hooks: dict[int, Callable[..., Any]] = _global_forward_pre_hooks
"""The hooks that every module calls before its forward."""
has_global_hook: Callable[[], bool] = _has_any_global_hook
"""Whether every module has some hook."""


# Compilers and tracers.

Function = TypeVar("Function", bound=Callable[..., Any])
callback: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback  # type: ignore[attr-defined, unused-ignore]
"""Dynamo's callback for frames of the calling thread; ``None`` where it is inactive."""
disable_dynamo: Callable[..., Any] = torch._disable_dynamo  # type: ignore[attr-defined, unused-ignore]
"""Gives a function that Dynamo leaves out, also where it traces the caller."""
tracing_state: Callable[[], object] = torch._C._get_tracing_state
"""The state of ``torch.jit.trace`` in the calling thread; ``None``: it does not trace."""
is_fx_tracing: Callable[[], bool] = is_fx_symbolic_tracing
"""Whether ``torch.fx`` traces."""


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
    disabled = disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if callback() is None else disabled)(*args, **kwargs)

    return call  # type: ignore[return-value]


def skip_call(function: Callable[..., Any]) -> None:
    """Tell Dynamo not to trace a function itself. It still traces the functions that are called inside."""
    # Slow to import. torch.compiler.disable(recursive=False) would forbid exporting.
    from torch._dynamo.decorators import skip

    skip(function)


def without_dynamo(function: Any) -> Any:
    """The function that ``torch.compile`` or ``torch.compiler.disable`` has wrapped, or the function itself."""
    return getattr(function, "_torchdynamo_orig_callable", function)


# Devices.

is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler of torch records the calling thread."""
stream_handle: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
"""The driver's handle of the calling thread's current stream on a CUDA device, by its number."""
current_device: Callable[[], int] | None = getattr(torch._C, "_cuda_getDevice", None)
"""The number of the calling thread's current CUDA device."""
device_stats: Callable[[int], dict[str, Any]] = torch._C._accelerator_getDeviceStats
"""The allocator's counters of an accelerator, nested, unsorted: ``["allocated_bytes"]["all"]["current"]``."""
sleep_on_gpu: Callable[[int], None] = torch.cuda._sleep
"""Queue a kernel on the current CUDA device that takes so many clock cycles."""
_PRECISIONS = (
    *(("generic", "all"), ("cuda", "all"), ("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn")),
    *(("mkldnn", "all"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn")),
)


def older_precisions_fit() -> bool:
    """Whether torch lets the older settings of precision be read. It does not if the newer ones contradict them."""
    try:
        torch._C._get_float32_matmul_precision()
        torch._C._get_cublas_allow_tf32()
        torch._C._get_cudnn_allow_tf32()
    except RuntimeError:
        return False
    return True


def fit_older_precisions() -> None:
    """Set the older settings of precision to what the newer ones say, which stay as they are."""
    newer = {place: torch._C._get_fp32_precision_getter(*place) for place in _PRECISIONS}
    older = "medium" if newer["mkldnn", "matmul"] == "bf16" else "high"
    torch._C._set_float32_matmul_precision(older if newer["cuda", "matmul"] == "tf32" else "highest")
    torch._C._set_cudnn_allow_tf32(newer["cuda", "conv"] == newer["cuda", "rnn"] == "tf32")
    for place, precision in newer.items():
        if torch._C._get_fp32_precision_getter(*place) != precision:
            torch._C._set_fp32_precision_setter(*place, precision)


def _reduced(put: Callable[..., object]) -> Callable[[Any], object]:
    return lambda allowed: put(*(allowed if isinstance(allowed, tuple) else (allowed,)))


PARAMETRIZED = vars(parametrize), ("_cache",)
"""The namespace and the name of the dictionary of ``parametrize.cached()``: tensors that modules compute only once."""
caches_parametrized: Callable[[], int] = functools.partial(getattr, parametrize, "_cache_enabled")
"""How many contexts of ``parametrize.cached()`` are active."""
KERNEL_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (caches_parametrized, functools.partial(setattr, parametrize, "_cache_enabled")),
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
"""Getters and setters of the process's settings: kernels of attention, TF32, determinism; cached parametrizations."""


# Sharded parameters. See NOTE [ Sharded parameters ].

_STATES = "torch.distributed._composable_state"
_FSDP = "torch.distributed.fsdp._fully_shard._fsdp_param"
_DTENSOR = "torch.distributed.tensor"
_RECORDS = ("all_gather_outputs", "_unsharded_inner_tensors")
_MOST_NODES = 8
local_part: Callable[[torch.Tensor], Any] = operator.attrgetter("_local_tensor")
"""This process's part of a ``DTensor``: the object itself, which ``to_local`` may wrap. It may be under way."""


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
        for group in _groups(state):
            yield from group.fsdp_params


def _groups(state: Any) -> list[Any]:
    """The parameter groups of FSDP2's state of a module."""
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [getattr(state, "_fsdp_param_group", None)] if groups is None else groups
    return [group for group in groups if group is not None]


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


def set_local_part(distributed: torch.Tensor, local: torch.Tensor) -> None:
    """Give a ``DTensor`` another local part of the same shape."""
    distributed._local_tensor = local  # type: ignore[attr-defined]


def distributed_with(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A ``DTensor`` with this local part, sharded as another is. ``from_local`` would move it to the mesh's device."""
    make: Any = sys.modules[_DTENSOR].DTensor
    return make(local, like._spec, requires_grad=False)  # type: ignore[no-any-return, attr-defined]


# DDP, FSDP2, and what wraps a module for them.

_NAMES = {
    "DDP": ("_check_reducer_finalized", "_reset_state"),
    "FSDP2": ("fsdp_params", "mesh_info", "mp_policy", "gradient_divide_factor", "_partial_reduce_output"),
}
partial_reduction: Callable[[Any], torch.Tensor | None] = operator.attrgetter("_partial_reduce_output")
"""Gradients of a parameter group that FSDP2 has reduced over shards, and not yet over replicas: one flat buffer."""


def check_names(kind: str, owner: object) -> None:
    """Refuse a torch whose reducer of ``"DDP"``, or parameter group of ``"FSDP2"``, lacks names that are used here."""
    missing = [name for name in _NAMES[kind] if not hasattr(owner, name)]
    if missing:
        raise UnsupportedError(
            f"{kind} of torch {torch.__version__} has no {' and no '.join(missing)}, which accumulation reads. Use a "
            f"torch that Spillway was tested with."
        )


def check_reduced(module: Any) -> None:
    """Raise a ``RuntimeError`` if a DDP module left gradients unreduced in the last backward."""
    module.reducer._check_reducer_finalized()


def may_end_early(module: Any) -> bool:
    """Whether a DDP module is in ``join()``, and this rank does not hear of it when another one has no more inputs."""
    config = module._join_config
    return bool(config.enable and not config.throw_on_early_termination)


def reset_ddp(module: Any) -> None:
    """Let a DDP module run a forward again after a failed backward."""
    module.reducer._reset_state()


def fsdp_groups(modules: Iterable[Any]) -> list[Any]:
    """FSDP2's parameter groups of these modules, each once."""
    # Modules that are sharded together share their state.
    return list({id(group): group for module in modules for group in _groups(module._get_fsdp_state())}.values())


def is_idle(module: Any) -> bool:
    """Whether an FSDP2 module is in no forward or backward."""
    return module._get_fsdp_state()._training_state.name == "IDLE"  # type: ignore[no-any-return]


def drop_unreduced(group: Any) -> None:
    """Drop the gradients of a parameter group that FSDP2 has not reduced."""
    group._partial_reduce_output = None
    for each in group.fsdp_params:
        each.unsharded_accumulated_grad = None
        if hasattr(each, "_unsharded_param"):
            each._unsharded_param.grad = None


def reset_fsdp(modules: Iterable[Any]) -> None:
    """Reset FSDP2 modules after a failed forward or backward. Before torch 2.13, FSDP2 cannot use them any more."""
    for module in modules:
        if hasattr(module, "reset_iter_state") and module._get_fsdp_state()._is_root:
            module.reset_iter_state()


def active_ddp() -> Any:
    """The ``DistributedDataParallel`` whose forward the process is in, or ``None``."""
    module: Any = sys.modules.get("torch.nn.parallel.distributed")
    return None if module is None else module.DistributedDataParallel._get_active_ddp_module()


def group_of(collective: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The process group in which a call of a collective communicates; ``None`` if it only waits for another one."""
    distributed: Any = sys.modules["torch.distributed.distributed_c10d"]
    given = {**dict(zip((each.name for each in collective._schema.arguments), args, strict=False)), **kwargs}
    if "group_name" in given:
        return distributed._resolve_process_group(given["group_name"])
    return distributed.ProcessGroup.unbox(given["process_group"]) if "process_group" in given else None


def composed_with(module: Module) -> Any:
    """The names of what ``torch.distributed`` has composed a module with: ``"checkpoint"``, ``"replicate"``.

    FSDP2 modules may have the latter, too.
    """
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    return () if contract is None else contract._get_registry(module) or ()
