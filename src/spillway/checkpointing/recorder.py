"""Records the program of a function in its first replay.

NOTE [ Recording ]

Under a dispatch mode some functions of torch choose other kernels, and give other bits. So a program is recorded in a
replay, and not in forward. The saved tensors are compared with those of forward, as in every first replay. If they
differ, the function is replayed again without the mode, and its calls have no program.

Two kernels may also agree in the first call and differ in a later one: without gradients ``torch.linalg.eigvalsh``
computes no eigenvectors, but under a mode it does. So a call has no program, either, if it runs an operator that stands
for another one under a mode.

A call has no program, either, if its Python code takes the content of a tensor without an operator, as ``tolist()`` and
``numpy()`` do. No mode could tell a partial replay that the code needs an operator's output.

NOTE [ Autocast's casts ]

Autocast casts a weight once, and caches the cast until its outermost context exits. So the cast is a part of one replay
and not of another. Casts of leaves that require grad are therefore not counted. They always run.

NOTE [ Collectives ]

Ranks that communicate inside of a function must repeat the same collectives in its replays, in the same order, also
beside those of backward. Each rank decides alone whether a replay is compared, records the program, or is partial. So
if there are several ranks:

* Each replay ends with the last tensor that forward saved, whether or not that is still wanted. A replay that records
  goes on until the next collective, since operators at the end tell what the last saved tensors are. If the function's
  output may be dropped, every replay goes to the end.
* A function with collectives is replayed whole, since a partial replay comes later in backward: preserved tensors need
  none. Only if a selector or a policy names a collective, the user says by it that the ranks make the same calls. Then
  a rank whose call differs from the program raises an error.

An operator of DTensors may run collectives of its own, to change their placement. A mode that passes DTensors on sees
them.

NOTE [ Hidden operators ]

FSDP2 gathers parameters in hooks of modules, under labels for the profiler. A replay gathers nothing if the parameters
are still there. So programs have neither these operators nor the labels.

A partial replay may come after FSDP2 has freed the gathered parameters of a module inside of the function. It would
gather them again, and they would stay gathered: the next forward would use old weights. So such a function is replayed
whole. Its first saved tensor is needed before any gathered parameter is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spillway._torch import (
    LABEL_BEGINS,
    LABEL_ENDS,
    FakeTensor,
    base_of,
    disable_dispatch,
    disable_modes,
    graph_task,
    group_of,
    next_node,
    storage_key,
    tree_leaves,
)
from spillway.checkpointing.ambient import default_generator, device_of, states_of
from spillway.checkpointing.collector import ReplayEnded
from spillway.checkpointing.program import Argument, Operator, Program, RecordedTensor, form_of
from spillway.checkpointing.schema import OperatorFacts, argument, facts_of, facts_of_call, is_chosen_under_a_mode
from spillway.checkpointing.selectors import Choices, OperatorCall
from spillway.checkpointing.tensors import (
    PLAIN,
    OperatorMode,
    has_bits,
    is_distributed_class,
    is_strided,
    strided_parts,
    tensors_in,
)
from spillway.saved_tensors.identity import ViewRecipe, is_parameter
from spillway.saved_tensors.locator import Locator
from spillway.types import Decision

_READS = frozenset(getattr(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__"))
"""Methods that give Python code the content of a tensor, and run no operator."""
_NOTHING: AbstractContextManager[object] = nullcontext()
_NUMBERS = (int, float, bool, complex, type(None))
_OFFSET = 8
"""Bytes of a generator's state before its offset, on devices whose generators have one."""


