"""Words that texts for readers avoid, and the places that hold these texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: What is refused -> what to write in its place.
DIALECT = {
    r"(?:^|(?<=[.:;?!] ))(?:Who|Whoever|Whose|Whom)\b(?! is | are |ever )": "a concrete noun",
    r"(?:^|(?<=[.;?!] ))What\b(?![^.?!]*\?)": "a concrete noun: a clause is no subject",
    r"(?:^|(?<=[.:;?!] ))(?:[Ii]s|[Aa]re) (?:judged|told|seen|left)\b": "a sentence with a subject",
    r"(?:^|(?<=[.;?!] ))(?:Judged|Told|Seen|Left) (?:is|are|as|by)\b": "a sentence with a subject",
    r"\bwho (?:loads?|saves?|saved|loaded|made|waits|fails)\b": "the restoring run, the rank that",
    r"\bbeside\b": "compared with, next to, together with",
    r"\b(?:go|goes|going|went) on\b": "resume, continue",
    r"\banew\b": "again, from the start",
    r"\bby name\b": "a name, or how it is named",
    r"\b(?:told|tells of|tell of)\b": "reported, stated, known",
    r"\bnobody\b": "no rank, no process, nothing",
    r"\bwhoever\b": "a rank, a reader: the noun",
    r"\bof one's own\b": "your own",
    r"\bfor good\b": "permanently, without end",
    r"\bgives? way\b": "yields, ends",
    r"\bhangs on\b": "depends on",
}
REFUSED = {
    re.compile(pattern, re.M | re.I if pattern.startswith(r"\b") else re.M): say
    for pattern, say in DIALECT.items()
}


def found(text: str) -> list[str]:
    """The refused words of ``text``, each with what stands around it."""
    return [
        " ".join(text[max(0, hit.start() - 30) : hit.end() + 30].split())
        for pattern in REFUSED
        for hit in pattern.finditer(text)
    ]


def prose(markdown: str) -> str:
    """Text of a page without code, output and names in backticks; a paragraph is one line."""
    text = re.sub(r"(?ms)^ *(```|~~~).*?^ *\1", "", markdown)
    text = re.sub(r"(?m)^(?: {4,}|\t)(?![-*\d]).*$", "", text)
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"\]\([^)]*\)|<[^>]*>", "", text)
    text = re.sub(r"(?m)^[>#*|\-\s]+", "\n", text)
    text = re.sub(r" \| ", "\n", text)
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def literals(node: ast.AST) -> str:
    """The text of a string or f-string, each value as X."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(
            literals(part) if isinstance(part, ast.Constant) else "X" for part in node.values
        )
    return ""


#: Calls whose texts a user reads.
_SAYING = re.compile(r"Problem|\w+Error|Refused|Outcome|echo|print_line")


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every message in ``source``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = (
                node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            )
            if _SAYING.fullmatch(called):
                for given in [*node.args, *(k.value for k in node.keywords)]:
                    for part in ast.walk(given):
                        if text := literals(part):
                            yield part.lineno, text
        elif isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id in ("remedy", "what", "message", "why", "reason")
            for t in node.targets
        ):
            if text := literals(node.value):
                yield node.lineno, text


def first_lines(source: str) -> Iterator[tuple[int, str]]:
    """Line and first paragraph of the docstrings in ``source``."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (said := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), " ".join(said.split("\n\n")[0].split())
