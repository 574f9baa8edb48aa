"""One call of a function that is recomputed with ``use_reentrant=True``.

NOTE [ A reentrant call ]

Forward runs the function without grad, so autograd saves nothing in it. What it gives becomes the output of one node.
The backward of that node runs the function again, with grad and on detached inputs, as of the state in forward. It then
runs a backward of its own through the graph of that run.

Nothing is known of what autograd saves in the function. So what is compared are the outputs: number, shape, dtype and
device in every call, and the values in the first call and in samples of the later ones.

NOTE [ Inputs that a function writes ]

Where the function writes an input that requires grad, what is read of the input later depends on what was written. So
the input is an output of the node, too. An input, or another tensor that the function reaches, may require no grad, and
get a history in a replay by what is written in it. In forward that history was lost, so this is refused.

NOTE [ Histories that forward loses ]

A function may leave what it computes in an attribute, and read that in its next call. Forward leaves it without a
history, so the gradient through it would be lost. So where a replay leaves a tensor with a history in an attribute that
had a tensor, the function runs once more under a mode that sees whether it reads the former one, and is refused if so.

NOTE [ Kernels without grad ]

Some operators take other kernels where nothing needs a gradient (``eigvalsh``, transformer layers in eval mode), and
the values differ in their last bits. So where a replay gives other values, the function runs twice more without grad.
If that gives the values of forward, later calls of the kind are not compared. (Twice, since a function may count its
runs, and do the same in every second one.)

NOTE [ What holds what ]

Autograd owns the call, by a tensor without elements that the node saves: the pack hook gives the call in its place. So
the call goes when the graph is freed, and autograd refuses a second backward as for any other node. The node itself
knows the call by a weak reference.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from spillway.capture.handles import KeptHandle, unpack
from spillway.capture.torch_internals import untraced
from spillway.checkpointing.checks import differed, prints_of
from spillway.checkpointing.collector import Meta, meta_of, name_of, storages_of
from spillway.checkpointing.reached import Reads, copy_of
from spillway.checkpointing.replayable import ReplayableCall
from spillway.checkpointing.tensors import PLAIN, below_modes, is_strided, whole_view_of
from spillway.errors import RecomputeError, UnsupportedError

_NOTHING = nullcontext()
_is_plain_backward: Callable[[], bool] = torch.autograd._is_checkpoint_valid


class ReentrantCall(ReplayableCall):
    """One call. See NOTE [ A reentrant call ]."""

    _metas: Sequence[Meta | None] = ()
    """Shape, dtype and device of each output that is a tensor."""
    _written: Sequence[int] = ()
    """Places of inputs that forward wrote: see NOTE [ Inputs that a function writes ]."""

    # Forward.

    def run(self, first: Callable[[], Any], tensors: Sequence[torch.Tensor]) -> Any:
        """What the function gives.

        Args:
            first: runs it, with the caller's own arguments.
            tensors: the tensors among the arguments. If none requires grad, the outputs do all the same.
        """
        if not self._may_begin(tensors):
            return first()
        self._forward_begins(tensors)
        versions = [tensor._version if tensor.requires_grad else -1 for tensor in tensors]
        output = None
        try:
            with torch.no_grad():
                output = first()
        finally:
            with below_modes(self._odd):
                self._forward_ended(output, tensors)
        leaves, spec = tree_flatten(output)
        places = [place for place, v in enumerate(versions) if v != -1 and tensors[place]._version != v]
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
        if written._is_view():
            raise UnsupportedError(
                f"got {self._label} with use_reentrant=True, which writes an argument in place that is a view of "
                f"another tensor, expected one that writes no views; use use_reentrant=False, or give it a clone"
            )
        return written

    # Backward.

    @untraced
    def gradients(self, given: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the function's tensors.

        Args:
            given: those of its outputs.
        """
        self._replay_begins()
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
        with self._function.on_todays_state() as is_another:
            # A function that prepares itself in its first call.
            if is_another and self._compares:
                try:
                    replay = self._run_again()
                except Exception as error:
                    # On a state that is no longer the first run's, anything may be missing.
                    raise differed([self._label]) from error
                if self._is_same(replay.leaves):
                    return replay
        raise self._error(other)

    def _check_histories(self) -> None:
        """See NOTE [ Histories that forward loses ]."""
        found = {name: t for name, t in self._function.histories.items() if name not in self._learned.unread}
        if not found:
            return
        reads = Reads(found)
        self._run_again(mode=reads)
        if reads.names:
            raise RecomputeError(
                f"{self._label}, recomputed with use_reentrant=True, keeps a tensor with a history in "
                f"{', '.join(sorted(reads.names))}, which it reads in its next call. That mode loses the gradient "
                f"that goes through it. Use use_reentrant=False."
            )
        self._learned.unread |= found.keys()

    def _run_again(self, *, with_grad: bool = True, mode: AbstractContextManager[Any] = _NOTHING) -> Replay:
        reached = self._reached
        with below_modes(self._odd):
            backs = zip(self._inputs_back(), self._tensors, strict=True)
            pairs = [_input(tensor, needs_grad, written) for tensor, (*_, needs_grad, written) in backs]
        inputs, tensors = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        had = {id(tensor) for tensor in (*tensors, *reached.protected()) if tensor.requires_grad}
        written: list[torch.Tensor] = []

        def has_run(others: Iterable[torch.Tensor]) -> None:
            arguments = (t for t, each in zip(tensors, self._tensors, strict=True) if each[-1])
            written.extend(t for t in (*arguments, *others) if t.requires_grad and id(t) not in had)

        with (
            self._as_of_forward(tensors, reached.changed()) as within,
            saved_tensors_hooks(self._packing([*inputs, *tensors, *reached.tensors()]), unpack),
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
        """The pack hook of a replay.

        Args:
            known: these are there without it.
        """
        ledger, counted, written = self._passage.ledger, set(storages_of(known)), self._reached.storages()

        def pack(tensor: torch.Tensor) -> KeptHandle:
            with below_modes(tensor):
                if type(tensor) not in PLAIN or not is_strided(tensor):
                    return KeptHandle(tensor)
                storage = tensor.untyped_storage()
                if storage._cdata in written:
                    # It gets its content of now back when the replay has ended.
                    return KeptHandle(copy_of(tensor))
                if storage._cdata not in counted:
                    counted.add(storage._cdata)
                    ledger.recomputed_bytes += storage.nbytes()
                return KeptHandle(tensor)

        return pack

    # What is compared.

    def _is_same(self, leaves: Sequence[Any]) -> bool:
        """Whether a replay gave what forward gave, as far as it is compared."""
        if self._other(leaves):
            return False
        if not self._compares or self._learned.has_other_kernels:
            return True
        found = prints_of(leaves)
        return len(found) == len(self._output_prints) and all(
            a is None or b is None or torch.equal(a, b) for a, b in zip(found, self._output_prints, strict=True)
        )

    def _is_same_without_grad(self) -> bool:
        """See NOTE [ Kernels without grad ]."""
        if not all(self._is_same(self._run_again(with_grad=False).leaves) for _ in range(2)):
            return False
        self._learned.has_other_kernels = True
        self._passage.ledger.note(
            f"{self._label}: some of its operators give other bits in a forward without grad, as use_reentrant=True "
            f"runs it, than with grad. The values of its replays are not compared."
        )
        return True

    def _other(self, leaves: Sequence[Any]) -> str:
        """How these outputs differ from those of forward, without a look at their content."""
        if len(leaves) != len(self._metas):
            return f"{len(leaves)} outputs, not the {len(self._metas)} of the forward pass"
        for place, (leaf, meta) in enumerate(zip(leaves, self._metas, strict=True)):
            now = _meta_of(leaf) if isinstance(leaf, torch.Tensor) else None
            if now != meta:
                return f"output {place} is {name_of(now)}, and was {name_of(meta)}"
        return ""

    def _error(self, other: str) -> RecomputeError:
        if not other:
            return differed([self._label])
        return RecomputeError(
            f"{self._label} gave something else when it was recomputed than in its forward pass: {other}. It reads "
            f"something besides its arguments, parameters and Python state that changed in between. Pass that as an "
            f"argument, or leave it outside of the checkpointed function."
        )


class Replay(NamedTuple):
    """What a replay has made."""

    inputs: list[torch.Tensor]
    """Leaves that get the gradients of the function's tensors."""
    tensors: list[torch.Tensor]
    """What the function was given, which depends on them."""
    leaves: list[Any]
    """The outputs."""


class _Node(torch.autograd.Function):
    """The node of one call. See NOTE [ A reentrant call ]."""

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
        if not _is_plain_backward() or torch.is_grad_enabled():
            raise UnsupportedError(
                "got torch.autograd.grad(), or a backward with inputs= or create_graph=True, through a function "
                "recomputed with use_reentrant=True, expected a plain backward(), since it runs a backward of its own; "
                "use use_reentrant=False"
            )
        # Raises if the graph was freed.
        ctx.saved_tensors  # noqa: B018
        call = ctx.call()
        return None, None, None, None, None, *call.gradients(given)


def _input(tensor: torch.Tensor, requires_grad: bool, is_written: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """For one of the function's tensors: the leaf that gets its gradient, and what the function is given."""
    with below_modes(tensor), torch.enable_grad():
        leaf = tensor.detach().requires_grad_(requires_grad)
        if is_written:
            # A leaf cannot be written in place, nor a view of one.
            return leaf, leaf.clone()
        if not requires_grad or (tensor.requires_grad and tensor.is_leaf):
            return leaf, leaf
        if not is_strided(leaf) or torch._C._len_torch_dispatch_stack() > 0:
            return leaf, leaf
        # Not a leaf, which it was not: of leaves, casts are taken for autocast's own.
        return leaf, whole_view_of(leaf)


def _needs_grad(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _meta_of(output: torch.Tensor) -> Meta:
    """What tells an output from others. Kernels without grad may give other strides."""
    return (*meta_of(output)[:3], ())
