"""The module and the operator that run, and the list of the tensors that they would save.

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
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode, resolve_name

from spillway._torch import storage_key, storage_parts
from spillway.errors import UsageError
from spillway.saved_tensors.handles import KeptHandle, unpack
from spillway.saved_tensors.identity import is_parameter, reach, why_unmovable

Function = Callable[..., Any]


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
            for tensor in (*root.parameters(), *root.buffers()):
                # A lazy layer's parameter has no memory before the layer is called.
                if not is_lazy(tensor) and type(tensor.data) is torch.Tensor and tensor.layout is torch.strided:
                    self._parameter_storages.add(tensor.untyped_storage())
        self._stack.append(self._names.get(module, type(module).__name__))

    def _after(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() == self._thread and self._stack:
            self._stack.pop()


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


@dataclass(frozen=True, slots=True)
class SavedTensorReport:
    """One line of :func:`spillway.list_saved_tensors`: a tensor that autograd would save."""

    nbytes: int
    """Bytes that would be offloaded. 0 for an alias of bytes that are listed already."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    module: str
    """Dotted path of the module whose forward saved it; ``""`` is the model itself."""
    operator: str
    """The torch function that saved it, as ``torch.nn.functional.linear``."""
    moves: bool
    """Whether Spillway would offload it."""
    reason: str
    """Why, or why not."""


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
        A record for each saved tensor: bytes, module path, operator, whether it is worth offloading, and why not.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> [(line.operator, line.moves) for line in list_saved_tensors(layer, torch.ones(2, 4))]
        [('torch.nn.functional.linear', True)]
    """
    if not callable(model):
        raise UsageError(f"model: got {model!r:.200}, expected a torch.nn.Module, and then its arguments")
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
