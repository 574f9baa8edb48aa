"""What a region did when it ran first: its operators, and which bytes each of them read, wrote and made.

NOTE [ Values ]

A *value* is a number for the bytes of one storage: an operator that gives a new tensor makes a value, views of it are
the same value, and in-place operators write it. Values that no operator of the region made come from outside:
parameters, the region's inputs, what the function closes over. A trace holds numbers and weak references, and no tensor
but two kinds: outputs that are to be kept or offloaded, until the region has ended, and what was outside bytes' content
before the region wrote them.

NOTE [ What is written outside ]

Batch norm counts its statistics, a router its tokens, spectral norm improves its vectors: the region writes what it did
not make. A re-run must not do so again, and must see what the first run saw. So the content before the first write is
copied, and the re-run reads and writes a copy of that copy.

NOTE [ Autocast's casts ]

Autocast casts a weight once and remembers it until its outermost context exits; so the cast happens in the first of two
regions, and in the re-run of both. Casts of leaves that need grad are therefore not counted, in no run: they always
run, and what they give comes from outside, but is dropped and cast again like anything else.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from spillway.capture.identity import is_wrapper, storage_parts
from spillway.capture.schema import Facts, Key, argument
from spillway.errors import UnsupportedError
from spillway.records import Decision
from spillway.runtime.bytes import Bytes, over

_SMALL = 64

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


class Values:
    """Numbers for storages, for one run of a region."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.opaque: str | None = None
        """Why bytes cannot be told apart here, if they cannot."""

    def find(self, tensor: torch.Tensor) -> int | None:
        """The value of a plain tensor, if it has one."""
        memory = self._memory(tensor)
        known = self._known.get(memory._cdata)
        # An address is handed out again when it is free.
        return known[1] if known is not None and known[0]() is memory else None

    def find_or_name(self, tensor: torch.Tensor, value: int) -> int:
        """The value of a plain tensor, which is this one from now on if it had none."""
        memory = self._memory(tensor)
        known = self._known.get(memory._cdata)
        if known is not None and known[0]() is memory:
            return known[1]
        self._known[memory._cdata] = weakref.ref(memory), value
        return value

    def name(self, tensor: torch.Tensor, value: int) -> None:
        """The tensor's bytes are this value from now on."""
        memory = self._memory(tensor)
        self._known[memory._cdata] = weakref.ref(memory), value

    def shares(self, tensor: torch.Tensor, value: int) -> bool:
        """Whether another storage that is known begins, or ends, in the tensor's."""
        memory = self._memory(tensor)
        start, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes()
        for reference, other in self._known.values():
            storage = reference() if other != value else None
            if isinstance(storage, torch.UntypedStorage) and storage.nbytes() and start < end:
                first = storage.data_ptr()
                if first < end and start < first + storage.nbytes():
                    return True
        return False

    def _memory(self, tensor: torch.Tensor) -> Any:
        try:
            return tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            self.opaque = f"a tensor of layout {tensor.layout} and class {type(tensor).__name__}"
            return tensor


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The plain tensors among arguments or outputs, in lists too, and the parts of wrappers."""
    found: list[torch.Tensor] = []
    for value in values:
        if type(value) in _PLAIN:
            found.append(value)
        elif isinstance(value, torch.Tensor):
            found.extend(storage_parts(value) if is_wrapper(value) else (value,))
        elif isinstance(value, (list, tuple)):
            found.extend(tensors_in(value))
    return found


def tensors_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The same among the arguments of a call."""
    found = tensors_in(args)
    return found + tensors_in(kwargs.values()) if kwargs else found


