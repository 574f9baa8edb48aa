"""Random programs: a small model and the loop that trains it, as Python's text, from one number.

``Program.random(seed)`` is always the same one. ``describe(seed)`` prints it, as a script that runs by itself.
``smaller`` gives the programs that lack one thing each, for who looks for the least that fails.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuzz import pieces
from fuzz.parts import CARRIED, CHANGES, DRAWS, LAYERS, PLACES, STATE, VALUES, Part

SIZES = [(3, 4), (6, 8), (4, 16), (16, 32)]
LARGE = (512, 64)
"""With a budget: an activation is 128 KiB."""
OPTIMIZERS = ["SGD(model.parameters(), 0.05)", "AdamW(model.parameters(), 0.01)"]


@dataclass(frozen=True)
class Nested:
    """A block within a block.

    Args:
        block: the inner one.
        number: its own.
        form: how it is called.
        options: of the inner region.
    """

    block: Block
    number: int
    form: str
    options: str

    @property
    def name(self) -> str:
        return f"nested: {self.form}"


@dataclass(frozen=True)
class Block:
    """A module: its parts in order, and how it is called and gives back."""

    number: int
    parts: tuple[Part | Nested, ...]
    signature: str


@dataclass(frozen=True)
class Call:
    """One call of a block by the model."""

    block: int
    options: str
    form: str


@dataclass(frozen=True)
class Program:
    """All that was drawn."""

    seed: int
    rows: int
    width: int
    dtype: str
    blocks: tuple[Block, ...]
    calls: tuple[Call, ...]
    tied: bool
    stem: bool
    attach: str
    context: str
    loop: str
    optimizer: str
    input_grad: bool
    steps: int
    calm: int
    """Steps before the first with changes between forward and backward."""
    device: str = "cpu"
    """``"meta"`` and ``"fake"``: tensors have no content."""

    @classmethod
    def random(cls, seed: int) -> Program:
        """The program of a seed."""
        return _Draw(seed).program()

    @property
    def has_budget(self) -> bool:
        """Whether a plan is sought."""
        return "budget=" in self.attach

    @property
    def names(self) -> frozenset[str]:
        """The kinds of all that is in it."""
        parts = [part for block in self.every_block() for part in block.parts]
        forms = [f"call: {call.form}" for call in self.calls] + [f"returns: {block.signature}" for block in self.blocks]
        return frozenset([*(part.name for part in parts), *forms, f"loop: {self.loop}"])

    def every_block(self) -> Iterator[Block]:
        """The blocks, and those within them."""
        for block in self.blocks:
            yield from _with_inner(block)

    def text(self) -> str:
        """The classes, and ``steps(spillway)``, which trains and yields the model and what a step has given."""
        lines = [f"R, D = {self.rows}, {self.width}", ""]
        seen: list[Block] = []
        for block in self.every_block():
            same = next((each for each in seen if replace(each, number=block.number) == block), None)
            lines += [f"Block{block.number} = Block{same.number}", ""] if same else [*_class_of(block), ""]
            seen.append(block)
        lines += [*self._model(), "", *self._loop()]
        return "\n".join(lines) + "\n"

    # The text

    def _model(self) -> Iterator[str]:
        yield "class Model(nn.Module):"
        yield "    def __init__(self):"
        yield "        super().__init__()"
        for block in self.blocks:
            yield f"        self.b{block.number} = Block{block.number}()"
        if self.tied:
            yield "        linears = [each for each in self.modules() if isinstance(each, nn.Linear)]"
            yield "        for tied in [each for each in linears if each.weight.shape == (D, D)][1:2]:"
            yield "            tied.weight = self.b0.l1.weight if hasattr(self.b0, 'l1') else tied.weight"
        yield "        self.scale = nn.Parameter(torch.full((D,), 0.5))"
        yield "        self.head = nn.Linear(D, 3)"
        yield ""
        yield "    def forward(self, x):"
        yield f"        h, aux = x * {'self.scale' if self.stem else '1'}, []"
        for call in self.calls:
            block = self.blocks[call.block]
            for line in _at(block, f"self.b{block.number}", "before_call"):
                yield f"        {line}"
            for line in _call_lines(block, call):
                yield f"        {line}"
        yield "        return self.head(h).square().mean() + sum(aux)"

    def _loop(self) -> Iterator[str]:
        yield "def steps(spillway):"
        if self.dtype != "float32":
            yield f"    torch.set_default_dtype(torch.{self.dtype})"
        yield "    model = Model()"
        yield f"    optimizer = torch.optim.{self.optimizer}"
        if self.attach:
            yield f"    spillway.attach(model, {self.attach})"
        yield "    data = torch.Generator().manual_seed(7)"
        yield f"    for step in range({self.steps}):"
        generator = ", generator=data" if self.device == "cpu" else ""
        yield f"        x = torch.randn(R, D{generator}){'.requires_grad_()' if self.input_grad else ''}"
        yield "        optimizer.zero_grad()"
        yield from _indented(self._lines("before_step"), 8)
        forward, backward = LOOPS[self.loop]
        contexts = [*([self.context] if self.context else []), *sorted(set(self._lines("around")))]
        indent = 8
        if contexts:
            yield f"        with {', '.join(contexts)}:"
            indent = 12
        yield from _indented(forward.splitlines(), indent)
        between = list(self._lines("between"))
        if between:
            yield f"        if step >= {self.calm}:"
            yield from _indented(between, 12)
        yield from _indented(backward.splitlines(), 8)
        yield "        got = {n: p.grad for n, p in (*model.named_parameters(), ('x', x)) if p.grad is not None}"
        yield "        optimizer.step()"
        yield "        yield model, {'loss': loss.detach(), 'gradient': got}"
        yield from _indented(self._lines("after_step"), 8)

    def _lines(self, field: str) -> Iterator[str]:
        for block in self.blocks:
            yield from _at(block, f"model.b{block.number}", field)


LOOPS = {
    "once": ("loss = model(x)", "loss.backward()"),
    "summed": ("loss = model(x) + model(x.flip(0)) * 0.5", "loss.backward()"),
    "squared difference": ("loss = (model(x) - model(x * 0.5)).square()", "loss.backward()"),
    "both alive": ("loss = model(x)\nother = model(x * 0.5)", "other.backward()\nloss.backward()"),
    "accumulated": ("model(x.roll(1, 0)).backward()\nloss = model(x)", "loss.backward()"),
    "retained": ("loss = model(x)", "loss.backward(retain_graph=True)\nloss.backward()"),
    "penalty": (
        "loss = model(x)",
        "g, = torch.autograd.grad(loss, model.scale, create_graph=True, allow_unused=True)\n"
        "(loss if g is None else loss + g.square().sum()).backward()",
    ),
    "autograd.grad": (
        "loss = model(x)",
        "found = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad], allow_unused=True)\n"
        "for p, g in zip([p for p in model.parameters() if p.requires_grad], found):\n    p.grad = g",
    ),
    "dropped": ("model(x * 2)\nloss = model(x)", "loss.backward()"),
    "without grad": ("with torch.no_grad():\n    model(x)\nloss = model(x)", "loss.backward()"),
    "evaluated": (
        "loss = model(x)",
        "loss.backward()\nmodel.eval()\nwith torch.no_grad():\n    loss = loss + model(x)\nmodel.train()",
    ),
    "backward inside": ("loss = model(x)\nloss.backward()", ""),
}

SIGNATURES = {
    # Its parameters, the first lines, what it gives back; its arguments, and how the caller takes that.
    "tensor": ("h", "", "h", "h", "h = {}"),
    "tuple": ("h", "", "h, h.square().mean()", "h", "h, s = {}\naux.append(s)"),
    "dictionary": ("h", "", "{'h': h, 'n': None, 's': h.detach()}", "h", "h = {}['h']"),
    "named tuple": ("h", "", "Out(h, [h.mean(), None, 3])", "h", "h, (s, _, _) = {}\naux.append(s)"),
    "keyword": ("h, *, scale, flip=False", "h = h * scale", "h", "h, scale=self.scale, flip=True", "h = {}"),
    "index": ("h, index", "h = h[index]", "h", "h, torch.randperm(R)", "h = {}"),
    "mask": ("h, mask=None", "h = h * mask", "h", "h, mask=torch.rand(R, D) > 0.3", "h = {}"),
    "list": ("hs", "h = hs[0] + hs[1]['x']", "h", "[h, {'x': x}]", "h = {}"),
    "number": ("h, n", "h = h * n", "h", "h, random.choice((1, 2, 3))", "h = {}"),
    "transposed": ("h", "", "h.T", "h", "h = {}.T"),
    "view": ("h", "", "h[:, :]", "h", "h = {}"),
    "detached": ("h", "", "(h, h.detach())", "h", "h, s = {}\nh = h + s"),
    "wrapper without storage": ("h", "", "(h, Hollow(h.detach()))", "h", "h, s = {}\nh = h + s.content"),
}

CALLS = {
    # The function, from the path of the block.
    "module": "{}",
    "closure": "lambda *a, **k: {}(*a, **k)",
    "gated closure": "(lambda gate: lambda *a, **k: {}(*a, **k))(h)",
}


def _call_lines(block: Block, call: Call) -> list[str]:
    _, _, _, arguments, taken = SIGNATURES[block.signature]
    path = f"self.b{block.number}"
    if call.form == "plain":
        made = f"{path}({arguments})"
    elif call.form == "closure":
        made = f"spillway.recompute(lambda *a, **k: {path}(*a, **k), {arguments}{call.options})"
    elif call.form == "torch's checkpoint":
        made = f"checkpoint({path}, {arguments}, use_reentrant=False)"
    else:
        made = f"spillway.recompute({path}, {arguments}{call.options})"
    lines = taken.replace("{}", made, 1).splitlines()
    if call.form == "gated closure":
        gated = "gate * v" if call.block % 2 else "v * gate"
        return [
            "gate = torch.sigmoid(h.mean(0))",
            f"h = spillway.recompute(lambda v: {gated} + self.head.bias.sum(), h{call.options})",
            *lines,
        ]
    return lines


def _class_of(block: Block) -> Iterator[str]:
    parameters, first, given, _, _ = SIGNATURES[block.signature]
    yield f"class Block{block.number}(nn.Module):"
    yield "    def __init__(self):"
    yield "        super().__init__()"
    for part in block.parts:
        made = f"self.n{part.number} = Block{part.block.number}()" if isinstance(part, Nested) else part.init
        yield from _indented(made.splitlines(), 8)
    yield ""
    yield f"    def forward(self, {parameters}):"
    yield from _indented(first.splitlines(), 8)
    for part in block.parts:
        yield from _indented(_forward_of(part), 8)
    yield f"        return {given}"


NESTED = {
    "recomputed": "h = spillway.recompute(self.n$, h{options})",
    "twice": "h = spillway.recompute(self.n$, h{options})\nh = spillway.recompute(self.n$, h{options})",
    "plain": "h = self.n$(h)",
    "torch's": "h = checkpoint(self.n$, h, use_reentrant=False)",
    "its gradient": (
        "with torch.enable_grad():\n"
        "    q = h if h.requires_grad else h.detach().requires_grad_()\n"
        "    e = spillway.recompute(self.n$, q{options}).square().sum()\n"
        "    h = h - torch.autograd.grad(e, q, create_graph=True)[0]"
    ),
    "its gradient alone": (
        "with torch.enable_grad():\n"
        "    q = h.detach().requires_grad_()\n"
        "    g, = torch.autograd.grad(spillway.recompute(self.n$, q{options}).square().sum(), q)\n"
        "h = h - g"
    ),
}


def _forward_of(part: Part | Nested) -> list[str]:
    if isinstance(part, Nested):
        return NESTED[part.form].replace("$", str(part.number)).replace("{options}", part.options).splitlines()
    return part.forward.splitlines()


def _at(block: Block, path: str, field: str) -> Iterator[str]:
    """Lines that parts want outside of the block, which is at a path."""
    for part in block.parts:
        if isinstance(part, Nested):
            yield from _at(part.block, f"{path}.n{part.number}", field)
        else:
            yield from getattr(part, field).replace("@", path).splitlines()


def _with_inner(block: Block) -> Iterator[Block]:
    for part in block.parts:
        if isinstance(part, Nested):
            yield from _with_inner(part.block)
    yield block


def _without(block: Block, names: Collection[str]) -> Block:
    """The block, and those within it, without parts of some names."""
    parts = [
        replace(part, block=_without(part.block, names)) if isinstance(part, Nested) else part
        for part in block.parts
        if part.name not in names
    ]
    return replace(block, parts=tuple(parts))


def _indented(lines: Iterator[str] | Sequence[str], by: int) -> Iterator[str]:
    for line in lines:
        yield " " * by + line


# Drawing

SELECTORS = [
    "'matmul'",
    "'pointwise'",
    "'norm'",
    "'random'",
    "is_even",
    "'inputs'",
    "'softmax'",
    "'convolution'",
    "'aten::*'",
]
SAVED_BY = ["spillway.saved_by('matmul')", "spillway.saved_by('pointwise')", "spillway.saved_by('norm')"]
_KEEPS_STATE = frozenset(part.name for part in (*STATE, *PLACES, *CARRIED, *CHANGES)) | {"spectral norm", "generator"}
LEFT_OUT: dict[str, Collection[str]] = {
    # Of rrelu, which packs its noise before it is drawn, torch's own checkpoint gives other values each time. Of what
    # is scripted, it finds that something else is saved when that runs for the second time.
    "checkpoint(": {"rrelu", "scripted"},
    # Torch's own checkpoint around a block advances state once more, and computes with what was changed since.
    # Around a region it stops before that region runs again, so that batch norm counts once, as it should.
    "checkpoint(self.b": _KEEPS_STATE | {"batch norm"},
    "checkpoint(self.n": _KEEPS_STATE | {"batch norm"},
    # Recurrent layers take an operator a row: too slow at the size of these.
    # A plan's blocks are compared in samples: hidden state that changes in between is outside of the promise.
    "budget=": {"rnn", "lstm", "hidden number, flipped", "hidden number, replaced", "hidden flag, flipped"},
}
"""Parts that are left out of programs in whose text something is."""
OFFLOADS = ["", "ratio=0.5, ", "window=0, ", "window=1024, ", "policy=spillway.policies.Keep(), "]


class _Draw:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random.Random(seed)
        self._numbers = 0

    def program(self) -> Program:
        rows, width = self.random.choice(SIZES)
        style = self.random.choices(
            ["recompute", "attach", "offload", "offload and recompute", "attach to offload", "mixed", "budget"],
            [400, 250, 60, 140, 50, 100, 4],
        )[0]
        if style == "budget":
            rows, width = LARGE
        special = self._special()
        # By default, later calls are compared in samples alone.
        self._verifies = any(part.name.startswith("hidden") for part in special)
        blocks = [self._block(number, []) for number in range(self.random.choice([1, 1, 2, 3]))]
        for part in special:
            where = self.random.randrange(len(blocks))
            often = 0.7 if part.name.startswith("hidden") else 0.4
            blocks[where] = self._with(blocks[where], part, last=self.random.random() < often)
        if self.random.random() < 0.3:
            where = self.random.randrange(len(blocks))
            inner = replace(self._block(len(blocks) + 5, []), signature="tensor")
            if special and self.random.random() < 0.5:
                more = self._part(self.random.choice([STATE, PLACES, CARRIED, CHANGES]))
                self._verifies |= more.name.startswith("hidden")
                inner = self._with(inner, more)
            nested = Nested(inner, self._number(), self.random.choice(list(NESTED)), self._options())
            blocks[where] = self._with(blocks[where], nested)
        order = [number for number in range(len(blocks)) for _ in range(self.random.choice([1, 1, 1, 2, 3]))]
        if self.random.random() < 0.3:
            self.random.shuffle(order)
        if style == "budget":
            blocks = [replace(blocks[0], number=number) for number in range(self.random.choice([3, 4]))]
            order = list(range(len(blocks)))
        hidden = any(part.name.startswith("hidden") for part in special)
        attach, context = "", ""
        forms = ["module"] * 4 + ["closure", "gated closure"]
        if "attach" in style or style == "budget":
            attach, forms = self._attach(style, len(blocks)), ["plain"]
        elif style == "offload":
            forms = ["plain", "plain", "torch's checkpoint"]
        elif style == "mixed":
            forms = ["plain", "module", "torch's checkpoint", "gated closure"]
        if ("offload" in style and "attach" not in style) or (
            style in ("mixed", "attach") and self.random.random() < 0.3
        ):
            context = f"spillway.offload({self.random.choice(OFFLOADS)}min_bytes=0)"
        shared = self._options() if self.random.random() < 0.7 else None
        if hidden and self.random.random() < 0.4:
            shared = ", verify='always'"
        calls = [
            Call(number, self._options() if shared is None else shared, self.random.choice(forms)) for number in order
        ]
        if context:
            calls = [self._dropping(call) for call in calls]
            if "Recompute(" in attach and "use_reentrant" not in attach and self.random.random() < 0.3:
                attach = attach.replace("Recompute(", "Recompute(drop_output=True, ").replace(", )", ")")
        if self._verifies and "verify" not in attach:
            attach = attach.replace("Recompute(", "Recompute(verify='always', ").replace(", )", ")")
        loop = self.random.choices(list(LOOPS), [12] + [2] * (len(LOOPS) - 1))[0]
        device = self.random.choices(["cpu", "meta", "fake"], [97, 2, 1])[0]
        program = Program(
            self.seed,
            rows,
            width,
            self.random.choices(["float32", "float64"], [6, 1])[0],
            tuple(blocks),
            tuple(calls),
            self.random.random() < 0.15,
            self.random.random() < 0.7,
            attach,
            context,
            loop,
            self.random.choice(OPTIMIZERS[: 2 if device == "cpu" else 1]),
            self.random.random() < 0.3,
            8 if style == "budget" else self.random.choice([5, 6] if hidden else [3, 4, 5]),
            self.random.choice([0, 1, 1, 2, 3, 3]),
            device,
        )
        text = program.text() + program.attach
        left_out = {name for where, names in LEFT_OUT.items() if where in text for name in names}
        return replace(program, blocks=tuple(_without(each, left_out) for each in program.blocks))

    def _special(self) -> list[Part]:
        """Parts that make a program more than a function: none in half of them, seldom several."""
        count = self.random.choices([0, 1, 2, 3], [35, 45, 14, 6])[0]
        return [
            self._part(self.random.choices([STATE, PLACES, CARRIED, CHANGES], [3, 3, 3, 4])[0]) for _ in range(count)
        ]

    def _block(self, number: int, special: Sequence[Part]) -> Block:
        parts = [self._part(LAYERS)]
        for _ in range(self.random.choice([0, 1, 2, 2, 3, 4, 5])):
            parts.append(self._part(self.random.choices([VALUES, LAYERS, DRAWS], [12, 4, 2])[0]))
        signature = self.random.choices(list(SIGNATURES), [14] + [1] * (len(SIGNATURES) - 1))[0]
        return Block(number, tuple(parts), signature)

    def _with(self, block: Block, part: Part | Nested, *, last: bool = False) -> Block:
        where = len(block.parts) if last else self.random.randint(0, len(block.parts))
        return replace(block, parts=(*block.parts[:where], part, *block.parts[where:]))

    def _part(self, parts: Sequence[Part]) -> Part:
        part = self.random.choices(parts, [each.weight for each in parts])[0]
        number = str(self._number())
        fields = ("forward", "init", "before_step", "before_call", "between", "after_step", "around")
        texts: dict[str, Any] = {each: self._drawn(getattr(part, each)).replace("$", number) for each in fields}
        return replace(part, **texts)

    def _drawn(self, text: str) -> str:
        """One of the words of each pair of braces that has a bar in it."""
        return re.sub(r"\{([^{}]*\|[^{}]*)\}", lambda found: self.random.choice(found[1].split("|")), text)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _options(self) -> str:
        """Of a region, as they stand behind its arguments."""
        options = []
        reentrant = self.random.random() < 0.12
        kind = self.random.choices(["none", "save", "offload", "both", "policy"], [45, 25, 15, 10, 5])[0]
        selectors = SELECTORS + SAVED_BY
        if reentrant:
            # It takes no others.
            kind = self.random.choice(["none", "inputs"])
        if kind == "inputs":
            options.append("offload='inputs'")
        if kind in ("save", "both"):
            options.append(f"save=[{', '.join(self.random.sample(selectors, self.random.choice([1, 1, 2])))}]")
        if kind in ("offload", "both"):
            options.append(f"offload=[{', '.join(self.random.sample(selectors, self.random.choice([1, 1, 2])))}]")
        if kind == "policy":
            options.append("policy=every_other()")
        if reentrant:
            options.append("use_reentrant=True")
        else:
            if self.random.random() < 0.07:
                options.append("determinism_check='none'")
        if self.random.random() < 0.1:
            options.append("early_stop=False")
        if self._verifies:
            options.append("verify='always'")
        return "".join(f", {option}" for option in options)

    def _dropping(self, call: Call) -> Call:
        """Also its output is dropped, now and then."""
        may = call.form in ("module", "closure", "gated closure") and "use_reentrant" not in call.options
        return (
            replace(call, options=f"{call.options}, drop_output=True") if may and self.random.random() < 0.3 else call
        )

    def _attach(self, style: str, blocks: int) -> str:
        classes = ", ".join(f"Block{number}" for number in range(blocks))
        options = [f"min_bytes={self.random.choice(['0', '64', None])}"]
        if style == "budget":
            return f"blocks=({classes},), budget='{self.random.choice(['60%', '80%'])}', min_bytes='16KiB'"
        if style == "attach":
            options.insert(0, f"blocks=({classes},)")
            options.append(f"policy=spillway.Recompute({self._options()[2:]})")
            if self.random.random() < 0.15:
                options.append(self.random.choice(["every=2", "keep_last=1"]))
        else:
            options.append(f"policy=spillway.policies.{self.random.choice(['Offload()', 'Ratio(0.5)', 'Keep()'])}")
        return ", ".join(options)


# Reading and shrinking

_HEAD = """import collections
import functools
import io
import itertools
import random
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import spillway
from fuzz.pieces import {pieces}
"""
_TAIL = """
for seed in (torch.manual_seed, random.seed, np.random.seed):
    seed({seed})
