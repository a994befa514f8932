"""JUnit XML, which every CI system shows: of a run, or of any list of tests."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
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
    """

    id: str
    tag: Tag = ""
    message: str = ""
    text: str = ""
    seconds: float = 0.0
    kind: str = ""


def document(run: Run) -> str:
    """One test case a case; those that were left out are skipped tests."""
    late = [Item(line.id, "skipped", f"left out: {line.reason}") for line in run.left_out]
    return render("shardproof", [*map(_of_result, run.cases), *late])


def _of_result(result: CaseResult) -> Item:
    name, seconds, reason = result.id, result.seconds, result.reason
    kind = verdicts.kind(result.verdict)
    if kind in ("skip", "xfail"):
        return Item(name, "skipped", f"{kind}: {reason}", seconds=seconds)
    if kind in verdicts.GREEN:
        return Item(name, seconds=seconds)
    message = f"{result.verdict}: {reason}".split("\n")[0]
    text = f"{reason}\nrerun: {result.rerun}"
    # A verdict of the judge is a failure; what kept it from one is an error.
    tag: Tag = "failure" if kind in ("fail", "xpass") else "error"
    return Item(name, tag, message, text, seconds, kind)


def render(name: str, tests: Iterable[Item]) -> str:
    suite = ElementTree.Element("testsuite", name=name)
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    seconds = 0.0
    for test in tests:
        counts["tests"] += 1
        seconds += test.seconds
        scenario, _, rest = test.id.partition("::")
        element = ElementTree.SubElement(
            suite,
            "testcase",
            classname=_clean(scenario),
            name=_clean(rest or scenario),
            time=f"{test.seconds:.3f}",
        )
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


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("?", text)
