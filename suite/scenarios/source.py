"""YAML text as plain nodes with their lines; no tag ever builds an object.

The text is read as libyaml's *event stream*.  Limits (size, depth, aliases and their expansion)
apply to the events, before anything is built: an alias bomb costs nothing, and a million ``[`` are
refused (``yaml.compose`` recurses in C and would end the process).  A small closed table resolves
scalars instead of PyYAML's constructors.  It follows YAML 1.2 where YAML 1.1 is surprising:
``1e-3`` is a number, ``1:30``, ``012`` and dates are text, and a bare ``on``, ``off``, ``yes`` or
``no`` is an error, because it may mean a word or a boolean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
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

_PREFIX = "tag:yaml.org,2002:"
_TAGS = {_PREFIX + name for name in ("str", "int", "float", "bool", "null", "seq", "map")}
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

    def plain(self) -> Any:
        """The same as nested ``dict``, ``list`` and scalars."""
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
        raise refuse("file is over 1 MiB", _too_large(noun))
    if b"\0" in raw:
        raise refuse("binary file", f"a {noun} is YAML text in UTF-8")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        byte = f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        raise refuse("not UTF-8 text", "save it as UTF-8", byte) from None
    return parse(text, shown, noun, optional)


def _too_large(noun: str) -> str:
    return "split it into several scenarios" if noun == SCENARIO else "make it shorter"


def parse(text: str, file: str, noun: str = SCENARIO, optional: bool = False) -> Node:
    """The node of YAML ``text``; ``file`` and ``noun`` only serve error messages."""
    if len(text) > MAX_BYTES:
        raise ScenarioError(Problem("text is over 1 MiB", _too_large(noun), None, file))
    reader = _Reader(file, noun)
    events = reader.check(text)
    if not events and optional:
        return Node(1, {}, {})
    if not events:
        needed = "name, about, matrix and checks" if noun == SCENARIO else "name and about"
        raise reader.error(1, "empty file", f"a {noun} needs at least {needed}")
    stream = iter(events)
    node = reader.build(next(stream), stream)
    if not isinstance(node.value, dict):
        start = "about" if optional else "name"
        remedy = f"start with `{start}: ...`"
        raise reader.error(node.line, "not a mapping", remedy, _show(node.value))
    return node


def _events(text: str) -> Iterator[Any]:
    """PyYAML's events; its stubs lack anchors, tags and marks of node events."""
    events: Iterator[Any] = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return events


