"""Badges say in words what their colour says, are read by everybody, and load nothing."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from made_case import made_case
from typer.testing import CliRunner

from shardproof.case import WorkloadSpec
from shardproof.checks.results import CaseResult
from shardproof.commands.main import app
from shardproof.contract import OptimizerSpec
from shardproof.errors import SelectionError
from shardproof.init.drawing import (
    COLOURS,
    INDEX,
    OVERALL,
    badge,
    file_names,
    of_cell,
    overall,
    width,
    write,
)
from shardproof.report.capability_matrix import CAPABILITIES, STATES, CapabilityCell
from shardproof.runs.run_folder import Run, RunFolder, read

SVG = "{http://www.w3.org/2000/svg}"


CASE = made_case(
    "reference/zero3",
    {"shard": 2},
    backend="gloo",
    workload=WorkloadSpec("charnames_gpt", micro_batches=1),
    checks=("equivalence",),
    expect={"relation": "reload"},
)


def line(verdict: str = "pass", name: str = "c", **fields: Any) -> CaseResult:
    return CaseResult(name, replace(CASE, id=name, **fields), verdict, seconds=0.1)


def run(path: Path, *lines: CaseResult) -> Run:
    with RunFolder(path, ["test"]) as folder:
        for told in lines:
            folder.add(told)
    return read(path)


def words(svg: str) -> list[str]:
    return [str(text.text) for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("verdicts", "text", "state"),
    [
        (["pass"] * 12, "pass 12/12", "pass"),
        (["pass", "fail"], "fail 1", "fail"),
        (["skip"], "skip", "skip"),
        (["pass (working precision only)"], "working precision only 1/1", "working precision only"),
        (["pass", "undecidable"], "open 1", "open"),
        (["xfail", "pass"], "xfail 1", "xfail"),
        ([], "not run", "not run"),
    ],
)
def test_words_and_colour_say_the_same(
    verdicts: list[str], text: str, state: str, tmp_path: Path
) -> None:
    found = run(tmp_path / "run", *(line(v, name=str(n)) for n, v in enumerate(verdicts)))
    write(found, tmp_path / "badges")
    names = ["overall.svg"] + ["reference-zero3_gloo_checkpoint.svg"] * bool(verdicts)
    for name in names:
        svg = (tmp_path / "badges" / name).read_text()
        assert words(svg)[1] == text
        for other, (fill, _) in COLOURS.items():
            assert (fill in svg) == (other == state)


def test_every_cell_has_a_badge_and_a_line_in_the_index(tmp_path: Path) -> None:
    lines = [
        line(name="a"),
        line(name="b", backend="in_memory", optimizer=OptimizerSpec(clip_norm=1)),
        line("fail", name="c", implementation="my.module:Class"),
    ]
    folder = tmp_path / "badges"
    names = write(run(tmp_path / "run", *lines), folder)
    assert names == sorted(path.name for path in folder.glob("*.svg"))
    assert set(names) == {
        "overall.svg",
        *(f"reference-zero3_gloo_{name}.svg" for name in ("numbers", "checkpoint")),
        *(f"reference-zero3_in-memory_{n}.svg" for n in ("numbers", "checkpoint", "clipping")),
        *(f"my.module-Class_gloo_{name}.svg" for name in ("numbers", "checkpoint")),
    }
    index = (folder / INDEX).read_text()
    images = dict(re.findall(r"!\[(.*?)\]\((\S+)\)", index))
    assert sorted(images.values()) == names
    for about, name in images.items():
        assert ElementTree.fromstring((folder / name).read_text()).get("aria-label") == about
    assert index.startswith("# Badges of run run\n")


def test_badges_of_before_go_and_other_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "badges"
    first = write(run(tmp_path / "one", line()), folder)
    (folder / "logo.svg").write_text('<svg xmlns="http://www.w3.org/2000/svg"/>')
    (folder / "README.md").write_text("mine")
    second = write(run(tmp_path / "two", line("fail", backend="in_memory")), folder)
    assert set(first) & set(second) == {OVERALL}
    assert {p.name for p in folder.iterdir()} == {*second, INDEX, "logo.svg", "README.md"}
    assert words((folder / OVERALL).read_text()) == ["shardproof", "fail 1"]


def test_comparisons_that_were_left_out_have_no_badge(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "run", ["test"]) as folder:
        folder.add(line())
        folder.leave_out_other({"id": "bench::a"}, "no room")
    write(read(tmp_path / "run"), tmp_path / "badges")
    assert words((tmp_path / "badges" / OVERALL).read_text()) == ["shardproof", "pass 1/1"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SelectionError, match="badges cannot be written"):
        write(run(tmp_path / "run", line()), tmp_path / "file")


def test_a_badge_is_labelled_and_loads_nothing() -> None:
    cell = CapabilityCell("reference/zero3", "gloo", "memory")
    cell.add(line(), "pass")
    svg = of_cell(cell)
    top = ElementTree.fromstring(svg)
    about = "reference/zero3 on gloo, memory: 1 pass; ranks: 2"
    assert top.get("role") == "img"
    assert top.get("aria-label") == top.findtext(f"{SVG}title") == about
    assert re.findall(r"https?:[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
    for word in ("href", "url(", "@import", "<script", "<style", "<image", "on" + "load"):
        assert word not in svg
    left, right = top.iter(f"{SVG}text")
    assert (left.text, right.text) == ("reference/zero3 gloo memory", "pass 1/1")


def test_text_fits_its_box() -> None:
    """The parts add up to the whole, and each text keeps a margin on both sides."""
    for label in ("i", "WWWW", "reference/zero3 in_memory several-axes", "名"):
        top = ElementTree.fromstring(badge(label, "pass 12/12", "pass", "x"))
        whole = int(top.get("width", 0))
        assert top.get("viewBox") == f"0 0 {whole} 20"
        texts = list(top.iter(f"{SVG}text"))
        begins = [int(text.get("x", 0)) for text in texts]
        ends = [b + int(t.get("textLength", 0)) for b, t in zip(begins, texts, strict=True)]
        boundary = begins[1] - 6
        assert 0 < begins[0] < ends[0] < boundary < begins[1] < ends[1] < whole
        for path, end in zip(top.iter(f"{SVG}path"), (boundary, whole), strict=True):
            assert str(path.get("d")).startswith(f"M{boundary} 0")
            assert end - boundary - 3 in map(int, re.findall(r"h(\d+)", str(path.get("d")))) or (
                f"h{boundary - 3}z" in str(path.get("d"))
            )


def test_widths_are_those_of_the_letters() -> None:
    assert width("") == 0
    assert width("iiii") < width("nnnn") < width("WWWW")
    assert width("0" * 100) == 700  # 636 thousandths of 11 pixels each, rounded up
    words = {*"".join(CAPABILITIES), *"".join(STATES), *"reference/zero3 in_memory 0123456789"}
    for letter in words:
        assert width(letter * 1000) < 11_000, f"{letter!r} stands in no table"
    assert width("名") == 11


def test_names_of_systems_cannot_break_out() -> None:
    nasty = '"><script>alert(1)</script>&\x00\n]('
    cell = CapabilityCell(nasty, "gloo", "memory")
    top = ElementTree.fromstring(of_cell(cell))
    assert {element.tag.removeprefix(SVG) for element in top.iter()} == {
        *("svg", "title", "path", "g", "text")
    }
    [name] = file_names([cell])
    assert re.fullmatch(r"[A-Za-z0-9._-]+\.svg", name)


def test_systems_with_similar_names_do_not_share_a_file() -> None:
    found = [
        CapabilityCell(name, "gloo", "memory") for name in ("a/b_c", "a-b/c", "a:b-c", "a/b/c")
    ]
    assert list(file_names(found).values()) == found


def _light(colour: str) -> list[float]:
    """Linear light of red, green and blue."""
    shares = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]


def _luminance(light: list[float]) -> float:
    return 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2]


def test_text_has_the_contrast_of_wcag_aa() -> None:
    for fill, ink in [*COLOURS.values(), ("#24292f", "#ffffff")]:
        dark, bright = sorted(_luminance(_light(colour)) for colour in (fill, ink))
        assert (bright + 0.05) / (dark + 0.05) >= 4.5, (fill, ink)


#: Machado, Oliveira and Fernandes (2009), table 1, severity 1: what is seen of linear light.
SEEN = {
    "all": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


def _lab(light: list[float]) -> tuple[float, float, float]:
    """CIE L*a*b* under D65 of linear sRGB."""
    red, green, blue = light

    def root(share: float) -> float:
        return share ** (1 / 3) if share > 0.008856 else 7.787 * share + 16 / 116

    x = root((0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047)
    y = root(_luminance(light))
    z = root((0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("eyes", SEEN)
def test_states_are_told_apart_under_every_colour_blindness(eyes: str) -> None:
    def seen(colour: str) -> tuple[float, float, float]:
        light = _light(colour)
        mixed = (sum(a * b for a, b in zip(row, light, strict=True)) for row in SEEN[eyes])
        return _lab([min(1.0, max(0.0, part)) for part in mixed])

    assert set(COLOURS) == set(STATES)
    for one, other in itertools.combinations(COLOURS, 2):
        apart = math.dist(seen(COLOURS[one][0]), seen(COLOURS[other][0]))
        assert apart >= 20, f"{one} and {other}: {apart:.0f}"


def test_nothing_that_was_not_judged_is_green() -> None:
    assert overall([line("skip")]).state == "skip"
    green = COLOURS["pass"][0]
    for cell in (
        overall([]),
        overall([line("skip")]),
        overall([], [line()]),
        CapabilityCell("a", "b", "c"),
    ):
        assert green not in of_cell(cell)


def test_nothing_is_drawn_of_a_run_that_was_changed(tmp_path: Path) -> None:
    run(tmp_path / "run", line(name="a"))
    told = (tmp_path / "run" / "cases.jsonl").read_text()
    (tmp_path / "run" / "cases.jsonl").write_text(told.replace('"pass"', '"fail"'))
    page = tmp_path / "page.md"
    page.write_text("<!-- results:begin -->\nold\n<!-- results:end -->\n")
    for arguments in (["badges", "RUN", "--output", "OUT"], ["report", "RUN", "--into", "PAGE"]):
        places = {"RUN": "run", "OUT": "badges", "PAGE": "page.md"}
        command = [str(tmp_path / places[a]) if a in places else a for a in arguments]
        done = CliRunner().invoke(app, command)
        assert isinstance(done.exception, SelectionError)
        assert "line 1 (a) was changed" in str(done.exception)
    assert not (tmp_path / "badges").exists() and "old" in page.read_text()


def test_a_run_that_was_killed_has_no_badges(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two planned cases passed: a green badge would count the other for nothing."""
    monkeypatch.chdir(tmp_path)  # long paths are cut
    path, bundle, drawn = Path("run"), Path("bundle.tar.gz"), Path("badges")
    with RunFolder(path, ["test"]) as folder:
        folder.plan([line(name="a").case, line(name="b").case])
        folder.add(line(name="a"))
    code, out, err = command("bundle", str(path), "--output", str(bundle))
    assert code == 0, err
    assert out.splitlines()[-1].startswith("1 planned without a result: the run ended before")
    for name in (path, bundle):
        code, _, err = command("badges", str(name), "--output", str(drawn))
        assert code == 2 and "has no badges" in err and "1 planned without a result" in err
        assert f"has no badges ({name})" in err and "run --resume" in err
    assert not drawn.exists()
    with RunFolder(path, ["test"]) as folder:
        folder.add(line(name="b"))
    code, out, err = command("badges", str(path), "--output", str(drawn))
    assert code == 0 and (drawn / OVERALL).exists(), err
