"""The turns of vertical order: which piece of a micro-batch's backward runs when.

NOTE [ Beginning of a block ]

Blocks are found in the autograd graph, so neither their calls nor their forwards are hooked. Autograd's nodes are
numbered as forward makes them, and the engine runs those with the highest number first. A block is between the oldest
and the newest node that reads a parameter of its own: one that no other block and no module outside of blocks has. The
graph is cut below the oldest one. So the end of a block, a dropout or the sum with its residual, is in its turn. Loss
and head are in the turn of the last block, so only one micro-batch has gradients of its logits at a time. Frozen blocks
have no such node. They run in the turn of the block before them.
"""

from __future__ import annotations

import bisect
import graphlib
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from spillway._torch import ACCUMULATE_GRAD, node_number
from spillway.checkpointing.blocks import Blocks, find_blocks, inside_of
from spillway.errors import UsageError


def own_parameters(model: Module, blocks: Blocks | None) -> dict[str, set[int]]:
    """The parameters that only one block has, by ``id``, for each block."""
    names = [block.name for block in find_blocks(model, blocks)]
    owners: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        # The innermost of blocks within blocks.
        owner = max((each for each in names if inside_of(name, (each,))), key=len, default="")
        owners.setdefault(id(parameter), set()).add(owner)
    own: dict[str, set[int]] = {name: set() for name in names}
    for parameter_id, several in owners.items():
        name = several.pop()
        if not several and name:
            own[name].add(parameter_id)
    return own


class Span(NamedTuple):
    """Numbers of the oldest and the newest node that reads something."""

    oldest: float
    newest: float


class Graph:
    """The autograd graph of one micro-batch.

    Args:
        loss: its loss.
        begin: the number of the newest node of the micro-batch before it. It may share older nodes: casts of autocast.
    """

    def __init__(self, loss: Tensor, begin: float = -1) -> None:
        readers: dict[int, list[int]] = {}
        leaves: dict[int, Tensor] = {}
        met: set[Any] = {loss.grad_fn} - {None}
        left = [*met]
        while left:
            node = left.pop()
            number = node_number(node)
            for following, _ in node.next_functions:
                if following is None:
                    continue
                if following.name() == ACCUMULATE_GRAD:
                    leaf = following.variable
                    leaves[id(leaf)] = leaf
                    readers.setdefault(id(leaf), []).append(number)
                elif following not in met:
                    met.add(following)
                    left.append(following)
        self.begin = begin
        """See above."""
        self.leaves = list(leaves.values())
        """Tensors that get a gradient."""
        self.spans = {leaf: Span(min(numbers), max(numbers)) for leaf, numbers in readers.items()}
        """Their readers, by ``id``."""
        own = {leaf: [each for each in numbers if each > begin] for leaf, numbers in readers.items()}
        self.own_spans = {leaf: Span(min(numbers), max(numbers)) for leaf, numbers in own.items() if numbers}
        """The same without shared nodes."""
        self._nodes = sorted(met, key=node_number)
        self._numbers = [node_number(node) for node in self._nodes]

    @property
    def end(self) -> float:
        """The number of its newest node."""
        return self._numbers[-1] if self._numbers else -1

    def newest_below(self, number: float) -> Any:
        """The newest node below a number; ``None`` if there is no such node."""
        place = bisect.bisect_left(self._numbers, number)
        return self._nodes[place - 1] if place else None


class Turns:
    """The order of blocks, and the turn of each piece of each micro-batch's backward.

    Turn 0 is of the last block, and the last turn is of everything before the first block.
    """

    def __init__(self, blocks: dict[str, set[int]], graphs: Sequence[Graph]) -> None:
        self._spans = {id(graph): _spans_of(blocks, graph) for graph in graphs}
        sorter: graphlib.TopologicalSorter[str] = graphlib.TopologicalSorter()
        for spans in self._spans.values():
            names = list(spans)
            for name in names:
                sorter.add(name)
            for before, after in pairwise(names):
                sorter.add(after, before)
        try:
            order = list(sorter.static_order())
        except graphlib.CycleError as error:
            raise UsageError(
                "order='vertical': the micro-batches of an accumulation step call the blocks in different orders, so "
                "no block can be the last of all; use order='horizontal'"
            ) from error
        if not order:
            raise UsageError(
                f"order='vertical': the graph of no micro-batch has a parameter of a block ({', '.join(blocks)}), so "
                f"backward cannot be cut between blocks. They may be frozen, or checkpointed with use_reentrant=True; "
                f"use use_reentrant=False, other blocks=, or order='horizontal'"
            )
        self.count = len(order) + 1
        self._turn = {name: len(order) - 1 - place for place, name in enumerate(order)}
        self._check(graphs)

    def pieces(self, graph: Graph) -> list[tuple[float, int]]:
        """The pieces of a backward, in the order in which they run: nodes below a number, and their turn."""
        spans = self._spans[id(graph)]
        pieces, above, turn_above = [(math.inf, 0)], math.inf, -1
        for name, span in reversed(spans.items()):
            turn = self._turn[name]
            if turn > 0:
                # Between two blocks may be others, which this micro-batch has not called.
                pieces.append((above if turn == turn_above + 1 else span.newest + 1, turn))
            above, turn_above = span.oldest, turn
        # Without blocks of its own, only shared nodes are left for the end.
        pieces.append((above if spans else graph.begin + 1, self.count - 1))
        return pieces

    def pauses(self, graph: Graph) -> list[tuple[Any, int]]:
        """Nodes before which a backward pauses, and the turn that it pauses for."""
        nodes: dict[Any, int] = {}
        for number, turn in self.pieces(graph)[1:]:
            node = graph.newest_below(number)
            if node is not None:
                nodes[node] = turn
        return list(nodes.items())

    def _check(self, graphs: Sequence[Graph]) -> None:
        """See NOTE [ Vertical order ]."""
        latest: dict[int, int] = {}
        for graph in graphs:
            numbers, turns = zip(*reversed(self.pieces(graph)), strict=True)
            for leaf, span in graph.spans.items():
                turn = turns[bisect.bisect_right(numbers, span.oldest)]
                if turn < latest.get(leaf, 0):
                    shape = next(tuple(each.shape) for each in graph.leaves if id(each) == leaf)
                    raise UsageError(
                        f"order='vertical': a parameter of shape {shape} is first used in a later block by a later "
                        f"micro-batch than by an earlier one, so its gradients would be added in another order; use "
                        f"order='horizontal'"
                    )
                latest[leaf] = turn


def _spans_of(blocks: dict[str, set[int]], graph: Graph) -> dict[str, Span]:
    """The blocks in a graph, in the order of their calls."""
    spans: dict[str, Span] = {}
    for name, own in blocks.items():
        found = [span for leaf, span in graph.own_spans.items() if leaf in own]
        if found:
            spans[name] = Span(min(each.oldest for each in found), max(each.newest for each in found))
    ordered = dict(sorted(spans.items(), key=lambda item: item[1].oldest))
    for (before, first), (after, second) in pairwise(ordered.items()):
        if first.newest >= second.oldest:
            raise UsageError(
                f"order='vertical': the blocks {before!r} and {after!r} do not run one after the other: a block is "
                f"called several times in a micro-batch, is inside of another one, or both are in one compiled "
                f"function. Give other blocks=, or use order='horizontal'"
            )
    return ordered
