"""What must hold for every tensor and every graph, tried on those that hypothesis thinks of."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import spillway
from spillway import Decision, EventKind, EventList, SavedTensor
from spillway.policies import Keep, Offload
from spillway.saved_tensors.hooks import SavedState
from spillway.saved_tensors.identity import ALIGNMENT

QUICK = settings(derandomize=True, deadline=None, max_examples=300, database=None)
THOROUGH = settings(derandomize=True, deadline=None, max_examples=5000, database=None)

CACHE_LINE = 64
"""Bytes: what the CPU's allocator aligns to, and kernels look at."""

_DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex128,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
)


class Rooms:
    """Sessions, made when first asked for: what is learned in one example misleads the next."""

    def __init__(self) -> None:
        self._sessions: dict[int, tuple[spillway.Session, EventList]] = {}

    def session(self, window: int) -> tuple[spillway.Session, EventList]:
        if window in self._sessions and len(self._sessions[window][0].of(SavedState).identity):
            # The traceback of an example that failed still holds its graph.
            del self._sessions[window]
        if window not in self._sessions:
            events = EventList()
            self._sessions[window] = spillway.Session(window=window, recorder=events), events
        session, events = self._sessions[window]
        events.events.clear()
        return session, events

    def close(self) -> None:
        for session, _ in self._sessions.values():
            session.close()


@pytest.fixture(scope="module")
def rooms() -> Iterator[Rooms]:
    rooms = Rooms()
    yield rooms
    rooms.close()


_OLDEST = torch.ones((), requires_grad=True).exp()


def check_given_back(session: spillway.Session) -> None:
    # After an error in backward PyTorch's engine keeps what was ready to run, until a later backward of the thread
    # passes over it on its way to older nodes.
    _OLDEST.backward(retain_graph=True)
    session.synchronize()
    if session.used_bytes != (0, 0) or len(session.of(SavedState).identity):
        gc.collect()
    assert session.used_bytes == (0, 0)
    assert len(session.of(SavedState).identity) == 0


def raw(tensor: torch.Tensor) -> bytes:
    """Every bit of its elements, in logical order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return flat.copy_(tensor.reshape(-1)).view(torch.uint8).numpy().tobytes()


class SaveAll(torch.autograd.Function):
    """Saves the tensors of a list, which it empties, and shows in backward what it got back."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, tensors: list[torch.Tensor], show: Callable[..., None]) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        tensors.clear()
        ctx.show = show
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.show(ctx.saved_tensors)
        return grads[0], None, None


def save(tensors: list[torch.Tensor], show: Callable[..., None]) -> torch.Tensor:
    result: torch.Tensor = SaveAll.apply(torch.zeros((), requires_grad=True), tensors, show)
    return result


def plug() -> torch.Tensor:
    """A saved tensor that wants the window after all others, and is alive as long as this is."""
    return save([torch.ones(1)], lambda saved: None)


# A saved tensor, whatever it looks like.


class Look(NamedTuple):
    """All that can be seen of a tensor but where it lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool
    neg: bool
    misalignment: int
    content: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Look:
        return cls(
            tensor.dtype,
            tuple(tensor.shape),
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
            tensor.data_ptr() % CACHE_LINE,
            raw(tensor),
        )


class Place(NamedTuple):
    """Where it lies in its storage."""

    offset: int
    """Bytes."""
    storage_nbytes: int
    storage: bytes

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8).set_(storage)
        return cls(tensor.storage_offset() * tensor.itemsize, storage.nbytes(), flat.numpy().tobytes())


@dataclass(frozen=True)
class View:
    """How to look at a storage."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    flag: str

    def needs(self) -> int:
        """Elements of the storage."""
        return self.offset + 1 + sum(max(n - 1, 0) * step for n, step in zip(self.size, self.stride, strict=True))

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        tensor = flat.as_strided(self.size, self.stride, self.offset)
        if self.flag == "conj" and tensor.is_complex():
            return tensor.conj()
        if self.flag == "neg" and (tensor.is_floating_point() or tensor.is_complex()) and tensor.itemsize > 1:
            return torch._neg_view(tensor)
        if self.flag == "imag" and tensor.is_complex():
            return tensor.conj().imag
        return tensor


