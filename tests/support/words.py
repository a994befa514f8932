"""The dialect that texts for readers avoid, and where these texts stand in files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_START = r"(?:^|(?<=[.:;?!] ))"
#: What is refused -> what to write in its place.
DIALECT = {
    _START + r"(?:Who|Whoever|Whose|Whom)\b(?![^.?!]*\?)": "a noun: a clause is no subject",
    r"(?:^|(?<=[.;?!] ))What\b(?![^.?!]*\?)": "a noun: a clause is no subject",
    _START + r"(?:[Ii]s|[Aa]re) (?:judged|told|seen|left)\b": "a sentence with a subject",
    _START + r"(?:Judged|Told|Seen|Left) (?:is|are|as|by)\b": "a sentence with a subject",
    r"\b[Ww]ho (?:loads?|saves?|saved|loaded|made|waits|fails)\b": "the restoring run",
    r"\b[Bb]eside\b": "compared with, next to, in addition to",
    r"\b(?:go|goes|going|went) on\b": "resume, continue",
    r"\banew\b": "again, from the start",
    r"\bby name\b": "with its name",
    r"\b(?:told|tells of|tell of)\b": "reported, stated, given",
    r"\b[Nn]obody\b": "no rank, no process",
    r"\bwhoever\b": "a rank that, a reader who",
    r"\bof one's own\b": "your own",
    r"\bfor good\b": "permanently",
    r"\bgives? way\b": "yields, ends",
    r"\bhangs? on\b": "depends on",
    r"\b(?:[Aa]sked|[Ee]xpected|[Ww]anted) (?:is|are|was|were)\b": "expected X, without a verb",
    r"\band yet\b": "but",
    r"\bgo(?:es)? no further\b": "cannot continue, stops",
    r"\bha(?:s|ve) to have\b": "must have",
    r"\bin vain\b": "unnecessarily, without effect",
    r"\bturned round\b": "flipped, reversed",
    r"^(?:For|As) (?:what|who)\b": "a noun: a clause is no subject",
}
#: Phrases that are right as they are -> why.
EXCEPTIONS = {
    "elements by name": "a mapping: the key is the name",
    "to one rank by name": "a mapping: the key is the name",
    "buckets cut anew": "the name of an event in records",
    "a call that nobody waited for": "the name of an event in records",
    "beside              skipped": "a word that `shardproof reproduce` prints",
}
_REFUSED = re.compile("|".join(DIALECT), re.MULTILINE)
_WORD = re.compile(r"[A-Za-z]{2,}")
_EXCEPTED = re.compile("|".join(map(re.escape, EXCEPTIONS)))


def found(text: str) -> list[str]:
    """The refused words of ``text``, each with the words around it."""
    text = _EXCEPTED.sub("X", text)
    return [
        " ".join(text[max(0, hit.start() - 30) : hit.end() + 30].split())
        for hit in _REFUSED.finditer(text)
    ]


def prose(markdown: str) -> str:
    """Text of a page without code, output and names in backticks; a paragraph is one line.

    Headings and bold words at the start of a paragraph may be questions: "What is compared".
    """
    text = re.sub(r"(?ms)^ *(```|~~~).*?^ *\1", "", markdown)
    text = re.sub(r"(?m)^(?: {4,}|\t)(?![-*\d]).*$", "", text)
    text = re.sub(r"(?m)^#+ .*$", "", text)
    text = re.sub(r"(?m)^([*-] )?\*\*[^*]+\*\*", r"\n\n\1", text)
    text = re.sub(r"`[^`]*`", "X", text)
    text = re.sub(r"\]\([^)]*\)|<[^>]*>", "", text)
    text = re.sub(r"(?m)^[>#*|\-\s]+", "\n", text)
    text = re.sub(r" \| ", "\n", text)
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def literal(node: ast.AST) -> str:
    """The text of a string or f-string, each value as ``X``; of any other expression ``""``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(literal(part) or "X" for part in node.values)
    return ""


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string of three words or more in ``source`` but its docstrings."""
    nodes = [*ast.walk(ast.parse(source))]
    inner = [n.values for n in nodes if isinstance(n, ast.JoinedStr)]
    docs = [[n.value] for n in nodes if isinstance(n, ast.Expr)]
    skipped = {id(part) for parts in (*inner, *docs) for part in parts}
    for node in nodes:
        if id(node) not in skipped and len(_WORD.findall(text := literal(node))) > 2:
            yield getattr(node, "lineno", 1), text


def first_lines(source: str) -> Iterator[tuple[int, str]]:
    """Line and first sentence of each docstring in ``source``."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, kinds) and (said := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), " ".join(said.split("\n\n")[0].split())
