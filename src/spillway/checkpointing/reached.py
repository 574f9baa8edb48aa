"""Tensors that a checkpointed function reaches besides its arguments: parameters, buffers, others in its Python state.

NOTE [ Tensors that a function writes ]

A replay must read the contents of forward, and leave no trace. Forward notes the version of each reached tensor before
and after. It also copies small ones that need no gradient, and those that earlier calls were seen to write: some
functions write a buffer now and then only, and batch-norm kernels write without a new version. Copies of up to 64 KiB
are held until backward, since a later call may have written statistics so.

If forward has written any, the replay starts from the copies. After the replay, contents and versions are those from
before it. So if a replay saves a buffer, backward reads the buffer's content of that moment, as in plain PyTorch: batch
norm without training does so with its statistics.

If forward has written a tensor without a copy (a large one, for the first time), it cannot be put back. In a call that
is compared in full, the comparison decides whether that matters. In another call the replay is refused if it reads it.

NOTE [ Tensors written since forward ]

A replay must not read a tensor that was written after forward. A dispatch mode sees the reads of operators. Under a
mode torch takes other kernels for a few operators (NOTE [ Recording ] in ``recorder.py``). If the replay runs one of
them, it is refused, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from spillway._torch import copy_many, preserve_versions, storage_key, version_of
from spillway.checkpointing.ambient import replay_lock
from spillway.checkpointing.checks import has_content_of
from spillway.checkpointing.schema import facts_of, is_chosen_under_a_mode
from spillway.checkpointing.tensors import OperatorMode, below_modes, has_bits, is_plain, is_strided, tensors_in
from spillway.errors import RecomputeError
from spillway.runtime.bytes import over

if TYPE_CHECKING:
    from spillway.checkpointing.learned import LearnedCalls

_MOST_OBSERVED, _MOST_COPIED = 64 << 20, 1 << 20
"""Most bytes of a tensor that is copied in case the function writes it, in observed calls and in others."""
_MOST_HELD = 64 << 10
"""Most bytes of a tensor that the function did not write, and whose copy is held until backward."""


class ReachedTensors:
    """The reached tensors of one call, with their names. See NOTE [ Tensors that a function writes ]."""

    def __init__(
        self,
        named: Sequence[tuple[str, torch.Tensor]],
        learned: LearnedCalls,
        subclass: torch.Tensor | None,
        *,
        is_observed: bool,
        is_compared: bool,
    ) -> None:
        self._named = named
        self._learned = learned
        self._is_observed, self._is_compared = is_observed, is_compared
        self._subclass = subclass
        written, most = learned.written, _MOST_OBSERVED if is_observed else _MOST_COPIED
        self._copied = [
            tensor for name, tensor in named if may_be_written(tensor, most) or (written and name in written)
        ]
        """Tensors that are copied in forward and protected in the replay."""
        # A replay of another thread changes their content and versions for a moment, under this lock.
        self._lock: AbstractContextManager[object] = replay_lock if self._copied else nullcontext()
        with self._lock:
            self._versions = [version_of(tensor) for _, tensor in named]
            self._before = list(zip(self._copied, copies_of(self._copied), strict=True)) if self._copied else []
        self._unwritten: list[torch.Tensor] = []
        """Tensors that forward did not write."""
        self._versions_after: list[int] = []
        self._lost: list[torch.Tensor] = []
        """Tensors that forward wrote, without a copy."""

    def forward_ended(self) -> None:
        """Find out what forward has written."""
        named, versions, learned = self._named, self._versions, self._learned
        self._named, self._versions = (), []
        with self._lock:
            after = [version_of(tensor) for _, tensor in named]
        wrote = set() if after == versions else {i for i, version in enumerate(after) if version != versions[i]}
        if self._is_observed and self._before:
            differ = {id(tensor) for tensor, before in self._before if not has_content_of(tensor, before)}
            wrote |= {place for place, (_, tensor) in enumerate(named) if id(tensor) in differ}
        if wrote:
            learned.written |= {named[place][0] for place in wrote}
            copied = {id(tensor) for tensor, _ in self._before}
            self._lost = [named[place][1] for place in wrote if id(named[place][1]) not in copied]
        elif not (self._is_compared or (learned.written and any(name in learned.written for name, _ in named))):
            # A comparison would see writes without a new version. Later calls of batch norm write small tensors so.
            self._before = [pair for pair in self._before if pair[1].nbytes <= _MOST_HELD]
        self._unwritten = [tensor for place, (_, tensor) in enumerate(named) if place not in wrote]
        self._versions_after = [version for place, version in enumerate(after) if place not in wrote]

    def tensors(self) -> list[torch.Tensor]:
        found = {id(tensor): tensor for tensor in (*self._unwritten, *(tensor for tensor, _ in self._before))}
        return [*found.values(), *self._lost]

    def constants(self) -> list[torch.Tensor]:
        """In forward: tensors that need no gradient."""
        return [tensor for _, tensor in self._named if not tensor.requires_grad]

    def changed(self) -> list[tuple[torch.Tensor, int]]:
        """Tensors that cannot be put back to what forward read, with their versions in forward."""
        # A replay in another thread raises versions for a moment, under this lock.
        with replay_lock:
            now = zip(self._unwritten, self._versions_after, strict=True)
            changed = [(tensor, version) for tensor, version in now if version_of(tensor) != version]
        return changed if self._is_observed else [*changed, *((tensor, -1) for tensor in self._lost)]

    def protected(self) -> list[torch.Tensor]:
        """Tensors whose current content is restored after a replay."""
        return [*self._copied, *self._lost]

    def storages(self) -> set[int]:
        return {storage_key(each.untyped_storage()) for each in self.protected() if is_strided(each)}

    @contextmanager
    def as_before(self, has_run: Callable[[], object]) -> Iterator[None]:
        """A context in which tensors have their contents from before forward. It restores the current ones.

        Before that, it calls ``has_run``: contents are compared first.
        """
        protected, now = self.protected(), []
        if protected:
            with below_modes(self._subclass):
                # A tensor that other code has written since is refused, not put back: autograd would raise an error.
                changed = {id(tensor) for tensor, _ in self.changed()}
                # Aliases, since the function may give a tensor other memory or strides.
                now = list(zip([each.detach() for each in protected], copies_of(protected), strict=True))
                write_back([pair for pair in self._before if id(pair[0]) not in changed])
        try:
            with preserve_versions(tuple(protected)) if protected else nullcontext():
                try:
                    yield
                finally:
                    has_run()
        finally:
            with below_modes(self._subclass):
                write_back(now)


def may_be_written(tensor: torch.Tensor, most: int) -> bool:
    """Whether a function may write this tensor in place, and a copy takes at most so many bytes."""
    # Frozen parameters may be many. Writes to them are noticed by their versions.
    is_parameter = type(tensor) is torch.nn.Parameter or (tensor.requires_grad and tensor.is_leaf)
    if is_parameter or not is_strided(tensor) or not has_bits(tensor):
        return False
    # Torch refuses to write elements that share memory.
    return tensor.untyped_storage().nbytes() <= most and (tensor.is_contiguous() or 0 not in tensor.stride())


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, without history."""
    with torch.no_grad():
        if not is_plain(tensor) or tensor.is_conj() or tensor.is_neg():
            return tensor.detach().clone()
        storage = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call, unused-ignore]
        return over(storage, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())


