"""Generates docs/claims.md and docs/paper-tables.md from the files of scenarios/claims/.

    python docs/make_claims.py          # write both pages
    python docs/make_claims.py --check  # exit code 1 if a committed page is stale

Figures by formulas are computed here; what cases measure is what `shardproof run` compares.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from shardproof.estimate import claims
from shardproof.estimate.claims import Claim, Figure

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "scenarios/claims"
HEAD = "<!-- Generated: edit a file in scenarios/claims, then `python docs/make_claims.py`. -->\n"
CLAIMS = f"""{HEAD}# Popular claims, put to the test

This page says which of 31 popular sentences are true, with the figure behind each verdict.

    shardproof run scenarios/claims

The command computes every figure with the formulas of `shardproof estimate`, runs the cases that
measure some of them, plants the faults that take a sentence at its word, and prints this table.
It ends with exit code 1 if a figure is not the one on this page. *wrong*: no figure agrees with the
sentence; *true if*: some do; a figure agrees within 5 %. *open*: this version cannot decide it.
A16, A32, M18 and B8 are [accountings](estimate.md#accountings). Tables of papers are on
[their own page](paper-tables.md).

"""
PAPERS = f"""{HEAD}# Tables of papers, reproduced

This page compares values that papers print with those of the formulas that the checks use.

    shardproof run scenarios/claims/papers

"""


def read(folder: Path) -> list[Claim]:
    """The claims of a folder, in the order of their numbers."""
    found = [claims.read(path.relative_to(ROOT)) for path in folder.glob("*.yaml")]
    return sorted(found, key=lambda claim: claims.order(claim.file.claim))


def cell(text: str) -> str:
    """Text in a table of Markdown."""
    return text.replace("|", "\\|").replace("<", "&lt;")


def rows(claim: Claim, found: Sequence[Figure]) -> Iterator[str]:
    """The table of a claim's figures."""
    yield "| figure | claimed | right | |"
    yield "|---|---|---|---|"
    for one in found:
        says = {None: "", True: "agrees", False: "differs"}[one.agrees]
        shown = one.honest if one.found == "not run" else one.found
        shown = {"xfail": "the fault is caught", "all pass": "measured, passes"}.get(shown, shown)
        yield f"| {cell(one.what)} | {cell(one.claimed)} | {cell(shown)} | {says} |"


def page(folder: Path, head: str, link: str) -> str:
    """A page: all verdicts in one table, then a section for each."""
    found = read(folder)
    lines = [head + "| | sentence | verdict |", "|---|---|---|"]
    for claim in found:
        name, file = claim.file.claim, claim.file
        lines.append(f"| [{name}](#{link}{name}) | {cell(file.about)} | {cell(claim.verdict())} |")
    for claim in found:
        name, file = claim.file.claim, claim.file
        source = f" Source: {file.source}." if file.source else ""
        lines += [
            "",
            f'<a id="{link}{name}"></a>',
            f"## {name}. {file.about}",
            "",
        ]
        lines += [f"**{claim.verdict()}**. {file.honest}{source}", ""]
        lines += [f"Shown by `shardproof run {claim.path}`.", ""]
        if told := claim.all_figures({}):
            lines += rows(claim, told)
    return "\n".join(lines) + "\n"


def pages() -> dict[Path, str]:
    """Each page and its text."""
    return {
        ROOT / "docs/claims.md": page(FOLDER, CLAIMS, "claim-"),
        ROOT / "docs/paper-tables.md": page(FOLDER / "papers", PAPERS, ""),
    }


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    only = parser.parse_args().check
    texts = pages()
    stale = [path for path, text in texts.items() if not only or path.read_text() != text]
    for path in stale:
        if only:
            print(f"{path.relative_to(ROOT)} is stale: run `python docs/make_claims.py`")
        else:
            path.write_text(texts[path], encoding="utf-8")
    return int(only and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
