"""YAML text as plain nodes with their lines; no tag ever builds an object.

The text is read as libyaml's *event stream*, with limits on size, depth, aliases and their
expansion: an alias bomb costs nothing, because an alias is the node that it names, and a million
``[`` are X YAML 1.2 where YAML 1.1 is surprising:
``1e-3`` is a number, ``1:30``, ``012`` and dates are text, and a bare ``on``, ``off``, ``yes`` or
``no`` is an error, because it may mean a word or a boolean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

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
    node = reader.document(text)
    if node is None and optional:
        return Node(1, {}, {})
    if node is None:
        needed = "name, about, matrix and checks" if noun == SCENARIO else "name and about"
        raise reader.error(1, "empty file", f"a {noun} needs at least {needed}")
    if not isinstance(node.value, dict):
        start = "about" if optional else "name"
        remedy = f"start with `{start}: ...`"
        raise reader.error(node.line, "not a mapping", remedy, value_text(node.value))
    return node


class _Reader:
    def __init__(self, file: str, noun: str) -> None:
        self.file = file
        self.noun = noun
        self.anchors: dict[str | None, Node] = {}
        self.aliases = self.total = 0

    def error(self, line: int, what: str, remedy: str, value: str | None = None) -> ScenarioError:
        return ScenarioError(Problem(what, remedy, value, self.file, line))

    def document(self, text: str) -> Node | None:
        """The only document, within every limit; ``None``: there is none."""
        events = self._events(text)
        first = next(events, None)
        node = None if first is None else self._node(first, events, 1)
        next(events, None)  # goes on to the end, where another document may begin
        return node

    def _events(self, text: str) -> Iterator[Any]:
        """PyYAML's events, whose stubs lack anchors, tags and marks of node events."""
        loader, documents = getattr(yaml, "CSafeLoader", yaml.SafeLoader), 0
        try:
            for event in cast(Iterator[Any], yaml.parse(text, Loader=loader)):
                documents += isinstance(event, yaml.DocumentStartEvent)
                if documents > 1:
                    line, remedy = event.start_mark.line + 1, "per file; remove `---`"
                    raise self.error(line, "second document", f"one {self.noun} {remedy}")
                if isinstance(event, (yaml.NodeEvent, yaml.CollectionEndEvent)):
                    yield event
        except yaml.MarkedYAMLError as error:
            # A bracket that nobody closes is found out later than where it stands.
            is_open = "flow" in (error.context or "") and error.context_mark
            mark = error.context_mark if is_open else error.problem_mark or error.context_mark
            what = " ".join(filter(None, (error.context, error.problem))) or "cannot be read"
            at = mark.line + 1 if mark else 1
            remedy = "close what begins here" if is_open else self._syntax_hint(text, at)
            raise self.error(at, f"not valid YAML: {what}", remedy) from None
        except (yaml.YAMLError, UnicodeError, ValueError) as error:
            if isinstance(error, ScenarioError):
                raise
            first = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise self.error(1, f"not valid YAML: {first}", "remove control characters") from None

    @staticmethod
    def _syntax_hint(text: str, line: int) -> str:
        lines = text.splitlines()
        if line <= len(lines) and "\t" in lines[line - 1]:
            return "indent with spaces, not tabs"
        return "check the indentation, quotes and brackets above"

    def _count(self, nodes: int, line: int) -> None:
        self.total += nodes
        if self.total > MAX_NODES:
            what = f"over {MAX_NODES:,} nodes once aliases are expanded"
            raise self.error(line, what, "use fewer")

    def _node(self, event: Any, events: Iterator[Any], depth: int) -> Node:
        """The node that begins with ``event``; takes its rest from ``events``."""
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event, line)
        before, node = self.total, Node(line, None, {})
        self._count(1, line)
        # A repeated anchor means the new node, which is open from here on.
        self.anchors.pop(event.anchor, None)
        if isinstance(event, yaml.ScalarEvent):
            self._check_tag(event.tag, _TAGS, line)
            node.value = self._scalar(event, line)
        else:
            if depth > MAX_DEPTH:
                raise self.error(line, f"nested deeper than {MAX_DEPTH} levels", "flatten it")
            inside = self._inside(events, depth + 1)
            is_list = isinstance(event, yaml.SequenceStartEvent)
            self._check_tag(event.tag, {_PREFIX + ("seq" if is_list else "map")}, line)
            node.value = [child for _, child in inside] if is_list else self._mapping(inside, node)
            inner = node.value.values() if isinstance(node.value, dict) else node.value
            node.height = 1 + max((child.height for child in inner), default=0)
        if node.height > MAX_DEPTH:
            raise self.error(line, f"nested deeper than {MAX_DEPTH} levels", "use fewer aliases")
        node.size = self.total - before
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def _alias(self, event: yaml.AliasEvent, line: int) -> Node:
        self.aliases += 1
        if self.aliases > MAX_ALIASES:
            raise self.error(line, f"more than {MAX_ALIASES} aliases", "write the values out")
        node = self.anchors.get(event.anchor)
        if node is None:
            what, remedy = "unknown or self-containing alias", "define `&name` first"
            raise self.error(line, what, remedy, f"*{event.anchor}")
        self._count(node.size, line)
        return node

    def _check_tag(self, tag: str | None, valid: Collection[str], line: int) -> None:
        if tag not in (None, "!", *valid):
            shown = str(tag).replace(_PREFIX, "!!")
            raise self.error(line, "YAML tag", "remove it: files hold plain data", shown)

    def _inside(self, events: Iterator[Any], depth: int) -> Iterator[tuple[Any, Node]]:
        while not isinstance(event := next(events), yaml.CollectionEndEvent):
            yield event, self._node(event, events, depth)

    def _mapping(self, inside: Iterator[tuple[Any, Node]], node: Node) -> dict[str, Node]:
        value: dict[str, Node] = {}
        merged: list[tuple[Node, Node]] = []
        for (event, key), (_, child) in zip(inside, inside, strict=True):
            if not isinstance(key.value, str):
                raise self.error(key.line, "key is not a word", "quote it", value_text(key.value))
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
        return value

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


def value_text(value: Any) -> str:
    """A value of a file as messages write it."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    return "null" if value is None else str(value)