def overlap(tensors: Sequence[torch.Tensor], places: Iterable[int]) -> bool:
    """Whether a tensor at one of these places shares memory with another tensor. Two storages may lie in one memory."""
    spans = [_span_of(tensor) for tensor in tensors]
    return any(
        place != other and spans[place][0] < span[1] and span[0] < spans[place][1]
        for place in places
        if place < len(spans)
        for other, span in enumerate(spans)
    )


def _span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses of its first byte, and after its last one."""
    if not is_plain(tensor) or not has_bits(tensor) or not tensor.numel():
        return 0, 0
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """:func:`copy_of` each. Contiguous tensors become contiguous ones."""
    copies = [torch.empty_like(each.detach()) if _is_simple(each) else copy_of(each) for each in tensors]
    _copy([(copy, each) for copy, each in zip(copies, tensors, strict=True) if _is_simple(each)])
    return copies


def write_back(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give tensors their earlier content, without a new version."""
    if pairs:
        with preserve_versions(tuple(tensor for tensor, _ in pairs)):
            _copy(pairs)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy contents, with one kernel for many small tensors: a batch norm has three."""
    several: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    with torch.no_grad():
        for target, content in pairs:
            if _is_simple(target):
                targets, contents = several.setdefault((target.dtype, target.device), ([], []))
                targets.append(target.detach())
                contents.append(content.detach())
            else:
                target.detach().copy_(content)
        for targets, contents in several.values():
            copy_many(targets, contents)


def _is_simple(tensor: torch.Tensor) -> bool:
    """Whether it is contiguous, and nothing but its bytes."""
    return is_plain(tensor) and tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def why_refused(tensor: torch.Tensor, version: int) -> str:
    """The message for a tensor that was written after the function had read it."""
    return (
        f"A tensor of shape {list(tensor.shape)} and dtype {tensor.dtype} was written in place (version "
        f"{version_of(tensor)}, expected {version}) after a checkpointed function had read it. The function cannot be "
        f"recomputed from the new content. Write into a copy, or save or offload the outputs that depend on it."
    )


class ReadMode(OperatorMode):  # type: ignore[no-untyped-call]
    """Refuses reads of tensors that were written since forward. See NOTE [ Tensors written since forward ].

    ``changed`` are these tensors, with their versions in forward.
    """

    def __init__(self, changed: Iterable[tuple[torch.Tensor, int]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._changed = {storage_key(pair[0].untyped_storage()): pair for pair in changed if is_strided(pair[0])}
        self.refused = ""
        """Why the replay is refused. The function may catch the error, or make another one of it."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._changed and is_chosen_under_a_mode(func, args):
            tensor, _ = next(iter(self._changed.values()))
            self._refuse(
                f"A tensor of shape {list(tensor.shape)} was written in place after a checkpointed function had run. "
                f"Spillway cannot find out whether the function reads it, since {func} takes another kernel when its "
                f"reads are observed. Write after backward, or into a copy."
            )
        if not facts_of(func).is_view:
            for tensor in tensors_in((*args, *kwargs.values())):
                known = self._changed.get(storage_key(tensor.untyped_storage())) if is_strided(tensor) else None
                if known is not None:
                    self._refuse(why_refused(*known))
        return func(*args, **kwargs)

    def _refuse(self, why: str) -> NoReturn:
        self.refused = self.refused or why
        raise RecomputeError(why)