def constants_of(args: Iterable[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call that are no tensors, to be compared with another run's."""
    constants: list[Any] = []
    for value in args:
        if isinstance(value, torch.Tensor):
            continue
        if isinstance(value, (list, tuple)):
            constants.append(constants_of(value, {}))
        elif not isinstance(value, torch.Generator):
            constants.append(value)
    if kwargs:
        constants.extend((key, *constants_of((value,), {})) for key, value in kwargs.items())
    return constants


class Outside:
    """Bytes that the region did not make."""

    __slots__ = ("_storage", "before", "content", "has_gradient", "held", "is_input", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, *, is_input: bool, holds: bool) -> None:
        self.tensor: Callable[[], torch.Tensor | None] = weakref.ref(tensor)
        self.version = _version(tensor)
        self.is_input = is_input
        """Whether it is made anew for each run: an input, or a cast."""
        self.has_gradient = tensor.requires_grad
        storage = None if is_input or not is_strided(tensor) else tensor.untyped_storage()
        self._storage: Callable[[], torch.UntypedStorage | None] = _none if storage is None else weakref.ref(storage)
        self.held = tensor if holds and storage is not None and not self.has_gradient else None
        """The tensor itself, if it might be made anew (from a list, from an array) and have another content then."""
        self.content: list[Any] | None = None
        """What a small constant of the host's holds, where nothing can stand for it."""
        if not holds and not is_input and not self.has_gradient and is_strided(tensor):
            with torch._C._DisableTorchDispatch():
                self.tensor = _tracker(tensor)
                if tensor.device.type == "cpu" and tensor.numel() <= _SMALL:
                    self.content = tensor.tolist()
        self.before: torch.Tensor | None = None
        """All bytes of the storage before the region wrote any. See NOTE [ What is written outside ]."""

    def save(self, tensor: torch.Tensor) -> None:
        if self.before is None:
            storage = tensor.untyped_storage()
            # No operator of an outer region.
            with torch._C._DisableTorchDispatch():
                self.before = Bytes(storage, 0, storage.nbytes()).tensor().clone()

    def is_another(self, tensor: torch.Tensor) -> bool:
        """Whether it is known not to be this one."""
        if self.before is None and self.content is not None and repr(self.content) != repr(_content(tensor)):
            return True
        storage = self._storage()
        return storage is not None and tensor.untyped_storage() is not storage

    def storage(self) -> torch.UntypedStorage | None:
        """Its memory, if that is alive."""
        storage = self._storage()
        if storage is not None or self.content is not None:
            return storage
        tensor = self.tensor()
        return None if tensor is None else tensor.untyped_storage()

    def is_dead(self) -> bool:
        """Whether its memory is gone."""
        return self._storage() is None

    def changed(self) -> bool:
        """Whether it was written since the region first read it, by somebody else."""
        tensor = self.tensor()
        return tensor is not None and self.before is None and _version(tensor) != self.version


def _is_cast(tensor: torch.Tensor) -> bool:
    """Whether autocast may have made it in another region."""
    return tensor.grad_fn is not None and tensor.grad_fn.name() == "ToCopyBackward0"


def _tracker(tensor: torch.Tensor) -> Callable[[], torch.Tensor | None]:
    """Gives a tensor without memory on the same counter of versions."""
    tracker = aliases_of([tensor])[0]
    tracker.data = torch.empty(0, device=tensor.device)
    return lambda: tracker


def _content(tensor: torch.Tensor) -> Any:
    with torch._C._DisableTorchDispatch():
        return tensor.tolist()


def _none() -> None:
    return None


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


class Call:
    """One operator that ran."""

    __slots__ = (
        "after",
        "aliases",
        "before",
        "constants",
        "decision",
        "depends",
        "facts",
        "forms",
        "func",
        "given",
        "held",
        "makes",
        "must",
        "plain",
        "reads",
        "single",
        "writes",
    )

    def __init__(self, func: Any, facts: Facts, reads: tuple[int, ...], constants: list[Any]) -> None:
        self.func = func
        self.constants = constants
        """The arguments that are no tensors."""
        self.facts = facts
        self.reads = reads
        self.writes: tuple[int, ...] = ()
        self.makes: tuple[int, ...] = ()
        """New values, in the order of the new tensors among the outputs."""
        self.depends = False
        """Whether it computes with what depends on inputs, or on what needs grad."""
        self.plain = False
        """Whether all outputs are plain new tensors, arguments, numbers or nothing: so that it need not run again."""
        self.aliases = facts.is_view
        """Whether an output shares memory with an argument that is not written, by its schema or as it turned out."""
        self.single = True
        """Whether it gave one thing, and not a sequence."""
        self.forms: list[Any] = []
        """If plain, for each output: a :class:`Form`, an :class:`Argument`, or the thing itself."""
        self.decision = Decision.RECOMPUTE
        self.must = False
        """Whether the decision was a command."""
        self.held: list[torch.Tensor] | None = None
        """Its new tensors, until the region ends."""
        self.given: list[Any] | None = None
        """Handles of them, for the re-run."""
        self.before: Any = None
        """State of its generator before it ran."""
        self.after: Any = None
        """And after."""

    @property
    def is_given(self) -> bool:
        """Whether its outputs are kept or offloaded."""
        return self.decision is not Decision.RECOMPUTE

    @property
    def is_settled(self) -> bool:
        """Whether its outputs are kept because the host, or the shape of things, hangs on them."""
        return self.facts.is_settled and self.plain and self.is_given

    @property
    def is_only_a_view(self) -> bool:
        """Whether it computes nothing."""
        return self.aliases and not self.writes and not self.makes


class Form:
    """What a new tensor looked like."""

    __slots__ = ("device", "dtype", "size", "stride")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.size = tensor.shape
        self.stride = tensor.stride()
        self.dtype = tensor.dtype
        self.device = tensor.device

    def __repr__(self) -> str:
        return f"{self.dtype} of {list(self.size)}"

    def unwritten(self, *, poisoned: bool) -> torch.Tensor:
        """A tensor like it, with anything in it; full of NaN if poisoned."""
        tensor = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        if poisoned:
            Bytes(tensor.untyped_storage(), 0, tensor.untyped_storage().nbytes()).tensor().fill_(0xFF)
        return tensor


class Argument:
    """An output that is one of the arguments."""

    __slots__ = ("key",)

    def __init__(self, key: Key) -> None:
        self.key = key


class Trace:
    """The operators of a region, in order."""

    def __init__(self, *, reentrant: bool = False) -> None:
        self.reentrant = reentrant
        self.calls: list[Call] = []
        self.values = Values()
        self.outside: dict[int, Outside] = {}
        self.count = 0
        """How many values there are."""
        self.complete = False
        """Whether the region has ended."""
        self.makers: dict[int, Call] = {}
        """Which call made a value."""
        self.rewritten: set[int] = set()
        """Values that were written after they were made."""
        self.inputs: tuple[int, ...] = ()
        """Values of the inputs, if these are leaves in the re-run only."""
        self.depends: set[int] = set()
        """Values that depend on inputs, or on what needs grad: others may be constants that the function caches."""
        self.cast: set[int] = set()
        """Values of leaves that were cast."""
        self.casts: set[int] = set()
        """Values that are casts of leaves."""
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        """Generators of the user's, with their states when the region first drew from them."""
        self._targets: list[int] = []
        self.writes_outside = False
        """See NOTE [ What is written outside ]."""

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
        """The values of the arguments."""
        return tuple([self.value(tensor) for tensor in tensors_of(args, kwargs)])

    def value(self, tensor: torch.Tensor, *, is_input: bool = False) -> int:
        """The tensor's value; what has none comes from outside."""
        value = self.values.find_or_name(tensor, self.count)
        if value == self.count:
            self.count += 1
            outside = Outside(tensor, is_input=is_input or _is_cast(tensor), holds=not self.reentrant)
            self.outside[value] = outside
            if outside.is_input or outside.has_gradient:
                self.depends.add(value)
        return value

    def is_cast(self, values: Values, args: tuple[Any, ...]) -> bool:
        """Whether autocast may cast this now, and not another time. See NOTE [ Autocast's casts ]."""
        # Whether autocast is on cannot be asked here: it is off inside of its own casts.
        tensor = args[0]
        if not (tensor.requires_grad and tensor.is_leaf and tensor._base is None):
            return False
        return not self.inputs or values.find(tensor) not in self.inputs

    def add_cast(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """A leaf was cast. See NOTE [ Autocast's casts ]."""
        self.cast.update(self.value(part) for part in tensors_in((tensor,)))
        for part in tensors_in((output,)):
            self.casts.add(self.value(part, is_input=True))

    def written(
        self, facts: Facts, args: tuple[Any, ...], kwargs: dict[str, Any], reads: tuple[int, ...], *, seen: int
    ) -> tuple[int, ...]:
        """The values that are about to be written; those from outside are copied first.

        A mere target (``out=``) that is not among the ``seen`` first values may be a buffer that compiled code has
        made, which reads it unseen: see :meth:`settle`.
        """
        values = []
        targets = [argument(args, kwargs, key) for key in facts.writes]
        for target in targets:
            if isinstance(target, torch.Tensor) and (type(target) not in _PLAIN or not is_strided(target)):
                self._refuse_wrapper(target)
        for tensor in tensors_in(targets):
            value = self.value(tensor)
            values.append(value)
            is_target = value >= seen and reads.count(value) == 1 and any(isinstance(key, str) for key in facts.writes)
            if value in self.outside and not self._is_memory_of_another(tensor, value):
                self.outside[value].save(tensor)
                self.writes_outside = True
                if is_target:
                    self.outside[value].held = None
                    self._targets.append(value)
        return tuple(values)

    def settle(self) -> None:
        """The region has ended. Targets that died with it are no outside bytes: they are written again as they were."""
        self.complete = True
        for value in self._targets:
            if self.outside[value].is_dead():
                self.outside[value].before = None
        self.writes_outside = any(outside.before is not None for outside in self.outside.values())

    def _refuse_wrapper(self, tensor: torch.Tensor) -> None:
        """Of what is made of several tensors, no copy can stand for the original."""
        if any(self.value(part) in self.outside for part in tensors_in((tensor,))):
            raise UnsupportedError(
                f"got a region that writes into a {type(tensor).__name__} which it did not make, expected a plain "
                f"tensor; leave that code outside of the region"
            )

    def _is_memory_of_another(self, tensor: torch.Tensor, value: int) -> bool:
        """Whether a value of the region's lies in the same memory, as after an exchange by DLPack or NumPy."""
        if not self.outside[value].is_input and self.values.shares(tensor, value):
            self.values.opaque = "two storages in one memory"
            return True
        return False

    def add(self, call: Call, output: Any) -> list[torch.Tensor]:
        """A call has ended; gives its new tensors."""
        self.calls.append(call)
        if call.facts.is_view and not call.facts.writes:
            return []
        call.depends = not self.depends.isdisjoint(call.reads)
        new = self._add_new(call, output)
        if call.depends:
            self.depends.update(call.makes, call.writes)
        return new

    def _add_new(self, call: Call, output: Any) -> list[torch.Tensor]:
        if type(output) is torch.Tensor and call.facts.gives_one and is_strided(output):
            # Most operators.
            value = self.values.find_or_name(output, self.count)
            if value != self.count:
                call.aliases = True
                return []
            self.count += 1
            call.plain = True
            call.forms = [Form(output)]
            call.makes = (value,)
            self.makers[value] = call
            return [output]
        return self._add_any(call, output)

    def _add_any(self, call: Call, output: Any) -> list[torch.Tensor]:
        call.single = not isinstance(output, (list, tuple))
        returned = call.facts.returned
        plain = returned is not None and not call.aliases
        new: list[torch.Tensor] = []
        made: list[int] = []
        forms: list[Any] = []
        for index, value in enumerate((output,) if call.single else output):
            if not isinstance(value, torch.Tensor):
                # Numbers and nothing are given again as they are; anything else is only its own operator's to make.
                plain = plain and (value is None or isinstance(value, (int, float, bool, complex)))
                forms.append(value)
                continue
            key = returned[index] if returned is not None and index < len(returned) else None
            if key is not None:
                forms.append(Argument(key))
                continue
            parts = tensors_in((value,))
            if call.facts.is_view or any(self.values.find(part) in call.reads for part in parts):
                plain, call.aliases = False, True
                continue
            plain = plain and type(value) is torch.Tensor and is_strided(value)
            made.extend(self._new(part) for part in parts)
            new.extend(parts)
            forms.append(Form(value) if plain else None)
        call.plain = plain
        if plain:
            call.forms = forms
        call.makes = tuple(made)
        for value in made:
            self.makers[value] = call
        return new

    def written_outside(self) -> tuple[torch.Tensor, ...]:
        """What the region wrote and did not make, as far as it is alive."""
        if not self.writes_outside:
            return ()
        tensors = (outside.tensor() for outside in self.outside.values() if outside.before is not None)
        return tuple(tensor for tensor in tensors if tensor is not None)

    def written_bytes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes of these, each with what they were before."""
        pairs = []
        for outside in self.outside.values():
            storage = outside.storage()
            if outside.before is not None and storage is not None:
                pairs.append((Bytes(storage, 0, storage.nbytes()).tensor(), outside.before))
        return pairs

    def essence(self, inputs: Sequence[torch.Tensor] | None) -> list[tuple[Any, ...]]:
        """The operators on what depends on inputs and on what needs grad, without the others: caches, say.

        Args:
            inputs: the inputs, if the trace was not told of them.
        """
        depends = {value for value, outside in self.outside.items() if outside.is_input or outside.has_gradient}
        if inputs is not None:
            depends.update(value for part in tensors_in(inputs) if (value := self.values.find(part)) is not None)
        essence = []
        for call in self.calls:
            if depends.isdisjoint(call.reads):
                continue
            depends.update(call.makes, call.writes)
            forms = tuple((form.dtype, form.size) for form in call.forms if isinstance(form, Form))
            reads = tuple(value in depends for value in call.reads)
            essence.append((call.func, reads, forms, repr(call.constants)))
        return essence

    def _new(self, tensor: torch.Tensor) -> int:
        value, self.count = self.count, self.count + 1
        self.values.name(tensor, value)
        return value


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether it has sizes and strides over one storage."""
    return tensor.layout is torch.strided and not tensor.is_nested


def nbytes_of(tensor: torch.Tensor) -> int:
    """Its bytes, as far as they can be told."""
    return tensor.nbytes if is_strided(tensor) else 0


def aliases_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The same bytes without history, on the same counters of versions; seen by no mode."""
    # Below autograd, where a mode is called, an alias does not share the counter unless told to.
    with (
        torch._C._DisableTorchDispatch(),
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False),
    ):
        return [tensor.detach() for tensor in tensors]


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes without history, on a counter of its own."""
    plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    if plain and not (tensor.is_conj() or tensor.is_neg()):
        return over(tensor.untyped_storage(), tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
    return tensor.detach()
