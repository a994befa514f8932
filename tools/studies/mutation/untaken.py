"""The reasons why no case needs to execute a line of ``impls/reference``, from ``untaken.yaml``.

A branch that ends in an error is a *guard*: tests and cases that must be refused cover it.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import yaml
from pydantic import BaseModel, TypeAdapter

from tools.studies.mutation.operators import ROOT

RULES = Path(__file__).with_name("untaken.yaml")
GUARD = "ends in an error: a guard, asked by tests and by cases that must be refused"
#: Their bodies are no branches.
_WHOLE = (ast.Module, ast.ClassDef, ast.FunctionDef)
#: What ends a branch, so that the lines after it are the other one.
_LEAVES = (ast.Return, ast.Continue, ast.Break)


class Rule(BaseModel, extra="forbid"):
    """Globs on files and on the line that branches, and the reason."""

    file: list[str]
    at: list[str]
    reason: str


@functools.cache
def rules() -> Sequence[Rule]:
    """The rules of ``untaken.yaml``.

    :raises ValueError: a rule there has other keys.
    """
    return TypeAdapter(list[Rule]).validate_python(yaml.safe_load(RULES.read_text("utf-8")))


def why(file: str, line: str) -> str:
    """Why no case needs to take a branch at ``line`` of ``file``; empty if no rule applies."""
    for rule in rules():
        named = any(fnmatchcase(file, glob) for glob in rule.file)
        if named and any(fnmatchcase(line.strip(), glob) for glob in rule.at):
            return rule.reason
    return ""


@functools.cache
def reasons(file: str) -> Mapping[int, str]:
    """Line of ``file`` -> why no case needs to reach it, from a branch before or around it.

    Empty: none does, so that a case is lacking.
    """
    source = (ROOT / file).read_text(encoding="utf-8")
    lines, reasons = source.splitlines(), dict[int, str]()

    def visit(node: ast.AST, reason: str) -> None:
        line = getattr(node, "lineno", None)
        if line is not None:
            reason = reason or why(file, lines[line - 1])
            reasons[line] = reasons.get(line) or reason
        for _, value in ast.iter_fields(node):
            within = reason
            if isinstance(value, list) and value and isinstance(value[-1], ast.Raise):
                within = reason or ("" if isinstance(node, _WHOLE) else GUARD)
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, within)
                if isinstance(child, ast.If) and isinstance(child.body[-1], _LEAVES):
                    within = within or why(file, lines[child.lineno - 1])

    visit(ast.parse(source), "")
    return reasons
