"""``-k EXPR``: pytest's grammar on case ids.

``and``, ``or``, ``not`` and parentheses combine words.  A word matches if the id contains it, in
upper or lower case.  A whole case id selects only that case.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from shardproof.errors import Problem, SelectionError

Predicate = Callable[[str], bool]

_WORD = re.compile(r"[\w:+\-.\[\]\\/]+")
_OPERATORS = ("and", "or", "not")
MAX_DEPTH = 64


def compile_expression(text: str) -> Predicate:
    """A function that matches case ids against ``text``; empty text matches all.

    :raises SelectionError: text outside of the grammar, with its column.
    """
    text = re.sub(r"\s", " ", text.strip())
    if not text:
        return lambda name: True

    def refused(column: int, what: str) -> SelectionError:
        remedy = "combine words with and, or, not and parentheses, e.g. 'gloo and not adamw'"
        return SelectionError(Problem(f"-k: {what} in column {column}", remedy, text))

    def predicate(node: ast.expr, depth: int) -> Predicate:
        at = node.col_offset
        if depth > MAX_DEPTH:
            raise refused(at + 1, f"nested deeper than {MAX_DEPTH}")
        match node:
            case ast.BoolOp(operation, values):
                parts = [predicate(value, depth + 1) for value in values]
                decides = any if isinstance(operation, ast.Or) else all
                return lambda name: decides(part(name) for part in parts)
            case ast.UnaryOp(ast.Not(), operand):
                inner = predicate(operand, depth + 1)
                return lambda name: not inner(name)
            case ast.Name(stand_in):
                word = text[at : at + len(stand_in)].lower()
                return lambda name: word in name.lower()
        raise refused(at + 1, "expected a word or an operator")

    # Python parses what is left when names of as many letters stand in for words.
    python = _WORD.sub(lambda m: m[0] if m[0] in _OPERATORS else "_" * len(m[0]), text)
    if foreign := re.search(r"[^\w\s()]", python):
        raise refused(foreign.start() + 1, f"unexpected {foreign[0]!r}")
    try:
        return predicate(ast.parse(f"{python}\n", mode="eval").body, 1)
    except SyntaxError as error:
        column = min(error.offset or 1, len(text) + 1)
        what = "unexpected end" if column > len(text) else error.msg.partition(".")[0]
        raise refused(column, what) from None
    except (RecursionError, MemoryError):
        raise refused(1, f"nested deeper than {MAX_DEPTH}") from None
