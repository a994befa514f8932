"""JUnit XML, which every CI system shows: of a run, or of any list of tests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal
from xml.etree import ElementTree

from shardproof import verdicts
from shardproof.checks.results import CaseResult
from shardproof.runs.run_folder import Run

#: Characters that XML 1.0 cannot hold.
_FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
Tag = Literal["", "failure", "error", "skipped"]
_COUNTED = {"failure": "failures", "error": "errors", "skipped": "skipped"}


@dataclass(frozen=True)
class Item:
    """One test; ``id`` is a case's, cut at ``::`` into class and name.

    ``tag`` is empty where it passed; ``text`` of a test that passed is shown as its output.
    ``properties`` without a value are left out.
    """

    id: str
    tag: Tag = ""
    message: str = ""
    text: str = ""
    seconds: float = 0.0
    kind: str = ""
    properties: Mapping[str, object] = field(default_factory=dict)


def document(run: Run) -> str:
    """One test case a case; those that were left out are skipped tests."""
    late = [Item(line.id, "skipped", f"left out: {line.reason}") for line in run.left_out]
    last = run.header.last
    properties: dict[str, object] = {"run": run.path.resolve().name}
    properties |= {name: getattr(last, name) for name in ("suite", "commit", "python")}
    properties |= {"torch": last.packages.get("torch"), "hardware": last.hardware}
    started = run.header.invocations[0].started
    return render("shardproof", [*map(_of_result, run.cases), *late], properties, started)


def _of_result(result: CaseResult) -> Item:
    reason, kind = result.reason, verdicts.kind(result.verdict)
    item = Item(result.id, seconds=result.seconds, properties=_properties(result))
    if kind in ("skip", "xfail"):
        return replace(item, tag="skipped", message=f"{kind}: {reason}")
    if kind in verdicts.GREEN:
        return item
    message = f"{result.verdict}: {reason}".split("\n")[0]
    text = f"{reason}\nrerun: {result.rerun}"
    # A verdict of the judge is a failure; what kept it from one is an error.
    tag: Tag = "failure" if kind in ("fail", "xpass") else "error"
    return replace(item, tag=tag, message=message, text=text, kind=kind)


def _properties(result: CaseResult) -> dict[str, object]:
    case = result.case
    found = ("depth", "loss_factor", "worst_error", "bound", "bytes_sent", "bytes_expected")
    told = {"verdict": result.verdict, "implementation": case.system}
    told |= {name: getattr(case, name) for name in ("backend", "world", "lane")}
    return told | {name: getattr(result, name) for name in (*found, "rerun")}


def render(
    name: str,
    tests: Iterable[Item],
    properties: Mapping[str, object] | None = None,
    started: str = "",
) -> str:
    """The XML of ``tests``; ``started``: the moment as ISO 8601, in UTC."""
    suite = ElementTree.Element("testsuite", name=name)
    if started:
        suite.set("timestamp", started[: len("2026-01-31T12:00:00")])
    _add_properties(suite, properties or {})
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    seconds = 0.0
    for test in tests:
        counts["tests"] += 1
        seconds += test.seconds
        scenario, _, rest = test.id.partition("::")
        told = {"classname": _clean(scenario), "name": _clean(rest or scenario)}
        element = ElementTree.SubElement(suite, "testcase", told, time=f"{test.seconds:.3f}")
        _add_properties(element, test.properties)
        if test.tag:
            counts[_COUNTED[test.tag]] += 1
            outcome = ElementTree.SubElement(element, test.tag, message=_clean(test.message))
            if test.kind:
                outcome.set("type", test.kind)
        elif test.text:
            outcome = ElementTree.SubElement(element, "system-out")
        if test.text:
            outcome.text = _clean(test.text)
    for count, value in counts.items():
        suite.set(count, str(value))
    suite.set("time", f"{seconds:.3f}")
    top = ElementTree.Element("testsuites")
    top.append(suite)
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def _add_properties(element: ElementTree.Element, properties: Mapping[str, object]) -> None:
    known = {name: value for name, value in properties.items() if value not in (None, "")}
    if known:
        parent = ElementTree.SubElement(element, "properties")
        for name, value in known.items():
            ElementTree.SubElement(parent, "property", name=name, value=_clean(str(value)))


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("?", text)
