"""YAML text as plain nodes with their lines; no tag ever builds an object.

libyaml's *event stream* is held against limits on size, depth and aliases before nodes are
composed: its own composer would follow a million ``[`` until its stack ends.  An alias bomb costs
nothing, because an alias is the node that it names.  Scalars are those of YAML 1.2 where YAML 1.1
is surprising: ``1e-3`` is a number, ``1:30``, ``012`` and dates are text, and a bare ``on``,
``off``, ``yes`` or ``no`` is an error, because it may mean a word or a boolean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from shardproof.errors import Problem, ScenarioError
from shardproof.files import open_input

MAX_BYTES = 1 << 20
MAX_ALIASES = 100
MAX_NODES = 100_000
MAX_DEPTH = 32

Scalar = str | int | float | bool | None
#: The default kind of file.
SCENARIO = "scenario"

_WORDS = re.compile(r"(?i:on|off|yes|no)\Z")
_INT = re.compile(r"[-+]?[0-9]+\Z")
_FLOAT = re.compile(
    r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?|\.(?i:inf)|\.(?i:nan))\Z"
)
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_NULL = {"", "~", "null", "Null", "NULL"}


@dataclass
class Node:
    """A scalar, a list of nodes, or a mapping (``keys`` holds the nodes of its keys).

    ``line`` counts from 1 and is the line of the first character.
    """

    line: int
    value: Scalar | list[Node] | dict[str, Node]
    keys: dict[str, Node]
    height: int = 0
    #: Nodes inside and itself, aliases expanded.
    size: int = 1

    def plain(self) -> Any:
        """The value without lines, as plain lists and dictionaries."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def locate(self, path: Iterable[str | int]) -> int:
        """Line of the node at ``path``, or of the deepest existing part of the path."""
        node, line = self, self.line
        for step in path:
            if isinstance(node.value, dict) and step in node.value:
                line = node.keys[str(step)].line
                node = node.value[str(step)]
            elif isinstance(node.value, list) and isinstance(step, int) and step < len(node.value):
                node = node.value[step]
                line = node.line
        return line


def read(path: Path, noun: str = SCENARIO, optional: bool = False) -> Node:
    """The node of the file at ``path``, whose top level must be a mapping.

    ``noun`` names the kind of file in errors; ``optional``: no key is required, so an empty file is
    an empty mapping.

    :raises ScenarioError: an unreadable file, invalid YAML, or YAML beyond the limits.
    """
    shown = str(path)

    def refuse(what: str, remedy: str, value: str | None = None) -> ScenarioError:
        return ScenarioError(Problem(what, remedy, value, shown))

    try:
        if path.is_dir():
            raise refuse("is a folder", "name a .yaml file")
        with open_input(path) as stream:
            raw = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        more = "; `shardproof list scenarios` shows all" if noun == SCENARIO else ""
        raise refuse("no such file", f"check the path of the {noun}{more}") from None
    except OSError as error:
        raise refuse("cannot be read", "check the file's permissions", error.strerror) from None
    if len(raw) > MAX_BYTES:
        raise refuse("file is larger than 1 MiB", "split the file, or shorten it")
    if b"\0" in raw:
        raise refuse("binary file", "name a YAML text file in UTF-8")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise refuse("not UTF-8 text", "save the file as UTF-8", byte) from None
    return parse(text, shown, noun, optional)


def parse(text: str, file: str, noun: str = SCENARIO, optional: bool = False) -> Node:
    """The node of YAML ``text``; ``file`` and ``noun`` only serve error messages."""
    if len(text) > MAX_BYTES:
        raise ScenarioError(Problem("text is larger than 1 MiB", "make it shorter", None, file))
    reader = _Reader(file, noun)
    node = reader.document(text)
    if node is None and optional:
        return Node(1, {}, {})
    start = f"start with `{'about' if optional else 'name'}: ...`"
    if node is None:
        raise reader.error(1, "empty file", start)
    if not isinstance(node.value, dict):
        raise reader.error(node.line, "not a mapping", start, value_text(node.value))
    return node