class Recorder(OperatorMode):
    """Runs and notes each operator. See NOTE [ Recording ]. Paths of submodules begin below the ``root``."""

    def __init__(
        self,
        choices: Choices,
        root: torch.nn.Module | None = None,
        *,
        gathers: bool = False,
        ends_before_collectives: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._choices = choices
        self._reads = _ContentReads(self)
        self._locator = Locator(modules=True, operators=False, root=root) if choices.wants_modules else None
        self._hidden = HiddenOperators()
        self.values = Values()
        self.count = 0
        self.operators: list[Operator] = []
        self.saved: list[RecordedTensor] = []
        self.saves_at: list[int] = []
        """Numbers of operators that had run when autograd began to save for another operator."""
        self.makers: dict[int, int] = {}
        self.recipes: dict[int, ViewRecipe] = {}
        self.written: set[int] = set()
        self.outside: dict[int, OutsideTensor] = {}
        """Tensors that no operator made, by values."""
        self.casts: set[int] = set()
        """Values of autocast's casts of leaves."""
        self._depends: set[int] = set()
        self._nodes: dict[int, int] = {}
        """The first operator that ran after each node was made, by the node's number."""
        self._unknown: list[tuple[int, torch.Tensor]] = []
        """Saved tensors that no operator had read or made by then, with their numbers."""
        self._saving: list[int] = []
        """Nodes for which each tensor was saved."""
        self._chosen: dict[int, tuple[Decision, bool]] = {}
        self.inputs: list[tuple[int, ...]] = []
        self.outputs: set[int] = set()
        self._task = graph_task()
        self.collectives: set[Any] = set()
        self.groups: list[Any] = []
        """The process groups of its collectives."""
        self.gathers = gathers
        self._may_end = ends_before_collectives
        """Whether the run ends before the next collective, as a replay whose tensors were all saved."""
        self.has_ended = False
        """Whether it ended there."""

    def begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Take the tensors with which the function is about to be called."""
        self.inputs = [tuple([self._value(part, is_input=True) for part in tensors_in((each,))]) for each in inputs]

    def __enter__(self) -> Recorder:
        if self._locator is not None:
            self._locator.__enter__()
        self._reads.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._reads.__exit__(*error)  # type: ignore[no-untyped-call]
        if self._locator is not None:
            self._locator.__exit__(*error)

    def gave(self, output: Any) -> None:
        """Take the output of the function; ``None`` if the replay was ended."""
        for number, tensor in self._unknown:
            value = self.values.find(tensor)
            self.saved[number] = self.saved[number]._replace(value=value)
            if value is None:
                self.values.opaque = "it saves a tensor that no operator was seen to make or to read"
        self._unknown.clear()
        parts = tensors_in(tree_leaves(output))
        self.outputs = {value for part in parts if (value := self.values.find(part)) is not None}

    def communicate(self, collective: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A collective is about to run."""
        if self._may_end:
            self.has_ended = True
            raise ReplayEnded
        self.collectives.add(collective)
        if (group := group_of(collective, args, kwargs)) is not None and group not in self.groups:
            self.groups.append(group)

    def all_saved(self) -> None:
        """All tensors of forward were saved: the replay ends before the next collective."""
        self._may_end = True

    def saves(self, number: int, tensor: torch.Tensor) -> None:
        node = next_node()
        if not self._saving or node > self._saving[-1]:
            self.saves_at.append(len(self.operators))
        self._saving.append(node)
        value, recipe, is_own = None, None, False
        parts: tuple[tuple[int, ViewRecipe], ...] = ()
        if type(tensor) in PLAIN:
            with disable_dispatch():
                value = self.values.find(tensor)
                is_own = is_parameter(tensor)
                recipe = ViewRecipe.of(tensor) if is_strided(tensor) else None
                if value is None and not is_own:
                    # The operator that reads it comes later.
                    self._unknown.append((len(self.saved), tensor.detach()))
        else:
            with disable_modes():
                found = [(self.values.find(part), ViewRecipe.of(part)) for part in strided_parts(tensor)]
            parts = tuple([(value, recipe) for value, recipe in found if value is not None])
        self.saved.append(RecordedTensor(value, len(self.operators), recipe, is_own, tensor.requires_grad, parts))

    def program(self) -> Program:
        saved = [
            each._replace(saved_by=self._nodes.get(node)) for each, node in zip(self.saved, self._saving, strict=True)
        ]
        return Program(
            self.operators,
            saved,
            self.makers,
            frozenset(values[0] for values in self.inputs if len(values) == 1),
            frozenset(self.written),
            self.recipes,
            {self._choices.key: self._chosen},
            self.values.opaque,
            frozenset(self.collectives),
            self.gathers,
        )

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if graph_task() != self._task:
            self.values.opaque = "it takes a gradient of what it computes"
            return func(*args, **kwargs)
        facts = facts_of_call(func, args)
        if facts.communicates:
            self.communicate(func, args, kwargs)
        if facts.ignored or ((facts.is_label or self._hidden.depth) and self._hidden(func, args)):
            return func(*args, **kwargs)
        if facts.casts and is_cast(args):
            output = func(*args, **kwargs)
            for part in tensors_in((output,)):
                self.casts.add(self._value(part, is_input=True))
            return output
        if is_chosen_under_a_mode(func, args):
            self.values.opaque = f"torch may run another kernel than {func} without a dispatch mode"
        node = next_node()
        operator = Operator(func, facts, tuple([self._value(each) for each in tensors_in((*args, *kwargs.values()))]))
        with disable_dispatch():
            operator.form = form_of(facts, args, kwargs)
        targets = [argument(args, kwargs, key) for key in facts.writes]
        operator.writes = tuple([self._value(each) for each in tensors_in(targets)])
        self.written.update(operator.writes)
        drawn = states_of([default_generator(device_of(args, kwargs))]) if facts.is_random else []
        with _InnerCollectives(self) if any(map(is_distributed_class, types)) else _NOTHING:
            output = func(*args, **kwargs)
        for generator, state in drawn:
            is_own = any(isinstance(each, torch.Generator) for each in (*args, *kwargs.values()))
            operator.draws = None if is_own else _drawn(generator, state)
        operator.depends = not self._depends.isdisjoint(operator.reads)
        self._nodes.setdefault(node, len(self.operators))
        new = self._note_outputs(operator, output)
        if operator.depends:
            self._depends.update(operator.makes, operator.writes)
        self.makers.update(dict.fromkeys(operator.makes, len(self.operators)))
        if new and self._choices.any and self._choices.planned is None and not operator.always_runs:
            self._ask(operator, new, output, args, kwargs)
        self.operators.append(operator)
        return output

    def _value(self, tensor: torch.Tensor, *, is_input: bool = False) -> int:
        """The value of a tensor. A tensor without one comes from outside."""
        value = self.values.find_or_name(tensor, self.count)
        if value == self.count:
            self.count += 1
            self.outside[value] = OutsideTensor(tensor)
            if is_input or tensor.requires_grad:
                self._depends.add(value)
        return value

    def _note_outputs(self, operator: Operator, output: Any) -> list[torch.Tensor]:
        """Note the outputs of an operator. Returns the new tensors."""
        facts: OperatorFacts = operator.facts
        operator.single = not isinstance(output, (list, tuple))
        outputs: list[Any] = []
        makes: list[int] = []
        new: list[torch.Tensor] = []
        is_plain, is_alias = facts.returned is not None, facts.is_view
        for index, each in enumerate((output,) if operator.single else output):
            key = None if facts.returned is None or index >= len(facts.returned) else facts.returned[index]
            if key is not None:
                outputs.append(Argument(key))
            elif not isinstance(each, torch.Tensor):
                is_plain = is_plain and isinstance(each, _NUMBERS)
                outputs.append(each)
            elif any(self.values.find(part) is not None for part in tensors_in((each,))):
                # It is memory of an argument, whether or not the schema says so.
                is_alias = True
            else:
                for part in tensors_in((each,)):
                    makes.append(self.values.find_or_name(part, self.count))
                    self.count += 1
                    new.append(part)
                is_strided_alone = type(each) is torch.Tensor and is_strided(each)
                is_plain = is_plain and is_strided_alone
                if is_strided_alone:
                    recipe = ViewRecipe.of(each)
                    outputs.append(recipe)
                    self.recipes[makes[-1]] = recipe
        operator.outputs, operator.makes = tuple(outputs), tuple(makes)
        operator.is_plain = is_plain and not is_alias
        operator.is_view = is_alias and not makes and not operator.writes
        return new

    def _ask(self, operator: Operator, new: list[torch.Tensor], output: Any, args: Any, kwargs: Any) -> None:
        must = False
        decision = self._choices.by_name(operator.func)
        if decision is not Decision.KEEP and self._choices.asks:
            module = self._locator.here()[0] if self._locator is not None else None
            call = OperatorCall(
                operator.func, module, len(self.operators), sum(each.nbytes for each in new if is_strided(each))
            )
            answer, must = self._choices.by_call(call, output, args, kwargs)
            if decision is None or answer is Decision.KEEP:
                decision = answer
        if decision is not None and decision is not Decision.RECOMPUTE:
            self._chosen[len(self.operators)] = decision, must


class _ContentReads(TorchFunctionMode):
    """Notes that Python code takes the content of a tensor. See NOTE [ Recording ]."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = weakref.ref(recorder)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        recorder = self._recorder()
        if recorder is not None and func in _READS:
            recorder.values.opaque = f"its Python code reads the content of a tensor, by {func.__name__}()"
        return func(*args, **(kwargs or {}))


class _InnerCollectives(OperatorMode):
    """Sees collectives that an operator of DTensors runs. See NOTE [ Collectives ]."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(map(is_distributed_class, types)):
            return NotImplemented
        if facts_of(func).communicates:
            self._recorder.communicate(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class OutsideTensor:
    """A tensor that the function reads and did not make, for a profiler. Only its memory is referred to, weakly."""

    __slots__ = ("device", "is_floating_point", "is_leaf", "nbytes", "requires_grad", "storage")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device, self.is_floating_point = tensor.device, tensor.is_floating_point()
        self.is_leaf, self.requires_grad = tensor.is_leaf, tensor.requires_grad
        self.storage: Callable[[], torch.UntypedStorage | None] = lambda: None
        """Its memory, if it is alive."""
        self.nbytes = 0
        if is_strided(tensor):
            # No reference to the tensor: torch.utils.swap_tensors would refuse it.
            self.storage = weakref.ref(tensor.untyped_storage())
            self.nbytes = tensor.untyped_storage().nbytes()


def is_cast(args: tuple[Any, ...]) -> bool:
    """Whether a copy of its first argument may be autocast's. See NOTE [ Autocast's casts ]."""
    # Autocast is off inside its own casts: so it cannot be asked whether it is on.
    tensor = args[0]
    return bool(tensor.requires_grad and tensor.is_leaf and base_of(tensor) is None)


def _drawn(generator: torch.Generator, before: torch.Tensor) -> int | None:
    """How far a generator has advanced; ``None`` if that is unknown, or cannot be repeated without drawing.

    On a CPU the count depends on values: an operator that drew nothing (Poisson's, at a rate of zero) may draw later.
    """
    with disable_modes():
        now = generator.get_state()
        if generator.device.type == "cpu" or len(now) != 2 * _OFFSET:
            return None
        first, last = (state[_OFFSET:].view(torch.int64).item() for state in (before, now))
        return int(last - first)


def advance(generator: torch.Generator, count: int) -> None:
    """Advance a generator, as an operator that is left out would have done."""
    with disable_modes():
        state = generator.get_state()
        state[_OFFSET:].view(torch.int64).add_(count)
        generator.set_state(state)


_LABEL = "FSDP::"
_CASTS = "FSDP::cast_forward"
"""Label of casts of a module's inputs and outputs, which are recomputed as anything else."""


class HiddenOperators:
    """Follows the labels of one run. See NOTE [ Hidden operators ]."""

    def __init__(self) -> None:
        self.depth = 0
        """Number of open labels, from the first that hides operators."""

    def __call__(self, operator: Any, args: tuple[Any, ...]) -> bool:
        """Whether this operator is hidden."""
        if operator is LABEL_BEGINS:
            label = str(args[0])
            self.depth += bool(self.depth or (label.startswith(_LABEL) and not label.startswith(_CASTS)))
            return True
        if operator is LABEL_ENDS:
            self.depth = max(0, self.depth - 1)
            return True
        return self.depth > 0


class Values:
    """Values by storages, in one run of a function. See NOTE [ Values ] in ``program.py``."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.opaque: str | None = None
        """Why storages cannot be told apart, if they cannot."""

    def find(self, tensor: torch.Tensor) -> int | None:
        """The value of a plain tensor, if it has one."""
        memory = self._memory(tensor)
        known = self._known.get(storage_key(memory))
        # A freed address is used again.
        return known[1] if known is not None and known[0]() is memory else None

    def find_or_name(self, tensor: torch.Tensor, value: int) -> int:
        """The value of a plain tensor. If it has none, it gets this one."""
        found = self.find(tensor)
        if found is not None:
            return found
        memory = self._memory(tensor)
        self._known[storage_key(memory)] = weakref.ref(memory), value
        return value

    def _memory(self, tensor: torch.Tensor) -> Any:
        memory: Any = tensor
        try:
            memory = tensor.untyped_storage()
            # A wrapper may have a storage of its own, which is empty: its operators use tensors that no one sees here.
            if type(tensor) in PLAIN or isinstance(tensor, FakeTensor) or has_bits(tensor):
                return memory
        except (NotImplementedError, RuntimeError):
            pass
        self.opaque = f"a tensor of layout {tensor.layout} and class {type(tensor).__name__}"
        return memory
