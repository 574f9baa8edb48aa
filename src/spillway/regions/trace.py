"""What a region did when it ran first: its operators, and which bytes each of them read, wrote and made.

NOTE [ What a trace holds ]

Values (see ``values.py``) that no operator of the region made come from outside: parameters, the region's inputs, what
the function closes over. A trace holds numbers and weak references, and few tensors: outputs that are to be kept or
offloaded, until the region has ended; the content of outside bytes before the region wrote them; and aliases of what
comes from outside, since a replay may find another tensor there (``outside.py``).

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
from torch.utils._pytree import tree_leaves

from spillway.errors import UnsupportedError
from spillway.regions.calls import Argument, Call, Form
from spillway.regions.outside import Outside
from spillway.regions.schema import Facts, argument
from spillway.regions.tensors import PLAIN, Tracker, is_strided, tensors_in
from spillway.regions.values import Values
from spillway.runtime.bytes import Bytes

_next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def is_cast(args: tuple[Any, ...]) -> bool:
    """Whether a copy of its first argument is one that autocast may make, and remember."""
    # Whether autocast is on cannot be asked here: it is off inside of its own casts.
    tensor = args[0]
    return bool(tensor.requires_grad and tensor.is_leaf and tensor._base is None)


def leaf_of(node: torch.autograd.graph.Node) -> torch.Tensor | None:
    """What was cast, if it was a leaf."""
    leaf: torch.Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return leaf


class Trace:
    """The operators of a region, in order."""

    def __init__(self, *, reentrant: bool = False) -> None:
        self.reentrant = reentrant
        self.calls: list[Call] = []
        self.values = Values()
        self.outside: dict[int, Outside] = {}
        self.count = 0
        """How many values there are."""
        self.shared: Sequence[Call | None] = ()
        """Of each operator, the call that other regions have in common with this one, once the region has ended."""
        self.complete = False
        """Whether the region has ended."""
        self.makers: dict[int, Call] = {}
        """Which call made a value."""
        self.rewritten: set[int] = set()
        """Values that were written after they were made."""
        self.inputs: list[tuple[int, ...]] = []
        """Values of each of the function's tensors, in order."""
        self.depends: set[int] = set()
        """Values that depend on inputs, or on what needs grad: others may be constants that the function caches."""
        self.cast: set[int] = set()
        """Values of leaves that were cast."""
        self.casts: set[int] = set()
        """Values that are casts of leaves."""
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor]] = {}
        """Generators of the user's, with their states when the region first drew from them."""
        self._sources: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        """Of values that are casts, the memory of the leaves that were cast."""
        self._aliases: list[tuple[int, Tracker]] = []
        """Of values that are preserved, tensors that autograd does not know to share their memory."""
        self.targets: set[int] = set()
        """Values that came into sight as mere targets of operators, or with such: most likely of compiled code."""
        self._first_node = _next_node()
        self._task = _graph_task()
        self.takes_gradient = False
        """Whether the function takes a gradient inside. See NOTE [ Gradients inside ] in ``region.py``."""
        self.is_paused = False
        """Whether the function runs again before its first run has ended: then nothing is noted."""
        self.chosen: list[tuple[Any, Any]] = []
        """Functions of torch that ran with modes off, and their results: see ``kernel_choice.py``."""
        self.writes_outside = False
        """See NOTE [ What is written outside ]."""

    def is_in_gradient(self) -> bool:
        """Whether the function takes a gradient inside, now or before: a backward goes on that it was not called in."""
        self.takes_gradient = self.takes_gradient or _graph_task() != self._task
        return self.takes_gradient

    def take_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        """The function is about to be called with these."""
        self.inputs = [tuple([self.value(part, is_input=True) for part in tensors_in((each,))]) for each in tensors]

    def read(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The values of the arguments."""
        find, values = self.values.find, []
        for tensor in tensors:
            known = find(tensor)
            values.append(self.value(tensor) if known is None else known)
        return tuple(values)

    def value(self, tensor: torch.Tensor, *, is_input: bool = False) -> int:
        """The tensor's value; what has none comes from outside."""
        value = self.values.find_or_name(tensor, self.count)
        if value == self.count:
            self.count += 1
            node = tensor.grad_fn
            if node is not None and not is_input:
                is_input = self._comes_with(node, value)
            outside = self.outside[value] = Outside(tensor, is_input=is_input)
            if outside.is_input or outside.has_gradient:
                self.depends.add(value)
        return value

    def _comes_with(self, node: torch.autograd.graph.Node, value: int) -> bool:
        """Whether a tensor with this node is made anew for each run, though nothing here was seen to make it."""
        if node._sequence_nr() >= self._first_node:
            self.values.opaque = f"a tensor of {node.name()} that no operator was seen to make"
            return True
        # Autocast may have made it in another region.
        leaf = leaf_of(node) if node.name() == "ToCopyBackward0" else None
        if leaf is None:
            return False
        self._sources[value] = weakref.ref(leaf.untyped_storage())
        return True

    def is_cast_of_another(self, value: int, tensor: torch.Tensor) -> bool:
        """Whether a tensor is the cast of another leaf than this value was."""
        source, node = self._sources.get(value), tensor.grad_fn
        if source is None or node is None or node.name() != "ToCopyBackward0":
            return False
        leaf = leaf_of(node)
        return leaf is not None and leaf.untyped_storage() is not source()

    def is_cast(self, values: Values, args: tuple[Any, ...]) -> bool:
        """Whether autocast may cast this now, and not another time. See NOTE [ Autocast's casts ]."""
        # In the reentrant mode, inputs are leaves in the re-run only.
        return is_cast(args) and (not self.reentrant or (values.find(args[0]),) not in self.inputs)

    def add_cast(self, tensor: torch.Tensor, output: torch.Tensor) -> None:
        """A leaf was cast. See NOTE [ Autocast's casts ]."""
        leaves = tensors_in((tensor,))
        self.cast.update(self.value(leaf) for leaf in leaves)
        for leaf, part in zip(leaves, tensors_in((output,)), strict=False):
            value = self.value(part, is_input=True)
            self.casts.add(value)
            self._sources[value] = weakref.ref(leaf.untyped_storage())

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
            if isinstance(target, torch.Tensor) and (type(target) not in PLAIN or not is_strided(target)):
                self._refuse_wrapper(target)
        for tensor in tensors_in(targets):
            value = self.value(tensor)
            values.append(value)
            is_target = value >= seen and reads.count(value) == 1 and any(isinstance(key, str) for key in facts.writes)
            if value in self.outside and not self._is_memory_of_another(tensor, value):
                self.outside[value].save(tensor)
                self.writes_outside = True
                if is_target:
                    self._add_targets(reads, seen)
        return tuple(values)

    def _add_targets(self, reads: tuple[int, ...], seen: int) -> None:
        """A call writes into something that was never seen before: what else it brings with it was made unseen, too."""
        for value in reads:
            outside = self.outside.get(value)
            if value >= seen and outside is not None and not (outside.is_input or outside.has_gradient):
                outside.let_go()
                self.targets.add(value)

    def settle(self) -> None:
        """The region has ended. Targets that died with it are no outside bytes: they are written again as they were."""
        self.complete = True
        self.values.forget()
        for value in self.targets:
            if self.outside[value].is_dead():
                self.outside[value].before = None
        self.writes_outside = any(outside.before is not None for outside in self.outside.values())

    def values_in(self, output: Any) -> set[int]:
        """What the function gives its caller."""
        found = map(self.values.find, tensors_in(tree_leaves(output)))
        return {value for value in found if value is not None}

    def share(self) -> None:
        """Have what is said of operators in common with other regions.

        They are many small objects, and Python's collector would have to look at each of them.
        """
        common: list[Call | None] = []
        for place, call in enumerate(self.calls):
            if call.is_shared:
                common.append(call)
                continue
            kept = self.calls[place] = call.share()
            for value in kept.makes:
                self.makers[value] = kept
            common.append(kept.common)
        self.shared = common

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

    def add_like(self, like: Call, output: Any) -> list[torch.Tensor] | None:
        """A call has ended that began like a shared one; ``None``, and nothing done, if it did not end like it.

        Args:
            like: of an operator that is plain (:class:`~spillway.regions.schema.Facts`).
            output: what it gave.
        """
        if like.facts.is_view:
            self.calls.append(like)
            return []
        if (
            type(output) is not torch.Tensor
            or not is_strided(output)
            or like.depends is self.depends.isdisjoint(like.reads)
        ):
            return None
        count = self.count
        if like.plain:
            if (
                like.makes != (count,)
                or not like.forms[0].is_of(output)
                or self.values.find_or_name(output, count) != count
            ):
                return None
            self.makers[count] = like
            if like.depends:
                self.depends.add(count)
            self.count += 1
            self.calls.append(like)
            return [output]
        if not like.aliases or like.makes or self.values.find(output) is None:
            return None
        self.calls.append(like)
        self._follow(output)
        return []

    def own_last(self) -> Call:
        """The last call, which is shared, as one of this region alone."""
        call = self.calls[-1] = self.calls[-1].own()
        for value in call.makes:
            self.makers[value] = call
        return call

    def _add_new(self, call: Call, output: Any) -> list[torch.Tensor]:
        if type(output) is torch.Tensor and call.facts.gives_one and is_strided(output):
            # Most operators.
            value = self.values.find_or_name(output, self.count)
            if value != self.count:
                call.aliases = True
                self._follow(output)
                return []
            self.count += 1
            call.plain = True
            call.forms = (Form.of(output),)
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
                # Without autograd, a kernel may leave out what its backward would need.
                is_left_out = value is None and self.reentrant
                plain = plain and not is_left_out and (value is None or isinstance(value, (int, float, bool, complex)))
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
            forms.append(Form.of(value) if plain else None)
        call.plain = plain
        if plain:
            call.forms = tuple(forms)
        call.makes = tuple(made)
        for value in made:
            self.makers[value] = call
        return new

    def _follow(self, output: torch.Tensor) -> None:
        """An operator gave memory of its argument, which its schema does not say: a version counter of its own."""
        value = self.values.find(output)
        maker = None if value is None else self.makers.get(value)
        if value is not None and maker is not None and maker.is_given:
            self._aliases.append((value, Tracker(output)))

    def are_random(self, values: Iterable[int]) -> bool:
        """Whether a random operator has made any of them."""
        makers = (self.makers.get(value) for value in values)
        return any(maker is not None and maker.facts.is_random for maker in makers)

    def written_since(self) -> set[int]:
        """Values that are preserved and were written by such a name."""
        return {value for value, tracker in self._aliases if tracker.was_written}

    def written_outside(self) -> tuple[torch.Tensor, ...]:
        """What the region wrote and did not make, as far as it is alive."""
        if not self.writes_outside:
            return ()
        return tuple(outside.tracker for outside in self.outside.values() if outside.before is not None)

    def written_bytes(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The bytes of these, each with what they were before."""
        pairs = []
        for outside in self.outside.values():
            storage = outside.storage()
            if outside.before is not None and storage is not None:
                pairs.append((Bytes(storage, 0, storage.nbytes()).tensor(), outside.before))
        return pairs

    def essence(self) -> list[tuple[object, ...]]:
        """The operators on what depends on inputs and on what needs grad, without the others: caches, say.

        That of another run is equal if these operators are the same, and hang together in the same way. What they read
        of other tensors, as of a cache, is not told here.
        """
        names: dict[int, object] = {}
        for place, values in enumerate(self.inputs):
            for index, value in enumerate(values):
                names.setdefault(value, ("input", place, index))
        essence: list[tuple[object, ...]] = []
        for call in self.calls:
            for value in call.reads:
                if value in self.outside and value in self.depends and value not in names:
                    names[value] = self._origin(value)
            if names.keys().isdisjoint(call.reads):
                continue
            for index, value in enumerate((*call.makes, *call.writes)):
                names.setdefault(value, (len(essence), index))
            forms = tuple((form.dtype, form.size) for form in call.forms if isinstance(form, Form))
            reads, writes = (tuple([names.get(value) for value in values]) for values in (call.reads, call.writes))
            essence.append((call.func, reads, writes, forms, repr(call.constants)))
        return essence

    def _origin(self, value: int) -> object:
        """What is the same in two runs that read the same tensor from outside, and nothing else is."""
        source = self._sources.get(value)
        storage = self.outside[value].storage() if source is None else source()
        return object() if storage is None else ("outside", source is None, storage._cdata)

    def _new(self, tensor: torch.Tensor) -> int:
        value, self.count = self.count, self.count + 1
        self.values.name(tensor, value)
        return value
