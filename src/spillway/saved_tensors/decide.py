"""The decision about each saved storage, and what a policy can ask for: the module and the operator that saved it.

NOTE [ Module and operator ]

A pack hook sees a tensor and nothing else. More costs time, some 10 to 20 us for each operator and module call
(``benchmarks/overhead.py``), so it is installed only for policies that ask (``wants_modules``, ``wants_operators``):

* The **module path** comes from hooks on the calls of all modules. Paths are dotted names below the first
  module that is called inside the context.
* The **operator** comes from a ``TorchFunctionMode``, which sees the outermost call of a torch function. A
  dispatch mode would be too late: autograd saves an operator's inputs before any dispatch mode sees it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, resolve_name

from spillway._torch import storage_key, storage_parts
from spillway.errors import PolicyError
from spillway.policies import Keep, Policy, wants_modules, wants_operators
from spillway.saved_tensors.groups import Group, PassGroups
from spillway.saved_tensors.handles import KeptHandle, unpack
from spillway.saved_tensors.identity import StorageMarks, is_parameter, reach, why_unmovable
from spillway.types import Decision, SavedTensor, SavedTensorReport

Function = Callable[..., Any]

# A member of an enum costs a search of its class each time that it is named.
_KEEP, _OFFLOAD = Decision.KEEP, Decision.OFFLOAD


class Decider:
    """Decides by, in this order: the user's marks, the size, a given decision or the policy, the rules about groups."""

    def __init__(
        self,
        policy: Policy | None,
        groups: PassGroups,
        marks: StorageMarks[bool],
        *,
        min_bytes: int,
        tag: str | None,
        locator: Locator | None,
    ) -> None:
        self._policy = policy
        self._groups = groups
        self._marks = marks
        self._min_bytes = min_bytes
        self._tag = tag
        self._locator = locator
        self._count = 0
        self._part_of: type[torch.Tensor] | None = None
        self.offloaded_bytes = 0
        """Bytes offloaded so far, for the policy to read. An adapter may reset it."""
        self.total_bytes: int | None = None
        """Bytes that the last similar pass saved, for the policy to read."""

    @contextmanager
    def inside(self, wrapper: type[torch.Tensor]) -> Iterator[None]:
        """Inside, decisions are about parts of a wrapper subclass."""
        outer, self._part_of = self._part_of, wrapper
        try:
            yield
        finally:
            self._part_of = outer

    @property
    def keeps_all(self) -> bool:
        return isinstance(self._policy, Keep) and self._groups.rules is None

    def pass_over(self) -> None:
        """The next storage is decided elsewhere."""
        self._count += 1

    def __call__(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        nbytes: int,
        decided: Decision | None,
        group: Group | None,
    ) -> Decision:
        """The decision about ``nbytes`` of a storage, for the first tensor over them that was saved."""
        position = self._count
        self._count += 1
        marked = self._marks.get(storage)
        if marked is not None:
            return _OFFLOAD if marked else _KEEP
        if nbytes < self._min_bytes:
            return _KEEP
        if decided is not None:
            return decided if group is None else self._in_group(group, nbytes, decided)
        if self._policy is None:
            return self._in_group(group, nbytes, _OFFLOAD)
        module, function = self._locator.here() if self._locator is not None else (None, None)
        saved = SavedTensor(
            nbytes,
            tensor.shape,
            tensor.dtype,
            tensor.device,
            position,
            self._tag,
            self.offloaded_bytes,
            self.total_bytes,
            module,
            function,
            self._part_of,
            None if group is None else group.name,
        )
        decision = self._policy(saved)
        if not isinstance(decision, Decision) or decision is Decision.RECOMPUTE:
            raise PolicyError(
                f"policy {self._policy!r}: got {decision!r} for {saved}, expected a spillway.Decision; return one of "
                f"{', '.join(str(member) for member in Decision if member is not Decision.RECOMPUTE)}. To recompute, "
                f"use spillway.recompute."
            )
        return self._in_group(group, nbytes, decision)

    def _in_group(self, group: Group | None, nbytes: int, decision: Decision) -> Decision:
        """Apply the rules about groups to a decision to offload."""
        if decision is _KEEP:
            return decision
        if group is not None:
            group.nbytes += nbytes
            group.count += 1
        return _KEEP if self._groups.stays(group) else decision