class _Reader:
    def __init__(self, file: str, noun: str) -> None:
        self.file = file
        self.noun = noun
        self.anchors: dict[str | None, Node] = {}

    def error(self, line: int, what: str, remedy: str, value: str | None = None) -> ScenarioError:
        return ScenarioError(Problem(what, remedy, value, self.file, line))

    # ---------------------------------------------------------------- pass 1: limits, no objects

    def check(self, text: str) -> list[Any]:
        """The node events of the only document, within every limit."""
        events: list[Any] = []
        sizes: dict[str | None, int] = {}
        open_nodes: list[tuple[str | None, int]] = []
        aliases = documents = 0
        total = 0
        try:
            for event in _events(text):
                line = event.start_mark.line + 1
                if isinstance(event, yaml.DocumentStartEvent):
                    documents += 1
                    if documents > 1:
                        raise self.error(
                            line, "second document", f"one {self.noun} per file; remove `---`"
                        )
                if not isinstance(event, (yaml.NodeEvent, yaml.CollectionEndEvent)):
                    continue
                events.append(event)
                if isinstance(event, yaml.CollectionEndEvent):
                    anchor, before = open_nodes.pop()
                    if anchor:
                        sizes[anchor] = total - before
                    continue
                if isinstance(event, yaml.AliasEvent):
                    aliases += 1
                    total += self._alias_size(event, sizes, aliases, line)
                else:
                    self._check_tag(event, line)
                    total += 1
                    if isinstance(event, yaml.CollectionStartEvent):
                        # A repeated anchor means the new node, which is open from here on.
                        sizes.pop(event.anchor, None)
                        open_nodes.append((event.anchor, total - 1))
                    elif event.anchor:
                        sizes[event.anchor] = 1
                if len(open_nodes) > MAX_DEPTH:
                    raise self.error(line, f"nested deeper than {MAX_DEPTH} levels", "flatten it")
                if total > MAX_NODES:
                    raise self.error(
                        line, f"over {MAX_NODES:,} nodes once aliases are expanded", "use fewer"
                    )
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            what = " ".join(filter(None, (error.context, error.problem))) or "cannot be read"
            at = mark.line + 1 if mark else 1
            raise self.error(at, f"not valid YAML: {what}", self._syntax_hint(text, at)) from None
        except (yaml.YAMLError, UnicodeError, ValueError) as error:
            if isinstance(error, ScenarioError):
                raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise self.error(1, f"not valid YAML: {first}", "remove control characters") from None
        return events

    def _alias_size(self, event: Any, sizes: dict[str | None, int], aliases: int, line: int) -> int:
        if aliases > MAX_ALIASES:
            raise self.error(line, f"more than {MAX_ALIASES} aliases", "write the values out")
        if event.anchor not in sizes:
            raise self.error(
                line,
                "unknown or self-containing alias",
                "define `&name` first",
                f"*{event.anchor}",
            )
        return sizes[event.anchor]

    def _check_tag(self, event: Any, line: int) -> None:
        tag = getattr(event, "tag", None)
        if tag is not None and tag != "!" and tag not in _TAGS:
            shown = tag.replace(_PREFIX, "!!")
            raise self.error(line, "YAML tag", "remove it: files hold plain data", shown)

    @staticmethod
    def _syntax_hint(text: str, line: int) -> str:
        lines = text.splitlines()
        if line <= len(lines) and "\t" in lines[line - 1]:
            return "indent with spaces, not tabs"
        return "check the indentation, quotes and brackets above"

    # -------------------------------------------------------------------------- pass 2: the nodes

    def build(self, event: Any, events: Iterator[Any]) -> Node:
        """The node that begins with ``event``; takes its rest from ``events``."""
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            return self.anchors[event.anchor]
        node = Node(line, None, {})
        if isinstance(event, yaml.ScalarEvent):
            node.value = self._scalar(event, line)
        elif isinstance(event, yaml.SequenceStartEvent):
            self._expect_tag(event.tag, "seq", line)
            node.value = list(self._items(events))
        else:
            self._expect_tag(event.tag, "map", line)
            self._mapping(events, node)
        if isinstance(node.value, (dict, list)):
            inner = node.value.values() if isinstance(node.value, dict) else node.value
            node.height = 1 + max((child.height for child in inner), default=0)
        if node.height > MAX_DEPTH:
            raise self.error(line, f"nested deeper than {MAX_DEPTH} levels", "use fewer aliases")
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def _expect_tag(self, tag: str | None, kind: str, line: int) -> None:
        if tag not in (None, "!", _PREFIX + kind):
            raise self.error(line, "YAML tag on another kind of value", "remove it", tag)

    def _items(self, events: Iterator[Any]) -> Iterator[Node]:
        while True:
            event = next(events)
            if isinstance(event, yaml.CollectionEndEvent):
                return
            yield self.build(event, events)

    def _mapping(self, events: Iterator[Any], node: Node) -> None:
        value: dict[str, Node] = {}
        merged: list[tuple[Node, Node]] = []
        while True:
            event = next(events)
            if isinstance(event, yaml.CollectionEndEvent):
                break
            key = self.build(event, events)
            child = self.build(next(events), events)
            if not isinstance(key.value, str):
                raise self.error(key.line, "key is not a word", "quote it", _show(key.value))
            if key.value == "<<" and isinstance(event, yaml.ScalarEvent) and event.implicit[0]:
                merged.append((key, child))
                continue
            if key.value in value:
                first = node.keys[key.value].line
                raise self.error(
                    key.line, f"key given twice, first on line {first}", "keep one", key.value
                )
            value[key.value] = child
            node.keys[key.value] = key
        for key, source in merged:
            for part in source.value if isinstance(source.value, list) else [source]:
                if not isinstance(part.value, dict):
                    raise self.error(key.line, "`<<` needs a mapping", "give it `*an_alias`")
                for name, child in part.value.items():
                    if name not in value:
                        value[name] = child
                        node.keys[name] = part.keys[name]
        node.value = value

    def _scalar(self, event: yaml.ScalarEvent, line: int) -> Scalar:
        text, tag = event.value, event.tag
        if tag in ("!", _PREFIX + "str") or (tag is None and not event.implicit[0]):
            return str(text)
        if tag is None and _WORDS.match(text):
            raise self.error(
                line,
                "ambiguous word",
                "write true, false or null, or quote it if it is a name",
                text,
            )
        value = _resolve(text)
        if isinstance(value, OverflowError):
            raise self.error(line, "number with too many digits", "use at most 18", text)
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error(line, "number is not finite", "quote it if it is a name", text)
        if tag is not None:
            kinds = {"int": (int,), "float": (int, float), "bool": (bool,), "null": (type(None),)}
            if type(value) not in kinds.get(tag.removeprefix(_PREFIX), ()):
                raise self.error(line, f"not a {tag.removeprefix(_PREFIX)}", "remove the tag", text)
        return value


def _resolve(text: str) -> Any:
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


def _show(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else repr(value)
