"""The page and its drawings say what the run says, in sizes that a browser opens."""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from made_case import made_case
from synthetic_run import FULL, TENSORS, write_run
from test_report import case, fill, result

from shardproof import report
from shardproof.checks.results import CaseResult
from shardproof.report import limits, summary
from shardproof.report.drawings import bars, heat, svg, timelines
from shardproof.report.section import TEMPLATES, parts
from shardproof.runs import records
from shardproof.runs.run_folder import RunFolder, read


class Page(HTMLParser):
    """Ids, links to them, drawings and tables of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.drawings: list[dict[str, str | None]] = []
        self.outside: list[str] = []
        self.open: list[str] = []
        self.tables = self.captions = 0
        self.bare_heads = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = dict(attrs)
        if told.get("id"):
            self.ids[str(told["id"])] += 1
        for name in ("href", "src", "action", "data", "srcset", "poster"):
            value = told.get(name)
            if value is not None and value.startswith("#"):
                self.links.append(value[1:])
            elif value is not None and not value.startswith("data:"):
                self.outside.append(value)
        if tag == "svg" and told.get("role") == "img":
            self.drawings.append(told)
        self.tables += tag == "table"
        self.captions += tag == "caption"
        self.bare_heads += tag == "th" and "scope" not in told
        void = ("meta", "wbr", "link", "br", "img", "input")
        if tag not in (*void, "use", "path", "rect", "line", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag in ("path", "rect", "line", "circle", "use"):
            return
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything in it."""
    return write_run(
        tmp_path_factory.mktemp("full") / "run",
        **FULL,
    )


@pytest.fixture(scope="module")
def page(full: Path) -> str:
    return report.html(read(full))


def test_the_page_is_sound_and_asks_for_nothing(page: str) -> None:
    found = Page(page)
    assert found.open == []
    assert found.outside == []
    assert [name for name, times in found.ids.items() if times > 1] == []
    assert set(found.links) <= set(found.ids)
    assert found.tables == found.captions > 10
    assert found.bare_heads == 0
    assert not re.search(r"<th[^>]*>\s*</th>", page), "a heading without a word"
    assert len(found.drawings) > 50
    assert all(drawing.get("aria-label") for drawing in found.drawings)
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\';' in page
    assert not re.search(r"url\(|@import|https?:", page)


def test_the_answer_comes_first_and_then_what_broke(page: str) -> None:
    text = re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL)
    answer = text.index("Failed: 30 of ")
    assert "2 of 40 planted faults survive" in text[answer : answer + 200]
    assert answer < text.index('id="broke"') < text.index('id="capabilities"')
    assert "shardproof run made --tier quick -k" in text
    assert "shardproof mutants --impl zero1_fault_000" in text


def test_after_the_failures_comes_the_matrix_then_every_case(page: str) -> None:
    order = ["broke", "capabilities", "cases", "results", "faults", "scenarios", "where"]
    places = [page.index(f'<h2 id="{name}"') for name in order]
    assert places == sorted(places)
    assert page.index('type="search"') < places[0], "search is part of the summary"
    assert '<details class="part"><summary><h2 id="traffic"' in page
    assert '<details class="part"><summary><h2 id="broke"' not in page


def test_a_case_leads_to_its_scenario_and_a_refusal_is_no_training(tmp_path: Path) -> None:
    trained = made_case("reference/ddp", {"replicate": 2}, id="ddp-gpt::trained")
    refused = replace(trained, id="ddp-gpt::refused", expect={"refuses": "no such axis"})
    with RunFolder(tmp_path / "run", ["shardproof", "run"]) as folder:
        for case in (trained, refused):
            case = replace(case, scenario="ddp-gpt")
            folder.add(CaseResult(case.id, case, "pass", "", rerun="shardproof run ddp-gpt"))
    page = report.html(read(tmp_path / "run"))
    assert page.count('<a href="#s-1">ddp-gpt</a>') == 2
    assert '<span id="s-1">ddp-gpt</span>' in page
    assert "Data parallelism on a byte-level GPT" in page
    assert page.count("refusal tests (nothing is trained)") == 1
    assert set(Page(page).links) <= set(Page(page).ids)


def test_both_forms_tell_the_same(full: Path, page: str) -> None:
    run = read(full)
    text = report.document(run)
    for found in (text, page):
        assert summary.headline(run).sentence in found
        for limit in limits.limits(run):
            assert limit.title in found
        assert "clipping is off" in found
        assert "0123456789abcdef" in found
    assert "| reference/ddp | gloo |" in text
    assert not re.search(r"^\|(?:.*\|)?\s+\|.*\n\| ---", text, re.MULTILINE), (
        "a heading without a word"
    )


