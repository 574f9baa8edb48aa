"""A function with its arguments, and a call of it that holds all that a replay needs until backward has ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from spillway._torch import top_hooks, tree_flatten, tree_unflatten, version_of
from spillway.checkpointing.ambient import AmbientState, generators_of, put_states, replay_lock, states_of
from spillway.checkpointing.checks import difference_error, fingerprints_of, has_content_of
from spillway.checkpointing.learned import LearnedCalls
from spillway.checkpointing.python_state import LatestState, PythonState
from spillway.checkpointing.reached import ReachedTensors, ReadMode, copy_of, overlap
from spillway.checkpointing.tensors import PLAIN, below_modes, is_strided
from spillway.errors import RecomputeError
from spillway.saved_tensors.handles import KeptHandle, unpack
from spillway.types import Decision

if TYPE_CHECKING:
    from spillway.checkpointing.partition import Partition
    from spillway.saved_tensors.hooks import ForwardScope

_NUMBERS = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))
_LEAVES = PLAIN | _NUMBERS
_SEQUENCES = (tuple, list)


class Arguments:
    """The arguments of a call, in which tensors can be replaced."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves: list[Any] = []
        self._count = len(args)
        self._names = tuple(kwargs)
        self._makers: list[tuple[int, Callable[[list[Any]], Any]] | None] = []
        """Number of leaves, and their constructor, for each argument that is not a leaf itself."""
        for value in (*args, *kwargs.values()):
            kind = type(value)
            if kind in _LEAVES:
                leaves.append(value)
                self._makers.append(None)
            elif kind in _SEQUENCES and _LEAVES.issuperset(map(type, value)):
                leaves += value
                self._makers.append((len(value), kind))
            else:
                flat, spec = tree_flatten(value)
                leaves += flat
                self._makers.append((len(flat), partial(tree_unflatten, treespec=spec)))
        self._tensors: dict[int, torch.Tensor] = {}
        self._places: list[int] = []
        self._numbers: list[int] = []
        """Index of each tensor among them: an argument may be passed several times."""
        numbers: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            kind = type(leaf)
            # By class first: isinstance() with torch.Tensor calls a metaclass, in Python.
            if kind not in _NUMBERS and (kind in PLAIN or isinstance(leaf, torch.Tensor)):
                leaves[place] = None
                self._places.append(place)
                self._tensors[id(leaf)] = leaf
                self._numbers.append(numbers.setdefault(id(leaf), len(numbers)))
        self._leaves = leaves

    def pop_tensors(self) -> list[torch.Tensor]:
        """The tensors, each once. They are not held here any more."""
        tensors, self._tensors = self._tensors, {}
        return list(tensors.values())

    def callables(self) -> list[Any]:
        return [leaf for leaf in self._leaves if callable(leaf)]

    def objects(self) -> list[Any]:
        """Arguments that are neither tensors, numbers nor strings."""
        return [leaf for leaf in self._leaves if type(leaf) not in _NUMBERS]

    def numbers(self) -> tuple[Any, ...]:
        """The numbers, strings and booleans among the arguments."""
        return tuple([(type(leaf), leaf) for leaf in self._leaves if leaf is not None and type(leaf) in _NUMBERS])

    def put(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors."""
        leaves = list(self._leaves)
        for place, number in zip(self._places, self._numbers, strict=True):
            leaves[place] = tensors[number]
        left = iter(leaves)
        values = [next(left) if each is None else each[1](list(islice(left, each[0]))) for each in self._makers]
        return tuple(values[: self._count]), dict(zip(self._names, values[self._count :], strict=True))


_NOTHING = nullcontext()


class ReplayedFunction:
    """The function as replays call it: with the Python state of its original forward."""

    def __init__(
        self,
        function: Callable[..., Any],
        arguments: Arguments,
        around: Callable[[], AbstractContextManager[None]] | None = None,
        latest: LatestState | None = None,
    ) -> None:
        self.around = nullcontext if around is None else around
        """A context for each replay: the function's parameters are on the device inside."""
        self.state = PythonState(function, arguments.objects(), latest)
        self.module = module = module_of(function)
        self.label = getattr(function, "__qualname__", repr(function)) if module is None else type(module).__name__
        """Name of the function in errors."""
        self._function, self._arguments = function, arguments
        self._variables = copy_context()
        """The context variables of forward. A replay reads these, in any thread, and leaves no trace in them."""
        self.keeps_state = False
        """Whether replays run on the current Python state."""

    def reachable_now(self) -> list[torch.Tensor]:
        """The tensors that the function can reach now, besides tensors among its arguments."""
        return [tensor for _, tensor in PythonState(self._function, self._arguments.objects()).reachable()]

    def __call__(self, *tensors: torch.Tensor, within: AbstractContextManager[None] = _NOTHING) -> Any:
        """Call the function on these tensors, with a context around its code, inside its Python state."""
        args, kwargs = self._arguments.put(tensors)
        if self.keeps_state:
            with within:
                return self._function(*args, **kwargs)
        with self.state.in_force(), within:
            return self._variables.copy().run(self._function, *args, **kwargs)


def module_of(function: Callable[..., Any]) -> torch.nn.Module | None:
    """The module that the function is, or is a method of."""
    module = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    return module if isinstance(module, torch.nn.Module) else None


def replay_argument(tensor: torch.Tensor, requires_grad: bool, is_written: bool) -> torch.Tensor:
    """One of the function's tensors for a replay: it shares its memory, and has no history. Gradients are enabled."""
    with below_modes(tensor):
        leaf = tensor.detach()
        if requires_grad:
            leaf.requires_grad_()
        if is_written:
            # Neither a leaf nor a view of one can be written in place. The next replay needs the original.
            return leaf.clone()  # type: ignore[no-untyped-call, unused-ignore]
        if not requires_grad or (tensor.requires_grad and tensor.is_leaf) or not is_strided(leaf):
            return leaf
        # It was no leaf. Casts of leaves are taken for casts of autocast. `view_as` gives dimensions of size one other
        # strides.
        return leaf[...] if type(leaf) in PLAIN else leaf.view_as(leaf)


_KEEP = Decision.KEEP
Result = TypeVar("Result")


class ReplayableCall:
    """One call of a function with all that a replay needs: arguments, Python state, settings and random generators.

    Args:
        function: the function.
        learned: knowledge from earlier calls of this kind.
        scope: the forward scope that the call belongs to: counts bytes, and offloads inputs if asked to.
        inputs: the decision about tensors among the arguments; ``None``: that of the hooks around the call.
        draws: whether the replay draws the random numbers of forward.
        compares: whether the values of each call are compared, and not only of samples.
        is_captured: whether the call is captured into a graph, where nothing is compared.
        partition: the split of tensors among the arguments over ranks, if they are split.
    """

    def __init__(
        self,
        function: ReplayedFunction,
        learned: LearnedCalls,
        scope: ForwardScope,
        inputs: Decision | None,
        *,
        draws: bool,
        compares: bool = False,
        is_captured: bool = False,
        partition: Partition | None = None,
    ) -> None:
        self._function, self._learned, self._scope, self._inputs = function, learned, scope, inputs
        self._draws, self._is_captured, self._partition = draws, is_captured, partition
        self._state, self._label = function.state, function.label
        self._is_observed = learned.begins() and not is_captured
        """Whether the call is learned from: see NOTE [ Learning ]. A profiler's listener is another matter."""
        self._compares = not is_captured and (compares or self._is_observed or learned.is_sampled())
        self._ambient = AmbientState.now()
        self._states: list[tuple[torch.Generator, torch.Tensor]] = []
        """Random generators with their states before forward."""
        self._devices: set[torch.device] = set()
        self._tensors: list[tuple[Any, Callable[[Any], torch.Tensor], bool, bool]] = []
        """For each tensor among the arguments: its handle, how to unpack it, whether it requires grad, and whether the
        function writes it in place."""
        self._unpacked: list[torch.Tensor] = []
        """The same tensors, unpacked, during a replay."""
        self._copies: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        """Copies of these tensors and their versions, until an observed forward has ended."""
        self._subclass: torch.Tensor | None = None
        """A tensor of a subclass that the function reads, if there is one: its own code runs, without modes."""
        self._output_fingerprints: list[torch.Tensor | None] = []
        """Fingerprints of the outputs of forward, if values are compared."""
        self._reached: ReachedTensors
        """Tensors that the function can reach besides its arguments."""

    # Forward.

    def _may_begin(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the call can be replayed."""
        written = self._learned.written_inputs
        if not (written and overlap(tensors, written)):
            return True
        # Copies of the two would not share memory.
        self._scope.ledger.note(
            f"{self._label} writes an argument that shares memory with another one. Its saved tensors are kept, "
            f"not recomputed."
        )
        return False

    def _forward_begins(self, tensors: Sequence[torch.Tensor]) -> None:
        """Save everything that a replay needs, before the function runs."""
        observed = self._is_observed
        self._devices = {tensor.device for tensor in tensors}
        if self._draws:
            self._states = states_of(generators_of(self._devices))
        named = self._state.reachable()
        read = [*tensors, *(each for _, each in named)]
        if not PLAIN.issuperset(map(type, read)):
            self._subclass = next(each for each in read if type(each) not in PLAIN)
        with below_modes(self._subclass):
            self._save_inputs(tensors)
            self._reached = ReachedTensors(
                named, self._learned, self._subclass, is_observed=observed, is_compared=self._compares
            )
            self._scope.waiting.send()
        if observed:
            self._versions = [-1 if tensor.is_inference() else version_of(tensor) for tensor in tensors]

    def _forward_ended(self, output: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Find out what forward wrote, after the function has run or raised."""
        if self._compares:
            self._output_fingerprints = fingerprints_of(output)
        self._reached.forward_ended()
        if self._is_observed:
            self._learn(output, tensors)
        self._state.forward_ended()
        if names := self._learned.state:
            self._scope.ledger.note(
                f"{self._label}: its forward changes Python state ({', '.join(names[:4])}"
                f"{' and more' if len(names) > 4 else ''}). Each recomputation starts from the state before the "
                f"forward, and puts the later state back."
            )
        self._scope.waiting.send()

    def _save_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the arguments saved, and copied in an observed call."""
        around = top_hooks(True)
        scope, is_light, are_ours = self._scope, False, True
        pack: Callable[[torch.Tensor], Any] = KeptHandle
        back: Callable[[Any], torch.Tensor] = unpack
        if self._inputs is not None and self._inputs is not _KEEP:
            pack = partial(scope.save, decision=Decision.OFFLOAD)
        elif self._inputs is None and around is not None:
            pack, back = around
            are_ours = getattr(pack, "__self__", None) is scope
            if are_ours and scope.keeps_the_rest:
                # Tensors without grad are mostly alive anyway: counting them takes more time than it is worth.
                pack, is_light = partial(scope.save, decision=_KEEP), True
        written = self._learned.written_inputs
        self._copies = [None] * len(tensors)
        for place, tensor in enumerate(tensors):
            if place in written:
                # The call holds the content from before the function writes it.
                copy = copy_of(tensor)
                if not are_ours:
                    # A replay of an outer checkpoint knows of no writes, and saves it: the numbers must agree.
                    pack(tensor)
                self._tensors.append((KeptHandle(copy), unpack, tensor.requires_grad, True))
                continue
            if self._partition is not None and self._partition.splits(tensor):
                part = self._partition.handle_of_part(tensor, pack, back)
                self._tensors.append((part, unpack, tensor.requires_grad, False))
            else:
                # The graph holds a leaf that it makes a gradient for: offloading it would free nothing.
                is_held = tensor.is_leaf and are_ours if tensor.requires_grad else is_light
                handle = (KeptHandle(tensor), unpack) if is_held else (pack(tensor), back)
                self._tensors.append((*handle, tensor.requires_grad, False))
            if self._is_observed:
                self._copies[place] = copy_of(tensor)

    def _learn(self, output: Any, tensors: Sequence[torch.Tensor]) -> None:
        """An observed call has ended: see NOTE [ Learning ]."""
        learned = self._learned
        learned.draws |= any(not torch.equal(a.get_state(), b) for a, b in self._states)
        learned.state = tuple(dict.fromkeys((*learned.state, *self._state.changed())))
        for place, tensor in enumerate(tensors):
            copy, version = self._copies[place], self._versions[place]
            if copy is None or version == -1:
                continue
            if version_of(tensor) != version or not has_content_of(tensor, copy):
                learned.written_inputs |= {place}
                self._tensors[place] = (KeptHandle(copy), unpack, tensor.requires_grad, True)
        self._copies.clear()

    # Backward.

    def _on_current_state(self, replay: Callable[[], Result]) -> Result | None:
        """Replay on the current Python state; ``None`` if that is the state of forward, and would give the same.

        A function may prepare itself in its first call, as quantized layers do. Spillway copies only a part of the
        state that it then changes, and cannot go back.
        """
        if not self._state.changes:
            return None
        self._function.keeps_state = True
        try:
            return replay()
        except Exception as error:
            # On another state than that of forward, anything may be missing.
            raise difference_error(self._label) from error
        finally:
            self._function.keeps_state = False

    def _unpack_inputs(self) -> list[torch.Tensor]:
        """The tensors among the arguments. A replay unpacks them once, though it may run the function more often.

        Ranks gather them by that, and hooks around the call may give a tensor only once, as torch's checkpoint does.
        """
        if not self._unpacked:
            self._unpacked = [back(handle) for handle, back, *_ in self._tensors]
        return self._unpacked

    def _replay_ended(self) -> None:
        self._unpacked = []

    @contextmanager
    def _as_of_forward(self, changed: Sequence[tuple[torch.Tensor, int]]) -> Iterator[None]:
        """A context with the settings and random generators of forward, for a replay.

        If the function reads a tensor that was ``changed`` since forward, the context raises an error.
        """
        reads = ReadMode(changed) if changed else None
        with replay_lock:
            now = states_of(generators_of(self._devices)) if self._draws else []
            try:
                put_states(self._states)
                with self._ambient.in_force(), torch.enable_grad(), nullcontext() if reads is None else reads:
                    yield
            finally:
                put_states(now)
                if reads is not None and reads.refused:
                    raise RecomputeError(reads.refused)
