"""One call of a function that is recomputed with ``use_reentrant=True``.

NOTE [ A reentrant call ]

Forward runs the function without grad, so autograd saves nothing in it. Its outputs become outputs of one node. The
backward of that node runs the function again, with grad, on detached inputs and in the state of forward, and then runs
a backward of its own through that graph. Outputs are compared: number, shape, dtype and device in every call, values
in the first call and in samples of later ones.

NOTE [ Inputs that a function writes ]

If the function writes an input that requires grad, the input becomes an output of the node, too, for later reads. An
input, or another reached tensor, that requires no grad may get a history in a replay when the function writes into it.
Forward lost that history, so this is refused.

NOTE [ Histories that forward loses ]

A function may leave a result in an attribute, and read it in its next call. Forward leaves it without a history, and
the gradient through it would be lost. So if a replay leaves a tensor with a history in an attribute that had a tensor,
the function runs once more under a mode that sees whether it reads the former tensor. If so, it is refused.

NOTE [ Kernels without grad ]

Some operators take other kernels without grad (``eigvalsh``, transformer layers in eval mode), whose values differ in
the last bits. So if a replay gives other values, the function runs twice more without grad. If both runs give the
values of forward, later calls of the kind are not compared. (Twice, since a function may alternate from run to run.)

NOTE [ Ownership of reentrant calls ]

Autograd owns the call by a tensor without elements that the node saves: its pack hook returns the call. So the call
dies with the graph, and autograd refuses a second backward as for any other node. The node itself has a weak reference
to the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from spillway._torch import (
    base_of,
    is_plain_backward,
    storage_key,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
    untraced,
    version_of,
)
from spillway.checkpointing.checks import difference_error, fingerprints_of
from spillway.checkpointing.collector import Meta, meta_of, name_of, storages_of
from spillway.checkpointing.function import replay_argument
from spillway.checkpointing.reached import Copies, ReadMode, buffer_of, copy_of
from spillway.checkpointing.replayable import ReplayableCall
from spillway.checkpointing.tensors import PLAIN, below_modes, is_strided
from spillway.errors import RecomputeError, UnsupportedError
from spillway.saved_tensors.handles import KeptHandle, unpack

_NOTHING = nullcontext()


class ReentrantCall(ReplayableCall):
    """One call. See NOTE [ A reentrant call ]."""

    _metas: Sequence[Meta | None] = ()
    """Shape, dtype and device of each output; ``None``: no tensor."""
    _written: Sequence[int] = ()
    """Places of inputs that forward wrote. See NOTE [ Inputs that a function writes ]."""

    # Forward.

    def run(self, first: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> Any:
        """Run the function, by ``first`` with the caller's arguments. Outputs require grad even if no input does."""
        if not self._may_begin(tensors):
            return first()
        self._forward_begins(tensors)
        versions = [version_of(tensor) if tensor.requires_grad else -1 for tensor in tensors]
        output = None
        try:
            with torch.no_grad():
                output = first()
        finally:
            with below_modes(self._subclass):
                self._forward_ended(output, tensors)
        leaves, spec = tree_flatten(output)
        places = [place for place, v in enumerate(versions) if v != -1 and version_of(tensors[place]) != v]
        written = [self._may_be_output(tensors[place]) for place in places]
        known = {id(leaf) for leaf in leaves}
        self._written = [place for place in places if id(tensors[place]) not in known]
        self._metas = [_meta_of(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        # Parameters and buffers get no history.
        reached = {id(tensor) for tensor in self._reached.tensors()} - {id(tensor) for tensor in tensors}
        constants = [leaf for leaf in leaves if id(leaf) in reached and not leaf.requires_grad]
        leaves = [leaf.detach() if id(leaf) in reached and leaf.requires_grad else leaf for leaf in leaves]
        with below_modes():
            # Only a node with an input that requires grad is called in backward.
            start = torch.empty(0, requires_grad=not any(tensor.requires_grad for tensor in tensors))
        more = [tensors[place] for place in self._written]
        with saved_tensors_hooks(lambda _: self, lambda _: start):
            given = _Node.apply(  # type: ignore[no-untyped-call]
                weakref.ref(self), [*leaves, *more], constants, written, start, *tensors
            )
        return tree_unflatten(list(given[: len(leaves)]), spec)

    def _may_be_output(self, written: torch.Tensor) -> torch.Tensor:
        if base_of(written) is not None:
            raise UnsupportedError(
                f"{self._label} writes an argument in place that is a view of another tensor, which use_reentrant=True "
                f"does not support. Use use_reentrant=False, or give the function a clone."
            )
        return written

    # Backward.

    @untraced
    def gradients(self, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the function's tensors, from those of its outputs."""
        self._scope.was_recomputed = True
        try:
            replay = self._replay()
            self._learned.is_validated |= self._is_observed
            self._check_histories()
        finally:
            self._replay_ended()
        outputs = [*replay.leaves, *(replay.tensors[place] for place in self._written)]
        wanted = [place for place, output in enumerate(outputs) if given[place] is not None and _needs_grad(output)]
        if wanted:
            torch.autograd.backward([outputs[place] for place in wanted], [given[place] for place in wanted])
        return [tensor.grad for tensor in replay.inputs]

    def _replay(self) -> Replay:
        replay = self._run_again()
        if self._is_same(replay.leaves) or (self._compares and self._is_same_without_grad()):
            return replay
        other = self._other(replay.leaves)
        again = self._on_current_state(self._run_again) if self._compares else None
        if again is not None and self._is_same(again.leaves):
            return again
        if not other:
            raise difference_error([self._label])
        how = f"gave something else when it was recomputed than in its forward pass: {other}"
        raise difference_error([self._label], how)

    def _check_histories(self) -> None:
        """See NOTE [ Histories that forward loses ]."""
        if self._function.made:
            raise RecomputeError(
                f"{self._label}, recomputed with use_reentrant=True, makes {', '.join(self._function.made)} in its "
                f"forward. Backward would give the gradient to another tensor. Use use_reentrant=False, or call the "
                f"function once before."
            )
        found = {name: t for name, t in self._function.histories.items() if name not in self._learned.unread}
        if not found:
            return
        read = {name for name, tensor in found.items() if not is_strided(tensor)}
        self._run_again(mode=ReadMode([(tensor, name) for name, tensor in found.items()], read.add))
        if read:
            raise RecomputeError(
                f"{self._label}, recomputed with use_reentrant=True, keeps a tensor with a history in "
                f"{', '.join(sorted(read))}, which it reads in its next call. That mode loses the gradient "
                f"that goes through it. Use use_reentrant=False."
            )
        self._learned.unread |= found.keys()

    def _run_again(self, *, with_grad: bool = True, mode: AbstractContextManager[Any] = _NOTHING) -> Replay:
        reached = self._reached
        with below_modes(self._subclass):
            backs = zip(self._inputs_back(), self._tensors, strict=True)
            pairs = [replay_argument(tensor, needs_grad, written) for tensor, (*_, needs_grad, written) in backs]
        inputs, tensors = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        had = {id(tensor) for tensor in (*tensors, *reached.protected()) if tensor.requires_grad}
        written: list[torch.Tensor] = []
        buffers: Copies = {}

        def has_run(others: Iterable[torch.Tensor], copies: Copies) -> None:
            buffers.update(copies)
            arguments = (t for t, each in zip(tensors, self._tensors, strict=True) if each[-1])
            written.extend(t for t in (*arguments, *others) if t.requires_grad and id(t) not in had)

        def live(handle: KeptHandle) -> torch.Tensor:
            # See NOTE [ Saved buffers ].
            tensor = unpack(handle)
            buffer = buffer_of(tensor, buffers) if buffers else None
            return tensor if buffer is None else buffer

        with (
            self._as_of_forward(tensors, reached.changed()) as within,
            saved_tensors_hooks(self._packing([*inputs, *tensors, *reached.tensors()]), live),
            torch.set_grad_enabled(with_grad),
            mode,
        ):
            leaves = tree_leaves(self._function(*tensors, within=within(has_run)))
        for tensor in written:
            tensor.detach_()
        if written:
            raise RecomputeError(
                f"{self._label} writes something with a history into an argument or a tensor of its own that requires "
                f"no grad. With use_reentrant=True, forward loses that history. Use use_reentrant=False."
            )
        return Replay(inputs, tensors, leaves)

    def _packing(self, known: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], KeptHandle]:
        """The pack hook of a replay. ``known`` are tensors that exist without it."""
        ledger, counted, written = self._scope.ledger, set(storages_of(known)), self._reached.storages()

        def pack(tensor: torch.Tensor) -> KeptHandle:
            with below_modes(tensor):
                if type(tensor) not in PLAIN or not is_strided(tensor):
                    return KeptHandle(tensor)
                storage = tensor.untyped_storage()
                if storage_key(storage) in written:
                    # Its current content is restored after the replay.
                    return KeptHandle(copy_of(tensor))
                if storage_key(storage) not in counted:
                    counted.add(storage_key(storage))
                    ledger.recomputed_bytes += storage.nbytes()
                return KeptHandle(tensor)

        return pack

    # Comparison.

    def _is_same(self, leaves: Sequence[Any]) -> bool:
        """Whether the outputs are those of forward, as far as they are compared."""
        if self._other(leaves):
            return False
        if not self._compares or self._learned.has_other_kernels:
            return True
        found = fingerprints_of(leaves)
        return len(found) == len(self._output_fingerprints) and all(
            a is None or b is None or torch.equal(a, b) for a, b in zip(found, self._output_fingerprints, strict=True)
        )

    def _is_same_without_grad(self) -> bool:
        """See NOTE [ Kernels without grad ]."""
        if not all(self._is_same(self._run_again(with_grad=False).leaves) for _ in range(2)):
            return False
        self._learned.has_other_kernels = True
        self._scope.ledger.note(
            f"{self._label}: some of its operators give other bits in a forward without grad, as use_reentrant=True "
            f"runs it, than with grad. The values of its replays are not compared."
        )
        return True

    def _other(self, leaves: Sequence[Any]) -> str:
        """How these outputs differ from those of forward, apart from values."""
        if len(leaves) != len(self._metas):
            return f"{len(leaves)} outputs, not the {len(self._metas)} of the forward pass"
        for place, (leaf, meta) in enumerate(zip(leaves, self._metas, strict=True)):
            now = _meta_of(leaf) if isinstance(leaf, torch.Tensor) else None
            if now != meta:
                return f"output {place} is {name_of(now)}, and was {name_of(meta)}"
        return ""


class Replay(NamedTuple):
    """Tensors of a replay."""

    inputs: list[torch.Tensor]
    """Leaves that get the gradients of the function's tensors."""
    tensors: list[torch.Tensor]
    """Arguments of the function, which depend on them."""
    leaves: list[Any]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: Callable[[], ReentrantCall | None],
        leaves: list[Any],
        constants: list[torch.Tensor],
        written: list[torch.Tensor],
        start: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> tuple[Any, ...]:
        ctx.call = call
        ctx.save_for_backward(start)
        ctx.mark_non_differentiable(*constants)
        ctx.mark_dirty(*written)
        ctx.set_materialize_grads(False)
        return tuple(leaves)

    @staticmethod
    def backward(ctx: Any, *given: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if not is_plain_backward() or torch.is_grad_enabled():
            raise UnsupportedError(
                "A function with use_reentrant=True runs a backward of its own. So torch.autograd.grad(), and a "
                "backward with inputs= or create_graph=True, cannot go through it. Call a plain backward(), or use "
                "use_reentrant=False."
            )
        # Raises if the graph was freed.
        ctx.saved_tensors  # noqa: B018
        call = ctx.call()
        return None, None, None, None, None, *call.gradients(given)


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _meta_of(output: torch.Tensor) -> Meta:
    """Shape, dtype and device of an output. Kernels without grad may give other strides."""
    return (*meta_of(output)[:3], ())