class _Reader:
    def __init__(self, file: str, noun: str) -> None:
        self.file = file
        self.noun = noun
        #: By the identity of PyYAML's nodes: that of an alias is the one that it names.
        self.made: dict[int, Node] = {}

    def error(self, line: int, what: str, remedy: str, value: str | None = None) -> ScenarioError:
        return ScenarioError(Problem(what, remedy, value, self.file, line))

    def document(self, text: str) -> Node | None:
        """The only document, within every limit; ``None``: there is none."""
        loader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)
        try:
            self._check(yaml.parse(text, Loader=loader))
            composed = yaml.compose(text, Loader=loader)
        except yaml.MarkedYAMLError as error:
            # A bracket that nobody closes is found out later than where it stands.
            is_open = "flow" in (error.context or "") and error.context_mark
            mark = error.context_mark if is_open else error.problem_mark or error.context_mark
            what = " ".join(filter(None, (error.context, error.problem))) or "cannot be read"
            at = mark.line + 1 if mark else 1
            hint = "check the indentation, quotes and brackets above"
            if "\t" in "".join(text.splitlines()[at - 1 : at]):
                hint = "indent with spaces, not tabs"
            remedy = "close the bracket or quote that opens here" if is_open else hint
            raise self.error(at, f"not valid YAML: {what}", remedy) from None
        except (yaml.YAMLError, UnicodeError, ValueError) as error:
            if isinstance(error, ScenarioError):
                raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise self.error(1, f"not valid YAML: {first}", "remove control characters") from None
        return None if composed is None else self._node(composed)

    def _check(self, events: Iterable[Any]) -> None:
        """Hold ``events`` against all limits but that of expanded aliases."""
        documents = aliases = 0
        opened: list[str | None] = []  # the anchors of collections that are not complete
        anchors: set[str | None] = set()
        for event in events:
            line = event.start_mark.line + 1
            documents += isinstance(event, yaml.DocumentStartEvent)
            if documents > 1:
                remedy = f"one {self.noun} per file; remove `---`"
                raise self.error(line, "a second YAML document begins", remedy)
            if (tag := getattr(event, "tag", None)) is not None:
                shown = tag.replace("tag:yaml.org,2002:", "!!")
                raise self.error(
                    line,
                    "YAML tags are not allowed",
                    f"remove the tag: a {self.noun} may use only untagged values",
                    shown,
                )
            if isinstance(event, yaml.AliasEvent):
                aliases += 1
                if aliases > MAX_ALIASES:
                    what = f"more than {MAX_ALIASES} aliases"
                    raise self.error(line, what, "write the values out")
                if event.anchor not in anchors:
                    what, remedy = "unknown or self-containing alias", "define `&name` first"
                    raise self.error(line, what, remedy, f"*{event.anchor}")
            elif isinstance(event, yaml.CollectionStartEvent):
                opened.append(event.anchor)
                if len(opened) > MAX_DEPTH:
                    raise self.error(line, f"nested deeper than {MAX_DEPTH} levels", "flatten it")
            elif isinstance(event, yaml.CollectionEndEvent):
                anchors.add(opened.pop())
            elif isinstance(event, yaml.ScalarEvent):
                anchors.add(event.anchor)

    def _node(self, given: Any) -> Node:
        if id(given) in self.made:
            return self.made[id(given)]
        node = self.made[id(given)] = Node(given.start_mark.line + 1, None, {})
        inner: list[Node] = []
        if isinstance(given, yaml.ScalarNode):
            node.value = str(given.value) if given.style else self._plain(given.value, node.line)
        elif isinstance(given, yaml.SequenceNode):
            node.value = inner = [self._node(child) for child in given.value]
        else:
            node.value = self._mapping(given.value, node)
            inner = [*node.keys.values(), *node.value.values()]
        if inner:
            node.height = 1 + max(child.height for child in inner)
            node.size += sum(child.size for child in inner)
        if node.height > MAX_DEPTH:
            what = f"nested deeper than {MAX_DEPTH} levels"
            raise self.error(node.line, what, "use fewer aliases")
        if node.size > MAX_NODES:
            what = f"more than {MAX_NODES:,} YAML nodes with all aliases expanded"
            raise self.error(node.line, what, "use fewer")
        return node

    def _mapping(self, pairs: Sequence[tuple[Any, Any]], node: Node) -> dict[str, Node]:
        value: dict[str, Node] = {}
        merged: list[Node] = []
        for given, child in pairs:
            key = self._node(given)
            if not isinstance(key.value, str):
                raise self.error(key.line, "a key must be text", "quote it", value_text(key.value))
            if key.value == "<<" and not given.style:
                source = self._node(child)
                merged += source.value if isinstance(source.value, list) else [source]
                if not all(isinstance(part.value, dict) for part in merged):
                    raise self.error(key.line, "`<<` needs a mapping", "write e.g. `<<: *an_alias`")
                continue
            if key.value in value:
                what = f"key given twice, first on line {node.keys[key.value].line}"
                raise self.error(key.line, what, "keep one of them", key.value)
            value[key.value] = self._node(child)
            node.keys[key.value] = key
        for part in merged:
            inherited: Any = part.value
            value |= {name: inherited[name] for name in inherited if name not in value}
            node.keys = {**part.keys, **node.keys}
        return value

    def _plain(self, text: str, line: int) -> Scalar:
        """The meaning of ``text`` without quotes."""
        if _WORDS.match(text):
            remedy = "write true, false or null, or quote the value if it is a name"
            raise self.error(line, "this word is ambiguous", remedy, text)
        value = resolve(text)
        if isinstance(value, OverflowError):
            raise self.error(line, "this number has too many digits", "use at most 18", text)
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(line, "number is not finite", "quote the value if it is a name", text)
        return value


def resolve(text: str) -> Any:
    """The value of a plain scalar; an ``OverflowError`` for a number with too many digits."""
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.match(text):
        digits = text.lstrip("+-")
        if len(digits) > 18:
            return OverflowError(text)
        # A leading zero is octal in YAML 1.1 and decimal in 1.2: neither; it stays text.
        return text if len(digits) > 1 and digits[0] == "0" else int(text)
    if _FLOAT.match(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def value_text(value: Any) -> str:
    """A value of a file as messages write it."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    return "null" if value is None else str(value)
