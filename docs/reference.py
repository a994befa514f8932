"""Parts of reference pages that are written by the build of the site, from the code itself.

A page holds ``<!-- generated: NAME -->`` where the Markdown of :data:`PARTS` belongs: the command
line from its parser, keys of scenario files from their schema, checks from their docstrings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import typer

from shardproof import checks, verdicts, wings
from shardproof.commands import main
from shardproof.explain.command import meanings
from shardproof.scenarios.schema import Scenario, json_schema

MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
#: Keys of JSON Schema that hold several schemas, any of which fits.
_EITHER = ("anyOf", "oneOf")
#: What typer says of arguments that are any text.
_TEXT = re.compile(r" <(list\[)?str\]?>")


def table(headings: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """Lines of a table in Markdown."""
    yield f"| {' | '.join(headings)} |"
    yield "|---" * len(headings) + "|"
    for row in rows:
        cells = (" ".join(cell.split()).replace("|", "\\|") for cell in row)
        yield f"| {' | '.join(cells)} |"
    yield ""


def without_roles(text: str) -> str:
    """``text`` of a docstring, whose roles of Sphinx become code."""
    return re.sub(r":\w+:`~?(?:shardproof\.)?([^`]+)`", r"`\1`", text)


# ------------------------------------------------------------------------------------ commands


def commands() -> str:
    """Every command: what it does, examples, arguments and options."""
    lines: list[str] = []
    for words, command in _all(typer.main.get_command(main.app), "shardproof"):
        lines += _command(command, words)
    return "\n".join(lines)


def _all(group: Any, words: str) -> Iterator[tuple[str, Any]]:
    """Each command of ``group`` with the words that call it."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _all(command, f"{words} {name}")
        else:
            yield f"{words} {name}", command


def _command(command: Any, words: str) -> Iterator[str]:
    yield from ("", f"## `{words}`", "")
    yield from _help(command.help)
    context = typer.Context(command, info_name=words)
    for sort in ("argument", "option"):
        of_sort = [one for one in command.params if one.param_type_name == sort]
        records = filter(None, (one.get_help_record(context) for one in of_sort))
        if rows := [(f"`{_TEXT.sub('', names)}`", about) for names, about in records]:
            yield from table((sort, "meaning"), iter(rows))


def _help(text: str) -> Iterator[str]:
    """Paragraphs of a help text; those that are not to be wrapped are code."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("\b"):
            yield from ("```text", paragraph.removeprefix("\b").strip("\n"), "```", "")
        else:
            yield from (" ".join(paragraph.split()), "")


# ------------------------------------------------------------------------------- scenario keys


def scenario_keys() -> str:
    """Keys of every kind of scenario files: type, default and meaning."""
    kinds: dict[str, Any] = {"scenario": Scenario}
    kinds |= {name: kind.model() for name, kind in wings.file_kinds().items()}
    lines: list[str] = []
    seen: set[str] = set()
    for name, model in kinds.items():
        schema = json_schema(model, name)
        lines += ["", f"## Files of kind `{name}`", ""]
        if name in wings.file_kinds():
            lines += [f"Read by `shardproof {wings.file_kinds()[name].command}`.", ""]
        lines += _keys(schema)
        for part, below in schema["$defs"].items():
            if "properties" in below and part not in seen:
                seen.add(part)
                lines += [f"### {part}", "", " ".join(below.get("description", "").split()), ""]
                lines += _keys(below)
    return "\n".join(lines)


def _keys(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())

    def rows() -> Iterator[tuple[str, ...]]:
        for key, about in schema["properties"].items():
            default = "required" if key in required else _plain(about.get("default"))
            yield f"`{key}`", _type(about), default, about.get("description", "")

    return table(("key", "type", "default", "meaning"), rows())


def _plain(value: Any) -> str:
    return "" if value in (None, [], {}, "") else f"`{str(value).replace(chr(39), '')}`"


def _type(schema: Mapping[str, Any]) -> str:
    """The type of a value, in words; shapes of their own are linked."""
    if name := schema.get("$ref", "").rpartition("/")[2]:
        return f"[{name}](#{name.lower()})"
    for key in _EITHER:
        if key in schema:
            return _either([*map(_type, schema[key])])
    if choices := schema.get("enum"):
        return ", ".join(f"`{choice}`" for choice in choices)
    if "const" in schema:
        return f"`{schema['const']}`"
    if (kind := schema.get("type")) == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object":
        return "mapping"
    return kind or "any"


def _either(types: list[str]) -> str:
    """``integer or list``: a value that may stand for a list of one is said once."""
    single = [one for one in types if f"list of {one}" in types]
    kept = [one for one in types if one.removeprefix("list of ") not in single]
    return " or ".join([*(f"{one}, or a list" for one in single), *kept])


# -------------------------------------------------------------------------- checks and verdicts


def all_checks() -> str:
    """Every check by its docstring."""
    lines: list[str] = []
    for name in checks.CHECKS:
        lines += ["", f"## `{name}`", "", without_roles(checks.explanation(name)), ""]
    return "\n".join(lines)


def all_verdicts() -> str:
    """Every verdict, its exit code and its meaning."""
    rows = (
        (f"`{one}`", str(verdicts.exit_code({one: 1})), text) for one, text in meanings().items()
    )
    return "\n".join(table(("verdict", "exit code of it alone", "meaning and remedy"), rows))


def exit_codes() -> str:
    """The exit codes, as the help has them."""
    [block] = re.findall(r"Exit codes: (.*)", main.app.info.help or "", re.DOTALL)
    rows = (tuple(line.split(None, 1)) for line in block.strip().splitlines())
    return "\n".join(table(("exit code", "meaning"), ((f"`{code}`", text) for code, text in rows)))


PARTS = {
    "commands": commands,
    "scenario-keys": scenario_keys,
    "checks": all_checks,
    "verdicts": all_verdicts,
    "exit-codes": exit_codes,
}


def filled(text: str) -> str:
    """``text`` of a page with every generated part in its place."""
    return MARK.sub(lambda mark: PARTS[mark[1]](), text)
