"""Finds the blocks of a model: by class, name, predicate or because it repeats them.

NOTE [ Names of blocks ]

A pattern is matched as in a shell against whole dotted names, and its ``*`` matches dots: ``"layers.*"`` matches
``layers.0`` and ``layers.0.attn``. Only the **outermost** modules that a pattern or a class matches are taken, and
nothing inside of them. A list can name both, for blocks within blocks. Modules without a forward of their own
(``ModuleList``) are never called, and never taken: ``"*"`` finds the modules in them. The model itself, whose name is
``""``, is not taken either.

NOTE [ Repeated blocks ]

These are modules of one class, two of which are siblings with parameters of the same names, shapes and dtypes. All
modules of that class count, and not only those two: the first block of a stage or of a stack often has a parameter
more. The class that owns most is taken, and others that own at least a quarter as much (an encoder beside a decoder).
If one of two classes is inside of the other, the outer one is taken (a block, and not its experts). Layers of
``torch.nn`` without parts (``Linear``) are no blocks, except recurrent ones (``GRU``), each of which is a stack of
steps.
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from spillway._torch import COMPILED_MODULE, children_of
from spillway.errors import UsageError

FSDP = "torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"

Predicate = Callable[[str, Module], bool]
Selector = type[Module] | str | Predicate
Blocks = Selector | Sequence[Selector]

_BUILT_IN: set[type[Module]] = {
    *(torch.nn.RNN, torch.nn.LSTM, torch.nn.GRU, torch.nn.RNNCell, torch.nn.LSTMCell, torch.nn.GRUCell),
    *(torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer, torch.nn.MultiheadAttention),
}
"""torch's layers that are large enough to be blocks."""
_OTHERS = 4
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Named:
    """A module and its dotted name, which is ``""`` for the model; with two names it is there twice."""

    name: str
    module: Module

    def __str__(self) -> str:
        kind = type(self.module).__name__
        return f"{self.name!r} ({kind})" if self.name else f"the model ({kind})"


def find_blocks(model: Module, blocks: Blocks | None = None, *, what: str = "blocks") -> list[Named]:
    """The blocks of a model, each module once, by its first name, in the order in which the model has them.

    Args:
        model: the model that they are in.
        blocks: a class or a tuple of them, a pattern of dotted names, a predicate, or a list of such. ``None``: those
            that the model repeats. See the notes at the top of this file.
        what: the name of the user's option, for errors.

    Returns:
        At least one block.

    Raises:
        UsageError: if nothing is found, or for an invalid selector.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        >>> [block.name for block in find_blocks(model, "*")]
        ['0', '1']
    """
    modules = [each for each in walk(model) if is_called(each.module)]
    found = _repeated(model, modules) if blocks is None else []
    listed: list[Any] = list(blocks) if isinstance(blocks, (list, tuple, set, frozenset)) else [blocks]
    if not listed:
        raise UsageError(f"{what}: got {blocks!r}, expected at least one class, pattern or predicate, or None")
    for selector in listed if blocks is not None else ():
        matched = _matched(modules, selector, what)
        if not matched:
            raise UsageError(
                f"{what}: got {selector!r}, which is none of the {len(modules)} modules with a forward below "
                f"{Named('', model)}, expected a class, a pattern of dotted names or a predicate that some of them "
                f"match; {_meant(modules, selector)}{_candidates(modules)}"
            )
        found += matched
    chosen = {id(each.module) for each in found}
    return _once(each for each in modules if id(each.module) in chosen)


def walk(model: Module) -> Iterator[Named]:
    """All modules below a model under all their names, parents before children."""

    def below(module: Module, prefix: str, above: set[int]) -> Iterator[Named]:
        for key, child in children_of(module).items():
            # A module may hold its own parent.
            if child is not None and id(child) not in above:
                yield Named(f"{prefix}{key}", child)
                yield from below(child, f"{prefix}{key}.", above | {id(child)})

    return below(model, "", {id(model)})


