"""A statement that waits, taken out of a function: what then fails shows that it was needed."""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Container


class Without(ast.NodeTransformer):
    """Takes the n-th statement that waits out of a function.

    Args:
        number: which; with -1 all stay, and are found.
        waits: names of the methods that wait.
        but: statements that are none, as they are written.
    """

    def __init__(self, number: int, waits: Container[str], but: Container[str]) -> None:
        self.number = number
        self.found: list[str] = []
        self._waits = waits
        self._but = but

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in self._waits
            and ast.unparse(node) not in self._but
        ):
            self.found.append(ast.unparse(node))
            if len(self.found) - 1 == self.number:
                return ast.Pass()
        return node


def parsed(function: types.FunctionType) -> ast.Module:
    """Its source, as a module."""
    return ast.parse(textwrap.dedent(inspect.getsource(function)))
