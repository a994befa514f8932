"""``-k EXPR``: pytest's grammar on case ids.

``and``, ``or``, ``not`` and parentheses combine words.  A word matches if the id contains it, in
upper or lower case; ids also match by their old words.  A whole case id selects only that case.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from shardproof import old_words
from shardproof.errors import Problem, SelectionError

Predicate = Callable[[str], bool]

_TOKEN = re.compile(r"\s*(?:(?P<paren>[()])|(?P<word>[\w:+\-.\[\]\\/]+))")
MAX_DEPTH = 64


def compile_expression(text: str) -> Predicate:
    """A function that matches case ids against ``text``; empty text matches all.

    :raises SelectionError: text outside of the grammar, with its column.
    """
    if not text.strip():
        return lambda name: True
    return _Parser(text).parse()


class _Parser:
    """``not`` binds tightest, then ``and``, then ``or``; a token is (text, column)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.tokens: list[tuple[str, int]] = []
        at, end = 0, len(text.rstrip())
        while at < end:
            match = _TOKEN.match(text, at)
            if match is None:
                column = at + len(text[at:]) - len(text[at:].lstrip())
                raise self._error(column + 1, f"unexpected {text[column]!r}")
            token = match["paren"] or match["word"]
            self.tokens.append((token, match.end() - len(token) + 1))
            at = match.end()
        self.tokens.append(("", end + 1))

    def parse(self) -> Predicate:
        predicate = self._any()
        token, column = self.tokens[self.position]
        if token:
            raise self._error(column, f"unexpected {token!r}")
        return predicate

    def _error(self, column: int, what: str) -> SelectionError:
        remedy = "combine words with and, or, not and parentheses, e.g. 'gloo and not adamw'"
        return SelectionError(Problem(f"-k: {what} in column {column}", remedy, self.text))

    def _take(self, token: str) -> bool:
        if self.tokens[self.position][0] == token:
            self.position += 1
            return True
        return False

    def _any(self) -> Predicate:
        parts = self._chain("or", self._all)
        return lambda name: any(part(name) for part in parts)

    def _all(self) -> Predicate:
        parts = self._chain("and", self._not)
        return lambda name: all(part(name) for part in parts)

    def _chain(self, word: str, part: Callable[[], Predicate]) -> list[Predicate]:
        parts = [part()]
        while self._take(word):
            parts.append(part())
        return parts

    def _not(self) -> Predicate:
        self.depth += 1
        token, column = self.tokens[self.position]
        if self.depth > MAX_DEPTH:
            raise self._error(column, f"nested deeper than {MAX_DEPTH}")
        try:
            if self._take("not"):
                inner = self._not()
                return lambda name: not inner(name)
            if self._take("("):
                inner = self._any()
                if not self._take(")"):
                    raise self._error(self.tokens[self.position][1], "expected ')'")
                return inner
            if token in ("", ")", "and", "or"):
                raise self._error(column, f"expected a word, not {token or 'the end'!r}")
            self.position += 1
            word = token.lower()
            return lambda name: old_words.matches(name, lambda text: word in text.lower(), token)
        finally:
            self.depth -= 1