class Locator:
    """Knows, while it is entered, the running module and operator of the thread. See NOTE [ Module and operator ].

    Paths begin below ``root``, or below the first module that is called.
    """

    def __init__(self, *, modules: bool, operators: bool, root: torch.nn.Module | None = None) -> None:
        self._wants_modules = modules
        self._root = root
        self._operators = _Operators() if operators else None
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
        self._parameter_storages: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._stack: list[str] = []
        self._exit = ExitStack()
        self._thread = 0

    @classmethod
    def for_policy(cls, policy: Policy | None) -> Locator | None:
        """A locator that knows as much as the policy asks for; ``None`` if it asks for nothing."""
        modules, operators = wants_modules(policy), wants_operators(policy)
        return cls(modules=modules, operators=operators) if modules or operators else None

    def here(self) -> tuple[str | None, str | None]:
        """Path of the running module and name of the running operator; ``None`` for what was not asked for."""
        module = (self._stack[-1] if self._stack else "") if self._wants_modules else None
        operator = self._operators.name() if self._operators is not None else None
        return module, operator

    def is_parameter_storage(self, storage: torch.UntypedStorage) -> bool:
        """Whether it is the storage of a parameter or buffer of a module that was called."""
        return storage in self._parameter_storages

    def __enter__(self) -> Locator:
        self._thread = threading.get_ident()
        with ExitStack() as stack:
            if self._wants_modules:
                stack.callback(register_module_forward_pre_hook(self._before).remove)
                stack.callback(register_module_forward_hook(self._after, always_call=True).remove)
            if self._operators is not None:
                stack.enter_context(self._operators)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._exit.__exit__(*error)
        self._stack.clear()

    def _before(self, module: torch.nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self._stack and (self._root is None or not self._names):
            root = module if self._root is None else self._root
            for name, child in root.named_modules():
                self._names[child] = name
            self._remember_parameters(root)
        self._stack.append(self._names.get(module, type(module).__name__))

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._stack:
            self._stack.pop()

    def _remember_parameters(self, root: torch.nn.Module) -> None:
        for tensor in (*root.parameters(), *root.buffers()):
            # A lazy layer's parameter has no memory before the layer is called.
            if not is_lazy(tensor) and type(tensor.data) is torch.Tensor and tensor.layout is torch.strided:
                self._parameter_storages.add(tensor.untyped_storage())


class _Operators(TorchFunctionMode):
    """Remembers the running torch function."""

    def __init__(self) -> None:
        super().__init__()
        self._running: list[Function] = []

    def name(self) -> str:
        """``torch.nn.functional.linear``, or ``""`` outside of any torch function (a custom autograd function)."""
        if not self._running:
            return ""
        return resolve_name(self._running[-1]) or repr(self._running[-1])

    def __torch_function__(
        self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._running.append(func)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._running.pop()


def list_saved_tensors(model: torch.nn.Module, *args: Any, **kwargs: Any) -> list[SavedTensorReport]:
    """Run one forward and list the tensors that autograd saves, in order. Nothing is offloaded.

    The operator is the outermost torch function that ran; ``""`` for a custom ``autograd.Function``. Small tensors are
    listed as movable: ``min_bytes`` belongs to the context.

    Args:
        model: called as ``model(*args, **kwargs)`` with gradients on. Its buffers may change (batch norm), as in any
            forward.
        *args: its arguments.
        **kwargs: its keyword arguments.

    Returns:
        A record for each saved tensor: bytes, module path, operator, whether Spillway would offload it, and why not.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> [(line.operator, line.moves) for line in list_saved_tensors(layer, torch.ones(2, 4))]
        [('torch.nn.functional.linear', True)]
    """
    lines: list[SavedTensorReport] = []
    # Holding the storages keeps each address unique.
    seen: dict[int, torch.UntypedStorage] = {}
    locator = Locator(modules=True, operators=True)

    def pack(tensor: torch.Tensor) -> KeptHandle:
        module, operator = locator.here()
        for part in storage_parts(tensor):
            nbytes, moves, reason = _judge(tensor, part, locator, seen)
            lines.append(
                SavedTensorReport(
                    nbytes, tuple(part.shape), part.dtype, part.device, module or "", operator or "", moves, reason
                )
            )
        return KeptHandle(tensor)

    with torch.enable_grad(), locator, saved_tensors_hooks(pack, unpack):
        model(*args, **kwargs)
    return lines


def _judge(
    whole: torch.Tensor, part: torch.Tensor, locator: Locator, seen: dict[int, torch.UntypedStorage]
) -> tuple[int, bool, str]:
    """Bytes to offload for a part of a saved tensor, whether it would be offloaded, and why (not)."""
    if is_parameter(whole):
        return 0, False, "a parameter or buffer, or a view of one"
    reason = why_unmovable(part)
    if reason is not None:
        return part.numel() * part.element_size(), False, reason
    storage = part.untyped_storage()
    if locator.is_parameter_storage(storage):
        return 0, False, "an alias of a parameter or buffer"
    if storage_key(storage) in seen:
        return 0, True, "shares its bytes with one above"
    seen[storage_key(storage)] = storage
    return reach(part, storage.nbytes())[1], True, "saved for the first time"
