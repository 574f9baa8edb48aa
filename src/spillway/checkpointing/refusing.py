"""What a second run reads: seen, or refused if it was written since the first one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spillway.checkpointing.refused import refuse_written
from spillway.regions.mode import OperatorMode
from spillway.regions.schema import facts_of
from spillway.regions.tensors import is_strided, split


class Reads(OperatorMode):  # type: ignore[no-untyped-call]
    """Sees which of some tensors operators read.

    Args:
        tensors: by names.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {each.untyped_storage()._cdata: name for name, each in tensors.items() if is_strided(each)}
        self.names: set[str] = {name for name, each in tensors.items() if not is_strided(each)}
        """Those of what was read, as far as that can be told."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not facts_of(func).is_view:
            for tensor in split(args, kwargs)[0]:
                if is_strided(tensor) and (name := self._names.get(tensor.untyped_storage()._cdata)) is not None:
                    self.names.add(name)
        return func(*args, **kwargs)


class Refusing(OperatorMode):  # type: ignore[no-untyped-call]
    """Sees what operators read.

    Args:
        written: tensors that were written, and their versions as they were.

    Raises:
        RecomputeError: from within an operator that reads one of them.
    """

    def __init__(self, written: Sequence[tuple[torch.Tensor, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._written = {
            tensor.untyped_storage()._cdata: (tensor, version) for tensor, version in written if is_strided(tensor)
        }
        self._refused: tuple[torch.Tensor, int] | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not facts_of(func).is_view:
            for tensor in split(args, kwargs)[0]:
                known = self._written.get(tensor.untyped_storage()._cdata) if is_strided(tensor) else None
                if known is not None:
                    self._refused = known
                    refuse_written(*known)
        return func(*args, **kwargs)

    def check(self) -> None:
        """The run has ended, though the function may have made nothing of what it was told."""
        if self._refused is not None:
            refuse_written(*self._refused)