def uncompiled(module: Module) -> Module:
    """The module that ``torch.compile`` was called with, or the module itself."""
    inner = children_of(module)["_orig_mod"] if is_compiled(module) else None
    return module if inner is None else inner


def is_called(module: Module) -> bool:
    """Whether a module has a forward: a ``ModuleList`` has none."""
    # A scripted class has a descriptor there.
    return "forward" in module.__dict__ or inspect.getattr_static(type(module), "forward") is not Module.forward


def inside_of(name: str, outer: Iterable[str]) -> bool:
    """Whether a dotted name is below one of others."""
    return any(name.startswith(f"{each}.") for each in outer)


def above(model: Module, blocks: Iterable[Named]) -> list[Named]:
    """The modules that blocks are in, and the model."""
    names = [block.name for block in blocks]
    between = [each for each in walk(model) if any(inside_of(name, (each.name,)) for name in names)]
    return [Named("", model), *between] if names else []


def is_compiled(module: Module) -> bool:
    """Whether a module is what ``torch.compile(module)`` gives."""
    return is_a(module, *COMPILED_MODULE)


def is_a(module: Module, home: str, name: str) -> bool:
    """Whether it is of a class whose file is slow to import: if it is not loaded, there is no such module."""
    kind: type[Module] | None = getattr(sys.modules.get(home), name, None)
    return kind is not None and isinstance(module, kind)


def is_sharded(module: Module) -> bool:
    """Whether FSDP gathers its parameters for each call."""
    return is_a(module, "torch.distributed.fsdp", "FSDPModule") or is_a(module, *FSDP)


def signature(module: Module) -> Hashable:
    """Class, and names, shapes and dtypes of the parameters."""
    parameters = module.named_parameters(remove_duplicate=False)
    return _kind(module), tuple((name, None if is_lazy(each) else each.shape, each.dtype) for name, each in parameters)


def _matched(modules: list[Named], selector: Any, what: str) -> list[Named]:
    if isinstance(selector, str):
        return _outermost(each for each in modules if fnmatch.fnmatchcase(each.name, selector))
    if isinstance(selector, type):
        if not issubclass(selector, Module):
            raise UsageError(f"{what}: got the class {selector!r}, expected a subclass of torch.nn.Module")
        return _outermost(each for each in modules if isinstance(uncompiled(each.module), selector))
    if isinstance(selector, Module) or not callable(selector) or not _takes_two(selector):
        raise UsageError(
            f"{what}: got {selector!r:.200}, expected a class, a pattern of dotted names such as 'layers.*', a "
            f"predicate (name, module) -> bool, or a list of such; {_candidates(modules)}"
        )
    found = []
    for each in modules:
        answer = selector(each.name, each.module)
        if not isinstance(answer, bool):
            raise UsageError(f"{what}: got {answer!r} from {selector!r} for {each.name!r}, expected True or False")
        found += [each] * answer
    return found


def _takes_two(predicate: Callable[..., Any]) -> bool:
    try:
        inspect.signature(predicate).bind("", None)
    except TypeError:
        return False
    except ValueError:
        # A function of C need not tell.
        return True
    return True


def _outermost(found: Iterable[Named]) -> list[Named]:
    kept: list[Named] = []
    for each in found:
        # Parents come before their children.
        if not inside_of(each.name, (outer.name for outer in kept)):
            kept.append(each)
    return kept


def _once(found: Iterable[Named]) -> list[Named]:
    first: dict[int, Named] = {}
    for each in found:
        first.setdefault(id(each.module), each)
    return list(first.values())


