"""A run as JUnit XML, which every CI system shows."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

from suite import verdicts
from suite.results import Run

#: Characters that XML 1.0 cannot hold.
_FORBIDDEN = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def document(run: Run) -> str:
    """One test case a case; those that were left out are skipped tests."""
    suite = ElementTree.Element("testsuite", name="shardproof")
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    seconds = 0.0
    for result in run.cases:
        counts["tests"] += 1
        seconds += float(result["seconds"])
        element = _case(suite, result, float(result["seconds"]))
        kind, reason = verdicts.kind(result["verdict"]), str(result["reason"])
        if kind in ("skip", "xfail"):
            counts["skipped"] += 1
            ElementTree.SubElement(element, "skipped", message=_clean(f"{kind}: {reason}"))
        elif kind not in verdicts.GREEN:
            # A verdict of the judge is a failure; what kept it from one is an error.
            tag = "failure" if kind in ("fail", "xpass") else "error"
            counts["failures" if tag == "failure" else "errors"] += 1
            message = _clean(f"{result['verdict']}: {reason}")
            told = ElementTree.SubElement(element, tag, message=message.split("\n")[0], type=kind)
            told.text = _clean(f"{reason}\nrerun: {result['rerun']}")
    for line in run.left_out:
        counts["tests"] += 1
        counts["skipped"] += 1
        element = _case(suite, line, 0.0)
        ElementTree.SubElement(element, "skipped", message=_clean(f"left out: {line['reason']}"))
    for name, value in counts.items():
        suite.set(name, str(value))
    suite.set("time", f"{seconds:.3f}")
    top = ElementTree.Element("testsuites")
    top.append(suite)
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ElementTree.Element, line: dict[str, Any], seconds: float) -> ElementTree.Element:
    scenario, _, rest = str(line["id"]).partition("::")
    return ElementTree.SubElement(
        suite,
        "testcase",
        classname=_clean(scenario),
        name=_clean(rest or scenario),
        time=f"{seconds:.3f}",
    )


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("?", text)