@pytest.mark.parametrize(
    ("arguments", "state", "says"),
    [
        ({"cases": 20}, "held", "Nothing failed: "),
        ({"cases": 20, "failing": 1}, "broke", "1 of "),
        ({"cases": 20, "kills": 3, "survivors": 1}, "broke", "1 of 3 planted faults survive"),
        ({"cases": 0}, "open", "Nothing was judged."),
        ({"cases": 20, "left_out": 2}, "held", "Nothing failed: "),
        ({"cases": 20, "left_out": 5}, "open", ", but 5 of "),
    ],
)
def test_the_headline(tmp_path: Path, arguments: dict[str, Any], state: str, says: str) -> None:
    found = summary.headline(read(write_run(tmp_path / "run", **arguments)))
    assert found.state == state
    assert says in found.sentence


def test_a_run_that_was_killed_is_not_decided(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", cases=20)
    lines = (path / "cases.jsonl").read_text().splitlines(keepends=True)
    (path / "cases.jsonl").write_text("".join(lines[:15]))
    run = read(path)
    assert summary.headline(run).state == "open"
    assert len(run.unfinished) == 5
    assert report.closing(run).endswith(", 5 planned without a result")
    assert limits.limits(run)[0].title == "Planned and missing"
    assert json.loads(lines[-1])["id"] in report.html(run)


def test_what_was_not_checked_is_told_with_its_reason(full: Path) -> None:
    told = {limit.title: limit for limit in limits.limits(read(full))}
    assert told["Left out"].rows == (("3", "no time in a budget of 3 minutes"),)
    assert len(told["Left out"].items[0]) == 3
    assert ("runs on gloo, nccl only") in {row[2] for row in told["Skipped cases"].rows}
    checks = told["Checks that did not judge in cases that ran"]
    assert checks.rows[0][1:3] == ("norm", "clipping is off")
    [power] = told["Tensors without power"].rows
    assert power[1:] == ("initial parameters", "final.scalar.factor", "equivalence")
    asked = told["Capabilities that no judged case asked about"]
    assert "reference/pipeline" in {row[0]: row[2] for row in asked.rows}["memory"]


def test_ids_break_between_their_parts_only() -> None:
    assert parts("a<b::c") == "a&lt;b::<wbr>c"


def test_bars_are_what_was_held_and_sent(full: Path) -> None:
    cases = [r for r in read(full).cases if r.case.implementation == "reference/zero2"]
    [bar, *_] = bars.memory_bars(cases)
    assert bar.name == "reference/zero2"
    assert bar.cells[3] == bar.cells[4] == "929,600"
    assert 'class="k-gradients"' in bar.image and 'class="k-gradients formula"' in bar.image
    cases = [r for r in cases if r.case.backend == "gloo" or r.verdict != "fail"]
    red, *others = bars.traffic_bars(cases)
    assert red.red and not any(other.red for other in others)
    assert "all gather 67%" in others[0].image and others[0].cells[3] == "= formula"


def test_widths_of_bars_add_up() -> None:
    parts = bars._pair({"parameters": 25, "gradients": 50}, {"total": 100}, 100, "k")
    widths = [float(w) for w in re.findall(r'y="2" width="([0-9.]+)"', "".join(parts))]
    assert widths == [300.0, 74.2, 149.2]


def test_timelines_have_a_lane_a_rank(full: Path) -> None:
    run = read(full)
    drawn, more = timelines.timelines(run.path, run.cases)
    assert more == 0
    assert len({told.heading for told in drawn}) == len(drawn) == 6
    three = next(told for told in drawn if "pipe 3, 4 micro-batches" in told.heading)
    image = str(three.image)
    assert len(re.findall(r'class="a-F"', image)) == len(re.findall(r'class="a-BW"', image)) == 12
    assert len(re.findall(r'class="a-call"', image)) == 16
    assert "rank 2" in image and "send along pipe, 4,096 bytes" in image
    assert [row[:2] for row in three.rows] == [(str(r), "4 F, 4 BW") for r in range(3)]
    assert three.rows[2][4] == "0.0%" and three.rows[0][2] == "24.00"


def test_a_record_that_cannot_be_read_is_said(full: Path, tmp_path: Path) -> None:
    run = read(full)
    for line in run.cases:
        if line.record:
            line.record = "records/absent.parquet"
    run.path = tmp_path
    page = report.html(run)
    assert "Not drawn: " in page and "No map of errors: " in page
    assert "the record cannot be read" in page


def test_maps_of_errors_name_the_first_beyond_its_bound(full: Path) -> None:
    run = read(full)
    failing = next(line for line in run.cases if line.verdict == "fail")
    told = heat.heat_map(run.path, failing)
    assert told is not None and told.image is not None
    assert told.note.startswith(f"Check equivalence; {len(TENSORS)} tensors compared, 5 beyond")
    assert "furthest" in told.note
    assert told.image.count('class="h-none"') > 0
    assert told.image.count('class="h-5"') == 5
    passing = next(line for line in run.cases if line.verdict == "pass")
    assert heat.heat_map(run.path, passing) is None


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "run"
    bad = '"><script>alert(1)</script><img src=x onerror=y>'
    with RunFolder(path, [bad]) as folder:
        folder.add(result(case(bad, bad, label=bad), "fail", reason=bad))
        folder.add(result(case(bad + "2", bad), "skip", reason=bad))
        folder.leave_out(case(bad + "3"), bad)
    run = read(path)
    found = Page(report.html(run))
    assert found.outside == [] and found.open == []
    assert "<script" not in report.document(run).replace("~~~~", "").split("## What broke")[0]


def test_the_work_of_long_runs_does_not_grow_with_the_square(tmp_path: Path) -> None:
    """2,000 cases: under 8 MB; 500 more cases take as many more calls, whatever there were."""

    def take(cases: int) -> tuple[int, int]:
        arguments = {"cases": cases, "failing": cases // 20, "kills": 200, "pipelines": 9}
        run = read(write_run(tmp_path / f"run{cases}", **arguments))
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(count)
        try:
            page = report.html(run)
        finally:
            sys.setprofile(before)
        return calls, len(page.encode())

    take(20)  # imports
    few, more, most = (take(cases)[0] for cases in (500, 1000, 1500))
    assert 0 < most - more < 1.1 * (more - few), (few, more, most)
    assert take(2000)[1] < 8e6


def test_colours_can_be_read_in_both_modes() -> None:
    """WCAG 2.2 AA: 4.5 for text, 3 for what drawings consist of."""
    style = (TEMPLATES / "report.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    base = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", light))
    texts = [("ink", "bg"), ("ink", "paper"), ("soft", "bg"), ("soft", "paper"), ("link", "bg")]
    texts += [(state, f"{state}-bg") for state in ("pass", "fail", "open", "xfail", "skip")]
    texts += [(state, "paper") for state in ("pass", "fail", "open", "xfail", "skip", "c5")]
    texts += [(state, "bg") for state in ("pass", "fail", "open", "xfail", "skip")]
    texts += [(f"h{n}-text", f"h{n}") for n in range(6)]
    texts += [("on-action", name) for name in ("f", "b", "w", "bw")]
    shapes = [(f"c{n}", "paper") for n in range(1, 8)]
    shapes += [(name, "paper") for name in ("f", "b", "w", "bw", "call", "focus")]
    for colours in (base, base | dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", dark))):
        for pairs, least in ((texts, 4.5), (shapes, 3.0)):
            for front, back in pairs:
                found = contrast(colours[front], colours[back])
                assert found >= least, f"{front} on {back}: {found:.2f}"


def contrast(first: str, second: str) -> float:
    """WCAG 2.2: (L1 + 0.05) / (L2 + 0.05) of relative luminances."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(first), luminance(second)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_every_class_of_a_drawing_has_a_style(page: str) -> None:
    style = (TEMPLATES / "report.css").read_text()
    used = {
        name
        for text in re.findall(r"<(?:rect|line|path|circle|text)[^>]* class=\"([^\"]+)\"", page)
        for name in text.split()
    }
    assert {name for name in used if f".{name} " not in style and f".{name}," not in style} == set()


def test_elements_escape_and_scales_clamp() -> None:
    assert svg.element("text", "<&>", class_="a b") == '<text class="a b">&lt;&amp;&gt;</text>'
    assert svg.element("rect", x=1.0, y=0.333333, fill=None) == '<rect x="1" y="0.33"/>'
    scale = svg.PixelScale(1.0, 100.0, 0.0, 10.0, log=True)
    assert (scale(0.01), scale(10.0), scale(1e9)) == (0.0, 5.0, 10.0)
    assert svg.PixelScale(2.0, 2.0, 0.0, 10.0)(2.0) == 5.0


def test_a_small_run_of_every_kind_of_line(tmp_path: Path) -> None:
    run = read(fill(tmp_path / "run"))
    page = report.html(run)
    assert "Failed: 1 of 2 judged cases failed, 1 of 2 planted faults survive." in page
    assert Page(page).open == []


def test_sections_of_a_record_are_read_alone(full: Path) -> None:
    line = next(r for r in read(full).cases if "pipes::" in r.id)
    found = records.sections(full / str(line.record), "action", "call")
    whole = records.read(full / str(line.record))["figures"]["records"]
    assert found["action"] == [{"rank": r["rank"]} | a for r in whole for a in r["actions"]]
    assert len(found["call"]) == sum(len(r["traffic"]) for r in whole) > 0
    (full / "records" / "bad.parquet").write_bytes(b"no")
    with pytest.raises(records.RecordError, match=r"bad\.parquet"):
        records.sections(full / "records" / "bad.parquet", "call")