def _repeated(model: Module, modules: list[Named]) -> list[Named]:
    """See NOTE [ Repeated blocks ]."""
    alike: set[Hashable] = set()
    kinds: dict[Hashable, None] = {}
    for each in _once(modules):
        module = uncompiled(each.module)
        is_torchs = type(module).__module__.startswith("torch.nn")
        if is_torchs and not children_of(module) and not isinstance(module, torch.nn.RNNBase):
            # A layer of a block.
            continue
        key = each.name.rpartition(".")[0], signature(each.module)
        if key in alike:
            # Two siblings are alike.
            kinds[_kind(each.module)] = None
        alike.add(key)
    families = [_once(_outermost(each for each in modules if _kind(each.module) == kind)) for kind in kinds]
    # The outer of two that own the same comes first.
    families.sort(key=lambda family: (-_owned(family), min(each.name.count(".") for each in family)))
    chosen: list[Named] = []
    for family in families:
        if chosen and _owned(family) * _OTHERS < _owned(families[0]):
            break
        names = [each.name for each in family]
        taken = [each.name for each in chosen]
        if not any(inside_of(name, taken) for name in names) and not any(inside_of(name, names) for name in taken):
            chosen += family
    if not chosen or not _owned(chosen):
        raise UsageError(
            f"blocks: got None, and {Named('', model)} repeats no block: it has no siblings of one class with equal "
            f"parameters. Give blocks= a class, a name or a predicate; {_candidates(modules)}"
        )
    return chosen


def _kind(module: Module) -> Hashable:
    """The class; for a ``Sequential``, also the classes of the modules in it."""
    module = uncompiled(module)
    inside = tuple(_kind(child) for child in module) if type(module) is torch.nn.Sequential else ()
    return type(module), inside


def _owned(family: Iterable[Named]) -> int:
    parameters = {id(parameter): parameter for each in family for parameter in each.module.parameters()}
    return sum(0 if is_lazy(parameter) else parameter.numel() for parameter in parameters.values())


def patterns_of(names: Iterable[str]) -> list[str]:
    """Patterns that match modules of these names: ``layers.*.up``, and ``*.up``."""
    patterns: dict[str, None] = {}
    for name in names:
        *before, last = ("*" if part.isdigit() else part for part in name.split("."))
        patterns[".".join([*before, last])] = None
        if before and last != "*":
            patterns[f"*.{last}"] = None
    return list(patterns)


def perhaps(got: str, known: Iterable[str]) -> str:
    """The part of a message that suggests known names near to an unknown one, if there are any."""
    near = difflib.get_close_matches(got, list(known))
    return f"perhaps {' or '.join(map(repr, near))} is meant; " if near else ""


def _meant(modules: list[Named], selector: Any) -> str:
    if isinstance(selector, str):
        return perhaps(selector, patterns_of(each.name for each in modules))
    if not isinstance(selector, type):
        return ""
    kinds = {type(uncompiled(each.module)) for each in modules}
    near = difflib.get_close_matches(selector.__name__, [kind.__name__ for kind in kinds])
    # Two classes may have one name: one that was loaded twice.
    names = sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__name__ in near)
    return f"perhaps the class {' or '.join(names)} is meant; " if names else ""


def _candidates(modules: list[Named]) -> str:
    """Suggestions: the modules with parts that own most."""
    every = _once(modules)
    recurrent = (torch.nn.RNNBase, torch.nn.RNNCellBase)
    whole = [each for each in every if children_of(each.module) or isinstance(each.module, recurrent)] or every
    if not whole:
        return "the model has no modules below it: spillway.recompute(model, ...) recomputes the whole of it"
    most = sorted(whole, key=lambda each: -_owned([each]))[:_SHOWN]
    names = ", ".join(str(each) for each in whole if each in most)
    return f"there are {names}{' and others' if len(whole) > len(most) else ''}{built_in(each.module for each in most)}"


def built_in(modules: Iterable[Module]) -> str:
    """The part of a message that says how to name torch's own layers as blocks: users have not written their class."""
    names = sorted(kind.__name__ for kind in {type(module) for module in modules} & _BUILT_IN)
    return "".join(f"; blocks=nn.{name} takes each {name}" for name in names)