for model, results in steps(spillway):
    print(results)
"""


def describe(program: Program | int) -> str:
    """The program, or that of a seed, as a script that trains it with Spillway and prints losses and gradients."""
    program = Program.random(program) if isinstance(program, int) else program
    text = program.text()
    used = [name for name in vars(pieces) if not name.startswith("_") and re.search(rf"\b{name}\b", text)]
    used = [name for name in used if name not in ("torch", "nn", "Tensor")]
    return f"{_HEAD.format(pieces=', '.join(used) or 'Out')}\n{text}{_TAIL.format(seed=program.seed)}"


def smaller(program: Program) -> Iterator[Program]:
    """Programs that lack one thing each."""
    for steps in range(1, program.steps):
        yield replace(program, steps=steps)
    for place in range(len(program.calls)):
        if len(program.calls) > 1:
            yield replace(program, calls=program.calls[:place] + program.calls[place + 1 :])
    for place, block in enumerate(program.blocks):
        for less in _smaller_block(block):
            yield replace(program, blocks=(*program.blocks[:place], less, *program.blocks[place + 1 :]))
    if len(program.blocks) > 1 and all(call.block < len(program.blocks) - 1 for call in program.calls):
        yield replace(
            program,
            blocks=program.blocks[:-1],
            attach=program.attach.replace(f"Block{len(program.blocks) - 1}, ", "").replace(
                f", Block{len(program.blocks) - 1}", ""
            ),
        )
    for place, call in enumerate(program.calls):
        for form in ("plain", "module"):
            if call.form not in ("plain", form):
                yield replace(
                    program, calls=(*program.calls[:place], replace(call, form=form), *program.calls[place + 1 :])
                )
        if call.options:
            for options in _fewer(call.options):
                yield replace(
                    program, calls=(*program.calls[:place], replace(call, options=options), *program.calls[place + 1 :])
                )
    if program.loop != "once":
        yield replace(program, loop="once")
    if program.context:
        yield replace(program, context="")
    changes: tuple[dict[str, Any], ...] = (
        {"tied": False},
        {"calm": 0},
        {"stem": False},
        {"dtype": "float32"},
        {"input_grad": False},
        {"optimizer": "SGD(model.parameters(), 0.05)"},
        {"rows": 3, "width": 4},
    )
    for change in changes:
        changed = replace(program, **change)
        if changed != program:
            yield changed


def _fewer(options: str) -> Iterator[str]:
    each = re.findall(r", (\w+=(?:\[[^\]]*\]|[^,\[]+))", options)
    for place in range(len(each)):
        yield "".join(f", {option}" for option in each[:place] + each[place + 1 :])


def _smaller_block(block: Block) -> Iterator[Block]:
    for place, part in enumerate(block.parts):
        yield replace(block, parts=block.parts[:place] + block.parts[place + 1 :])
        if isinstance(part, Nested):
            for less in _smaller_block(part.block):
                yield replace(block, parts=(*block.parts[:place], replace(part, block=less), *block.parts[place + 1 :]))
            for options in _fewer(part.options):
                yield replace(
                    block, parts=(*block.parts[:place], replace(part, options=options), *block.parts[place + 1 :])
                )
            if part.form not in ("plain", "recomputed"):
                yield replace(
                    block, parts=(*block.parts[:place], replace(part, form="recomputed"), *block.parts[place + 1 :])
                )
    if block.signature != "tensor":
        yield replace(block, signature="tensor")