@st.composite
def views(draw: st.DrawFn) -> View:
    """Dense in any order of dimensions (channels last is one), sliced, broadcast, overlapping, empty; anywhere."""
    size = tuple(draw(st.lists(st.integers(0, 5) | st.integers(1, 9), max_size=4)))
    if draw(st.booleans()):
        steps = {}
        step = 1
        for dimension in draw(st.permutations(range(len(size)))):
            steps[dimension] = step
            step *= max(size[dimension], 1)
        stride = tuple(steps[dimension] for dimension in range(len(size)))
    else:
        stride = tuple(draw(st.sampled_from((0, 1, 2, 3, 7, 40, 129))) for _ in size)
    offset = draw(st.integers(0, 8) | st.integers(0, 3000))
    return View(size, stride, offset, draw(st.sampled_from(("", "", "conj", "neg", "imag"))))


def filled(numel: int, dtype: torch.dtype, seed: int, *, odd: bool) -> torch.Tensor:
    """Elements of any bits (booleans are 0 or 1), at an address that the allocator gives, or at an odd one."""
    generator = torch.Generator().manual_seed(seed)
    most = 2 if dtype is torch.bool else 256
    content = torch.randint(0, most, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    if odd:
        memory = torch.empty(numel * dtype.itemsize + 16, dtype=torch.uint8).numpy()
        content = torch.from_numpy(memory[16:]).copy_(content)
    return content.view(dtype)


looks_at_one_storage = st.tuples(
    st.sampled_from(_DTYPES),
    st.lists(views(), min_size=1, max_size=4),
    st.integers(0, 4000),
    st.integers(0, 2**31),
    st.sampled_from(("host", "disk")),
    st.sampled_from((0, 1 << 12, 1 << 20)),
    st.booleans(),
    st.sampled_from((False, False, False, True)),
)


def check_round_trip(rooms: Rooms, case: Any) -> None:
    dtype, wanted, spare, seed, tier, session_window, apart, odd = case
    session, events = rooms.session(session_window)
    flat = filled(max(view.needs() for view in wanted) + spare, dtype, seed, odd=odd)
    tensors = [view.of(flat) for view in wanted]
    before = [(Look.of(each), Place.of(each)) for each in tensors]
    after: dict[int, tuple[Look, Place, bool]] = {}

    def show(first: int) -> Callable[..., None]:
        def look(saved: Sequence[torch.Tensor]) -> None:
            for place, each in enumerate(saved, first):
                after[place] = Look.of(each), Place.of(each), each.requires_grad

        return look

    with spillway.offload(policy=Offload(), min_bytes=0, window=0, tier=tier, session=session):
        # By one node, which asks for all at once, or each by its own.
        parts = [[tensors.pop(0)] for _ in wanted] if apart else [tensors]
        results = [save(part, show(place)) for place, part in enumerate(parts)]
        result = torch.stack(results).sum()
        last = plug()
    del flat, results
    for times in (1, 2):
        after.clear()
        result.backward(retain_graph=times == 1)
        for number, (look, place) in enumerate(before):
            back, back_place, requires_grad = after[number]
            assert back == look
            assert not requires_grad
            if not all(look.shape):
                continue
            lead = place.offset - back_place.offset
            assert lead >= 0
            assert lead % ALIGNMENT == 0
            assert back_place.storage == place.storage[lead : lead + back_place.storage_nbytes]
            if back_place.storage_nbytes == place.storage_nbytes:
                assert lead == 0
    kinds = [event.kind for event in events.events]
    # One without elements is kept, and keeps the storage alive under the others; so is one at an odd address.
    if all(all(view.size) for view in wanted) and not odd:
        assert kinds.count(EventKind.RETURN) > 0
        # Twice: once for each backward, and never more.
        assert kinds.count(EventKind.RETURN) <= 2 * kinds.count(EventKind.RELEASE)
    assert EventKind.REFUSE not in kinds
    del result, last
    check_given_back(session)


@QUICK
@given(case=looks_at_one_storage)
def test_a_saved_tensor_comes_back_as_it_was(rooms: Rooms, case: Any) -> None:
    check_round_trip(rooms, case)


@pytest.mark.long
@THOROUGH
@given(case=looks_at_one_storage)
def test_a_saved_tensor_comes_back_as_it_was_thoroughly(rooms: Rooms, case: Any) -> None:
    check_round_trip(rooms, case)


# A storage that is written between the times that it is saved.


class Save(NamedTuple):
    """Save half of the storage, through the tensor or through an alias with a counter of its own."""

    alias: int
    half: int


class Write(NamedTuple):
    """Write all of it."""

    alias: int


saves_and_writes = st.lists(
    st.builds(Save, st.integers(0, 2), st.integers(0, 2)) | st.builds(Write, st.integers(0, 2)),
    min_size=2,
    max_size=10,
)


def check_writes(rooms: Rooms, actions: Sequence[Save | Write], tier: str) -> None:
    session, _ = rooms.session(1 << 12)
    whole = torch.arange(512.0)
    # Three counters over the same bytes: nobody knows that they are the same but who asks the storage.
    aliases = [whole, whole.data, whole.data]
    saved: list[tuple[torch.Tensor, list[bytes], Save, int, bytes]] = []
    trusted: list[bool] = []
    writes: list[Write] = []

    with spillway.offload(policy=Offload(), min_bytes=0, window=0, tier=tier, session=session):
        for action in actions:
            alias = aliases[action.alias]
            if isinstance(action, Write):
                alias.add_(1)
                writes.append(action)
                continue
            part = (alias[:256], alias[256:], alias)[action.half]
            # What is written through another counter autograd does not see either: where the bytes were saved through
            # this one before, they may be those.
            earlier = [number for _, _, other, number, _ in saved if other.alias == action.alias]
            trusted.append(all(write.alias == action.alias for write in writes[min(earlier, default=len(writes)) :]))
            got: list[bytes] = []
            content = raw(part)
            holder = [part]
            del part
            graph = save(holder, lambda back, got=got: got.append(raw(back[0])))
            saved.append((graph, got, action, len(writes), content))
        last = plug()
        del alias
    del whole, aliases
    for (graph, got, action, written, content), sure in zip(saved, trusted, strict=True):
        later = writes[written:]
        if any(write.alias == action.alias for write in later):
            with pytest.raises(spillway.InplaceError, match="modified by an inplace operation"):
                graph.backward()
        else:
            graph.backward()
            assert later or not sure or got == [content]
    graph = last = None
    saved.clear()
    check_given_back(session)


@QUICK
@given(actions=saves_and_writes, tier=st.sampled_from(("host", "disk")))
def test_what_is_saved_after_a_write_is_what_was_written(
    rooms: Rooms, actions: Sequence[Save | Write], tier: str
) -> None:
    check_writes(rooms, actions, tier)


@pytest.mark.long
@THOROUGH
@given(actions=saves_and_writes, tier=st.sampled_from(("host", "disk")))
def test_what_is_saved_after_a_write_is_what_was_written_thoroughly(
    rooms: Rooms, actions: Sequence[Save | Write], tier: str
) -> None:
    check_writes(rooms, actions, tier)


# Graphs.

_SIDE = 16
_F = torch.nn.functional


def _in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    fresh = a * 0.5
    fresh.add_(b)
    fresh.sigmoid_()
    fresh[2:5].mul_(b[2:5])
    return fresh


def _overwrite(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Legal or not: it depends on who has saved it. Plain PyTorch decides."""
    return a.add_(b) if not a.is_leaf else a + b


UNARY: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    torch.tanh,
    torch.sin,
    torch.sigmoid,
    torch.relu,
    torch.square,
    torch.abs,
    _F.gelu,
    lambda a: torch.softmax(a, 1),
    lambda a: torch.cumsum(a, 0) / _SIDE,
    lambda a: _F.layer_norm(a, (_SIDE,)),
    lambda a: _F.dropout(a, 0.3),
    lambda a: _F.rrelu(a, training=True),
    lambda a: a.detach(),
    lambda a: a.t(),
    lambda a: a.flip(1),
    lambda a: a.exp().log1p(),
    lambda a: a.mean(0).expand(_SIDE, _SIDE),
    lambda a: a[3].unsqueeze(0).expand(_SIDE, _SIDE).sin(),
    lambda a: torch.cat(a.chunk(3, dim=1)[::-1], dim=1),
    lambda a: torch.cat([part.tanh() for part in a.split(5)]),
    lambda a: a.unfold(0, 4, 4).reshape(_SIDE, _SIDE).tanh(),
    lambda a: a.reshape(4, -1).unfold(1, 8, 8).cos().reshape(_SIDE, _SIDE),
    lambda a: _F.pad(a[1::2, ::2].sin(), (0, 8, 0, 8)),
    lambda a: (
        torch.complex(a, a.flip(0)).conj().mul(1j).exp().imag.tanh()
        if a.dtype in (torch.float32, torch.float64)
        else a.cos()
    ),
    lambda a: _F.max_pool2d(a.view(1, 1, _SIDE, _SIDE), 3, 1, 1).view(_SIDE, _SIDE),
    lambda a: a.sort(dim=1).values,
    lambda a: a.diagonal().diag_embed() + a,
)

BINARY: tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], ...] = (
    torch.mul,
    torch.sub,
    torch.maximum,
    torch.matmul,
    _in_place,
    _overwrite,
    lambda a, b: a / (b.abs() + 1),
    lambda a, b: torch.where(a > b, a.tanh(), b),
    lambda a, b: torch.addmm(a, b.t(), a) / _SIDE,
    lambda a, b: torch.cat([a[:5], b[5:]]).sin(),
    lambda a, b: _F.linear(a, b, b[0]).tanh(),
    lambda a, b: torch.lerp(a, b, b.sigmoid()),
    lambda a, b: a.masked_fill(b > 0, 0.5),
    lambda a, b: a[b.argsort(dim=0)[:, 0]],
    lambda a, b: torch.stack([a, b], 2).prod(2),
)


class Node(NamedTuple):
    """One operator, on values made before, and what happens to the contexts before it."""

    operator: int
    first: int
    second: int
    context: int


@dataclass(frozen=True)
class Program:
    """A graph: what computes it."""

    nodes: Sequence[Node]
    outputs: Sequence[int]
    dtype: torch.dtype


@dataclass(frozen=True)
class Treatment:
    """What Spillway is told to do with it."""

    decisions: Sequence[Decision]
    window: int
    min_bytes: int
    tier: str

    def offload(self, session: spillway.Session) -> spillway.offload:
        def policy(saved: SavedTensor) -> Decision:
            return self.decisions[saved.position % len(self.decisions)]

        return spillway.offload(
            policy=policy, window=self.window, min_bytes=self.min_bytes, tier=self.tier, session=session
        )


_index = st.integers(0, 63)
nodes = st.builds(Node, st.integers(0, 2 * (len(UNARY) + len(BINARY))), _index, _index, st.integers(0, 15))
programs = st.builds(
    Program,
    st.lists(nodes, min_size=15, max_size=40),
    st.lists(_index, min_size=1, max_size=3),
    st.sampled_from((torch.float64, torch.float32, torch.bfloat16)),
)
# What a policy of `offload` may answer: to compute again is a region's to decide.
MOVES = [decision for decision in Decision if decision is not Decision.RECOMPUTE]
treatments = st.builds(
    Treatment,
    st.lists(st.sampled_from(MOVES), min_size=1, max_size=7),
    st.sampled_from((0, 3000, 20_000, 1 << 20)),
    st.sampled_from((0, 0, 600, 3000)),
    st.sampled_from(("host", "disk", "auto")),
)
# A failing graph is not made smaller: that takes minutes, and is had by adding ``Phase.shrink``.
graphs = st.tuples(
    st.lists(programs, min_size=2, max_size=2),
    st.lists(treatments, min_size=2, max_size=2),
    st.lists(st.sampled_from((0, 1)), min_size=2, max_size=5),
    st.sampled_from((0, 5000, 1 << 20)),
)


class Graph:
    """A program that has run forward."""

    def __init__(self, program: Program, enter: Callable[[ExitStack, int], None] | None) -> None:
        generator = torch.Generator().manual_seed(7)
        torch.manual_seed(11)
        shape = (_SIDE, _SIDE)
        self.leaves = [torch.randn(shape, generator=generator).to(program.dtype).requires_grad_() for _ in range(3)]
        # Clones, which die: a leaf is alive in backward, and would not have to come back.
        values = [leaf.clone() for leaf in self.leaves]
        stacks: list[ExitStack] = []
        with ExitStack() as outer:
            if enter is not None:
                enter(outer, 0)
            for node in program.nodes:
                self._step(values, node)
                if enter is None:
                    continue
                if node.context in (13, 14):
                    stacks.append(outer.enter_context(ExitStack()))
                    enter(stacks[-1], node.context - 12)
                elif node.context == 15 and stacks:
                    stacks.pop().close()
        chosen = {place % len(values) for place in program.outputs} | {len(values) - 1}
        self.loss = torch.stack([values[place].double().sum() for place in sorted(chosen)]).sum()

    def _step(self, values: list[torch.Tensor], node: Node) -> None:
        a, b = values[-1 - node.first % len(values)], values[-1 - node.second % len(values)]
        operator = node.operator % (len(UNARY) + len(BINARY))
        values.append(UNARY[operator](a) if operator < len(UNARY) else BINARY[operator - len(UNARY)](a, b))

    def backward(self, *, retain: bool) -> Sequence[Any]:
        """The loss and the gradients, or the error."""
        if not self.loss.requires_grad:
            return (raw(self.loss),)
        try:
            grads = torch.autograd.grad(self.loss, self.leaves, retain_graph=retain, allow_unused=True)
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)
            return ("modified",)
        return (raw(self.loss), *(None if grad is None else raw(grad) for grad in grads))


def results(programs: Sequence[Program], order: Sequence[int], enter: Any = None) -> list[Any]:
    try:
        alive = [Graph(program, enter) for program in programs]
    except RuntimeError as error:
        # Some in-place operators are refused in forward.
        return [str(error)]
    given = []
    for position, which in enumerate(order):
        given.append(alive[which].backward(retain=which in order[position + 1 :]))
    return given


def check_graphs(rooms: Rooms, case: Any) -> bool:
    """Whether a storage came back on the way."""
    wanted, (treatment, inner), order, session_window = case
    session, events = rooms.session(session_window)

    def enter(stack: ExitStack, what: int) -> None:
        if what == 2:
            stack.enter_context(spillway.keep())
        else:
            stack.enter_context((inner if what == 1 else treatment).offload(session))

    plain = results(wanted, order)
    # The first time it learns the order of backward, the second time it relies on it.
    for _ in range(2):
        assert results(wanted, order, enter) == plain
        check_given_back(session)
    return any(event.kind is EventKind.RETURN for event in events.events)


def test_a_graph_has_the_gradients_of_plain_pytorch(rooms: Rooms) -> None:
    returned: list[bool] = []

    @settings(QUICK, max_examples=80, phases=[Phase.generate])
    @given(case=graphs)
    def check(case: Any) -> None:
        returned.append(check_graphs(rooms, case))

    check()
    # It is worth something only if bytes move.
    assert sum(returned) > len(returned) / 3


@pytest.mark.long
@settings(THOROUGH, max_examples=3000, phases=[Phase.generate])
@given(case=graphs)
def test_a_graph_has_the_gradients_of_plain_pytorch_thoroughly(rooms: Rooms, case: Any) -> None:
    check_graphs(rooms, case)


@settings(QUICK, max_examples=50)
@given(sizes=st.lists(st.integers(1, 5000), min_size=2, max_size=5))
def test_all_of_a_pass_leaves_whatever_the_pass_before_it_saved(rooms: Rooms, sizes: Sequence[int]) -> None:
    """The ratio is 1 where none is given; passes of one tag, alike in their first tensor, differ in what follows."""
    session, _ = rooms.session(1 << 20)
    for size in sizes:
        context = spillway.offload(min_bytes=0, window=0, tier="host", session=session)
        with context:
            graphs = [save([torch.ones(each)], lambda saved: None) for each in (10, size)]
        assert context.stats().kept_bytes == 0
        del graphs
    check_given_back(session)


def test_a_constant_that_joins_the_graph_after_it_was_saved_does_not_keep_it(rooms: Rooms) -> None:
    """Kept as the very tensor, it would get a history that leads to its own handle: a cycle that nobody finds."""
    session, _ = rooms.session(0)
    weight = torch.ones(8, requires_grad=True)
    with spillway.offload(policy=Keep(), min_bytes=0, session=session):
        constant = torch.full((8,), 2.0)
        constant.add_(weight * constant)
    del constant
    check_given_back(session)
