"""Times in reports: every form says the same, with drawings, and what they leave open."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from synthetic_run import FULL, interval, scaling_lines, timed, write_run
from test_report_page import Page

from shardproof import report, wings
from shardproof.bench import lines, tables
from shardproof.bench.drawings import curves, forest
from shardproof.bench.lines import InReport, Memory, Sent
from shardproof.bench.scaling import tables as scaling_tables
from shardproof.report import limits, looks, summary
from shardproof.runs.header import Header
from shardproof.runs.run_folder import Run, read
from shardproof.table import TableCell


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything in it."""
    path = tmp_path_factory.mktemp("full") / "run"
    return write_run(path, **FULL, benches=5, scalings=True)


@pytest.fixture(scope="module")
def page(full: Path) -> str:
    return report.html(read(full))


def test_a_page_with_times_is_sound(page: str) -> None:
    found = Page(page)
    assert not found.open and not found.outside and not found.bare_heads
    assert [name for name, times in found.ids.items() if times > 1] == []
    assert {"times", "scaling"} <= set(found.links) <= set(found.ids)
    assert found.tables == found.captions
    assert all(drawing.get("aria-label") for drawing in found.drawings)


@pytest.mark.parametrize(
    ("benches", "state", "says"),
    [(4, "open", "1 of 4 timings are not decided"), (3, "held", "3 timings")],
)
def test_the_headline(tmp_path: Path, benches: int, state: str, says: str) -> None:
    found = summary.headline(read(write_run(tmp_path / "run", cases=0, benches=benches)))
    assert found.state == state and says in found.sentence


def test_without_the_wing_a_report_says_what_it_does_not_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path / "run", cases=3, benches=2)
    monkeypatch.setattr(wings, "wings", lambda: ())
    run = read(path)
    told = "Not shown: 2 lines of kind bench; no wing of this installation reads them."
    assert run.unread == told and not run.unfinished
    for form in (report.html(run), report.document(run)):
        assert told in form


def test_timings_that_decide_nothing_are_among_what_was_not_checked(tmp_path: Path) -> None:
    found = read(write_run(tmp_path / "run", benches=5, scalings=True))
    [told] = [limit for limit in limits.limits(found) if limit.title.startswith("Times that")]
    wanted = {
        line["id"]
        for line in [*found.others["bench"], *found.others["scaling"]]
        if looks.head(line["verdict"]) in (*summary.OPEN, "oversubscribed")
    }
    assert wanted and wanted <= {row[0] for row in told.rows}
    assert "oversubscribed" in {row[1] for row in told.rows}
    for form in (report.html(found), report.document(found)):
        assert "Nothing was left out" not in form
        assert all(row[2] in form for row in told.rows)


def test_a_difference_that_is_lost_beside_others_is_not_decided() -> None:
    draw = random.Random(0)
    stored = [timed(number, draw) for number in range(2)]
    stored[0] |= {"verdict": "small difference"}
    stored[1] |= {"verdict": "inconclusive", "reason": "effects from 9.0% on can be seen"}
    family = {stored[0]["id"]: InReport(p=0.04, p_holm=0.2, verdict="inconclusive")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardproof.bench.stats.family", lambda lines: family)
        [told] = limits.limits(Run(Path("run"), Header(invocations=[]), others={"bench": stored}))
    why = "small difference alone, not with 1 comparisons (Holm)"
    assert told.rows == (
        (stored[0]["id"], "inconclusive", why),
        (stored[1]["id"], "inconclusive", "effects from 9.0% on can be seen"),
    )


def cells() -> list[lines.CellLine]:
    return [lines.CellLine.model_validate(line) for line in scaling_lines()]


def test_curves_show_intervals_target_and_what_is_modelled() -> None:
    panels = curves.panels(cells())
    assert [heading for heading, _ in panels][:2] == [
        "pytorch/fsdp2 on gloo, strong scaling",
        "reference/ddp on gloo, strong scaling",
    ]
    _, image = panels[0]
    assert "target 80%" in image and "1,024" in image
    assert image.count('class="m-plain"') == image.count('class="m-wrapped"') == 2
    assert image.count('class="m-modelled"') == 5
    assert "1024 ranks: modelled 35.0% (oversubscribed)." in image
    rows = curves.table(cells()).texts
    assert len(rows) == 20 and all(len(row) == len(scaling_tables.HEADINGS) for row in rows)
    assert rows[0][5:9] == ["88.0% [85.0%, 91.0%]", "92.0% [90.0%, 94.0%]", "89.0%", "80%"]


def test_remarks_of_the_terminal_stand_below_the_scaling_table(full: Path, page: str) -> None:
    told = scaling_tables.remarks(lines.cells(read(full)))
    assert len(told) == 4 * (1 + 3)  # a system: how, two measured worlds, one caution
    text = report.document(read(full))
    for remark in map(str.strip, told):
        assert f"- {remark}" in text
        assert remark.replace("'", "&#39;") in page
    assert "caution: launches differ (p 0.001)" in page


def test_efficiencies_beyond_one_stay_inside() -> None:
    [line] = scaling_lines()[:1]
    line["efficiency"] = {"plain": interval(1.3, 1.2, 1.5)}
    [(_, image)] = curves.panels([lines.CellLine.model_validate(line)])
    assert "160%" in image
    for at in re.findall(r'cy="([-0-9.]+)"', image):
        assert 0 < float(at) < 240


def test_comparisons_share_one_axis(full: Path) -> None:
    table = forest.table(lines.pairs(read(full)))
    assert [str(row[1]) for row in table.rows][:3] == ["faster", "same", "slower"]
    assert all(len(row) == len(table.headings) for row in table.rows)
    images = [cell.html for _, _, cell, *_ in table.rows if isinstance(cell, TableCell)]
    assert {re.search(r'x1="([0-9.]+)"[^>]*class="one"', image)[1] for image in images} == {"150"}  # type: ignore[index]
    assert "i-bad" in images[2] and "i-good" in images[0]
    stored = {**read(full).others["bench"][0], "verdict": "crash", "reason": "it fell"}
    del stored["ratio"]
    broken = lines.PairLine.model_validate(stored)
    drawing = forest.table([broken]).rows[0][2]
    assert isinstance(drawing, TableCell) and drawing.html == "-"
    assert forest.axis([broken]) is None


def test_bytes_stand_next_to_the_ratio() -> None:
    mib = 1 << 20
    spaces = {"device": {"a": mib, "b": 2 * mib}, "host": {"a": 2 * mib, "b": 0}}
    memory = Memory(kind="ledger", a=3 * mib, b=2 * mib, ratio=1.5)
    offload = memory.model_copy(update=spaces)
    assert tables._memory(memory) == "3.0 / 2.0 MiB = 1.500"
    assert tables._memory(offload) == "1.0 / 2.0 MiB = 0.500, host 2.0 / 0.0 MiB"
    assert tables._sent(Sent(a=0, b=mib)) == "0.0 / 1.0 MiB"
    assert set(tables.BYTES) <= {*tables.BRIEF} & {*tables.NARROW}
