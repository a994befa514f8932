"""A site says what its runs say, leads nowhere else, and never takes the place of other files."""

from __future__ import annotations

import html
import json
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

import pytest
import synthetic as made
from commands import here
from synthetic_run import FULL, write_run

from shardproof.report import capability_matrix
from shardproof.report.capability_matrix import CAPABILITIES
from shardproof.runs.run_folder import read
from shardproof.site import data, shown, told
from shardproof.site.command import FIRST_VIEW
from shardproof.site.pages import Site, build
from shardproof.verdicts import VERDICTS

ROOT = Path(__file__).parents[2]
BASELINES = sorted(map(str, (ROOT / "results/baselines").glob("*.json")))
#: Fit into no page by themselves.
HOSTILE = "<script>alert('x')</script>\"'&</td>{{ 7*7 }}\u2028\u202e"


class Parsed(HTMLParser):
    """Ids, links and what a page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.scripts: list[str] = []
        self.heads_without_scope = 0
        self.tables = self.captions = self.headings = 0
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self._inside = tag
        self.ids += [str(given["id"])] if "id" in given else []
        self.tables += tag == "table"
        self.captions += tag == "caption"
        self.headings += tag == "h1"
        self.heads_without_scope += tag == "th" and "scope" not in given
        if tag == "a":
            self.links.append(str(given["href"]))
        if tag in ("script", "link"):
            self.loaded.append(str(given.get("src") or given.get("href")))
        if any(name.startswith("on") or name == "style" for name in given):
            raise AssertionError(f"{tag} has {attributes}, which the policy of the page forbids")

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style") and data.strip():
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def index_of(folder: Path) -> dict[str, Any]:
    text = (folder / "data/index.js").read_text()
    whole: dict[str, Any] = json.loads(text.removeprefix('SITE.take("index",').removesuffix(");\n"))
    return whole


def cases_of(index: dict[str, Any]) -> dict[str, list[str]]:
    """Id -> its letters, one for each run."""
    return {
        head.replace("\t", f"::{system}"): [letters[at] for letters in told]
        for system, _, _, heads, _, told in index["groups"]
        for at, head in enumerate(heads)
    }


def undrawn(line: made.Line) -> made.Line:
    """``line`` without its check of memory: reports draw more of it than these lines hold."""
    return line | {"checks": [one for one in line["checks"] if one["check"] != "memory"]}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("full") / "run", benches=4, scalings=True, **FULL)


@pytest.fixture(scope="module")
def folder(full: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of the baselines and of a run with something of everything."""
    output = tmp_path_factory.mktemp("site") / "site"
    build([*BASELINES, str(full)], output, "Results", ROOT / "docs/findings.md")
    return output


# ---------------------------------------------------------------------------------- what it says


def test_the_matrix_of_a_run_is_that_of_its_report(full: Path, tmp_path: Path) -> None:
    site = build([str(full)], tmp_path / "site", "One run", None)
    run = read(full)
    cells = {
        (c.implementation, c.backend, c.capability): c.text
        for c in capability_matrix.cells(run.cases, run.left_out)
    }
    mine = {
        (c.implementation, c.backend, c.capability): c.text
        for c in site.runs[0].cells
        if c.capability in CAPABILITIES
    }
    assert mine == cells and len(cells) > 100
    page = Parsed((tmp_path / "site/index.html").read_text())
    assert len([link for link in page.links if "capability=" in link]) == len(cells)


def test_every_case_has_its_verdict_and_evidence(folder: Path, full: Path) -> None:
    index = index_of(folder)
    place = next(at for at, one in enumerate(index["runs"]) if one["name"] == "run")
    run, told = read(full), cases_of(index)
    assert len(told) > 1000
    for result in run.cases:
        letter = told[result.id][place]
        assert VERDICTS[int(letter, 36)] == result.verdict
    assert all(told[line.id][place] == "." for line in run.left_out)
    # A page finds the evidence of a case by its place among the ids of its group.
    result = run.cases[0]
    for system, backend, group, heads, _, letters in index["groups"]:
        if (system, backend) == (result.case.implementation, result.case.backend):
            at = [head.replace("\t", f"::{system}") for head in heads].index(result.id)
            before = sum(letter not in "-." for letter in letters[place][:at])
            file = f"run/{group}-{before // index['part']}"
            text = (folder / f"data/{file}.js").read_text()
            rows = json.loads(text.partition(",")[2].removesuffix(");\n"))
            found = rows[before % index["part"]]
            assert text.startswith(f'SITE.take("{file}",')
            assert (found["id"], found["verdict"]) == (result.id, result.verdict)
            assert found["reason"] == result.reason and found["rerun"] == result.rerun
            assert [c[0] for c in found["checks"]] == [c.check for c in result.checks]
            break
    else:
        pytest.fail("no group has the case")


def test_a_baseline_is_read_as_the_run_that_it_kept(tmp_path: Path) -> None:
    """Its capabilities and their states are those of the run, where its figures tell them."""
    path = write_run(tmp_path / "run", cases=120, failing=4)
    saved = tmp_path / "kept.json"
    assert here("compare", str(path), "--save", str(saved)).returncode == 0
    with shown.opened(str(path)) as whole, shown.opened(str(saved)) as kept:
        assert kept.is_kept and not whole.is_kept
        names = ("id", "implementation", "backend", "mesh", "lane", "workload", "optimizer")
        for first, second in zip(
            sorted(whole.run.cases, key=lambda r: r.id),
            sorted(kept.run.cases, key=lambda r: r.id),
            strict=True,
        ):
            for name in names:
                assert getattr(first.case, name) == getattr(second.case, name), first.id
            assert first.verdict == second.verdict
        passed = {r.id for r in whole.run.cases if r.verdict.startswith("pass")}
        both = (
            {
                (c.implementation, c.backend, c.capability): c.text
                for c in capability_matrix.cells(r for r in of.run.cases if r.id in passed)
            }
            for of in (whole, kept)
        )
        assert next(both) == next(both)


def test_a_skipped_call_of_a_baseline_trains_nothing() -> None:
    """It has no figures; other calls of the same baseline tell which check it was for."""
    with shown.opened(str(ROOT / "results/baselines/h200-x1.json")) as kept:
        calls = [r for r in kept.run.cases if r.case.workload.name == "calls"]
        assert {r.verdict for r in calls} >= {"pass", "skip", "xfail"}
        assert {name for r in calls for name in capability_matrix.capabilities(r.case)} == {
            "collectives"
        }


def test_claims_say_what_the_committed_pages_say() -> None:
    """Those are generated from computed figures; the site takes the stated ones, in no time."""
    pages = (ROOT / "docs/claims.md").read_text() + (ROOT / "docs/paper-tables.md").read_text()
    rows = dict(re.findall(r"^\| \[([^\]]+)\]\([^)]*\) \| .*? \| ([^|]*) \|$", pages, re.M))
    found = told.claims()
    assert len(found) == len(rows) > 30
    for claim in found:
        assert html.escape(claim.verdict, quote=False).replace("&gt;", ">") == rows[claim.number]


def test_findings_come_from_a_page_of_markdown(folder: Path, tmp_path: Path) -> None:
    text = (folder / "findings.html").read_text()
    assert "Shape inference changes running statistics" in text
    assert "pipelining_inference_running_stats" in text
    (tmp_path / "none.md").write_text("no table\n")
    for name in ("none.md", "missing.md"):
        done = here(
            *("site", BASELINES[0], "--findings", str(tmp_path / name)),
            *("--output", str(tmp_path / "site")),
        )
        assert done.returncode == 2 and name in done.stderr
        assert not (tmp_path / "site").exists()


def test_scaling_and_faults_are_shown(folder: Path) -> None:
    scaling = (folder / "scaling.html").read_text()
    assert "modelled efficiency" in scaling and 'role="img"' in scaling
    assert "Scaling efficiency of run" in scaling
    faults = (folder / "faults.html").read_text()
    assert "342 of 342 killed" in faults and "772 of 772 killed" in faults
    assert faults.index("survives") < faults.index("killed</span>")


# -------------------------------------------------------------------------------------- the pages


def test_every_link_leads_to_something_in_the_site(folder: Path) -> None:
    pages = {
        p.relative_to(folder).as_posix(): Parsed(p.read_text()) for p in folder.rglob("*.html")
    }
    known = cases_of(index_of(folder))
    systems = {group[0] for group in index_of(folder)["groups"]}
    checked = 0
    for name, page in pages.items():
        assert len(page.ids) == len(set(page.ids)), name
        for link in (*page.links, *page.loaded):
            if link == "data:,":
                continue
            assert not re.match(r"[a-z]+:|/", link), f"{name} leads out of the site: {link}"
            path, _, fragment = link.partition("#")
            target = os.path.normpath(Path(name).parent / path) if path else name
            assert (folder / target).is_file(), f"{name}: {link}"
            asked = parse_qs(fragment)
            if target == "case.html" and path and fragment:
                assert asked["id"][0] in known, link
            elif target == "cases.html" and "system" in asked:
                assert asked["system"][0] in systems, link
            elif target in pages and fragment and "=" not in fragment:
                assert unquote(fragment) in map(unquote, pages[target].ids), f"{name}: {link}"
            checked += 1
    assert checked > 3000


def test_pages_are_accessible_and_load_nothing_else(folder: Path) -> None:
    for path in folder.rglob("*.html"):
        text = path.read_text()
        page = Parsed(text)
        assert page.headings == 1 and page.heads_without_scope == 0, path
        assert page.tables == page.captions, path
        assert page.scripts == [], path
        assert "default-src 'none'" in text and 'lang="en"' in text
        assert 'role="search"' in text and "Skip to the content" in text


def test_the_same_runs_give_the_same_bytes(full: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        build([str(full), BASELINES[0]], tmp_path / name, "Results", None)
    files = [
        {p.relative_to(f).as_posix(): p.read_bytes() for p in f.rglob("*") if p.is_file()}
        for f in (tmp_path / "one", tmp_path / "two")
    ]
    assert files[0] == files[1]


def test_what_a_run_holds_is_no_markup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDPROOF_SECRET", "token-of-somebody")
    lines = made.results(4)
    lines[0] |= {"verdict": "fail", "reason": f"equivalence: {HOSTILE}", "rerun": HOSTILE}
    lines[0]["checks"][0]["message"] = HOSTILE
    lines = list(map(undrawn, lines))
    name = f"odd{HOSTILE}".replace("/", "-")
    lines[1]["id"] = lines[1]["case"]["id"] = f"{name}::reference/zero1::in_memory::x"
    machine = made.MACHINE | {"cpu": HOSTILE}
    lines.append(made.kill(f"ddp_{HOSTILE}"))
    path = made.write(tmp_path / "run", lines, machine=machine, torch=HOSTILE)
    build([str(path)], tmp_path / "site", HOSTILE, None)
    for page in (tmp_path / "site").rglob("*"):
        if page.is_file():
            text = page.read_text()
            assert "token-of-somebody" not in text
            if page.suffix == ".html":
                assert "alert('x')" not in text and "<script>" not in text
                assert Parsed(text).scripts == []


# ------------------------------------------------------------------------------------- the folder


def outcome(*words: str) -> tuple[int, str]:
    done = here("site", *words)
    return done.returncode, done.stderr


def test_bad_input_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    output = tmp_path / "site"
    edited = made.write(tmp_path / "edited", made.results(3))
    lines = (edited / "cases.jsonl").read_text()
    (edited / "cases.jsonl").write_text(lines.replace('"pass"', '"fail"', 1))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "empty").mkdir()
    for name, says in (
        (str(tmp_path / "nothing"), "no such run"),
        (str(edited), "was changed"),
        (str(tmp_path / "list.json"), "neither a run folder nor a baseline"),
        (str(tmp_path / "empty"), "no such run"),
    ):
        code, said = outcome(BASELINES[0], name, "--output", str(output))
        assert code == 2 and says in said, said
        assert sorted(p.name for p in tmp_path.iterdir()) == ["edited", "empty", "list.json"]


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    output = tmp_path / "mine"
    output.mkdir()
    (output / "notes.txt").write_text("mine")
    code, said = outcome(BASELINES[1], "--output", str(output))
    assert code == 2 and "notes.txt" in said and "name a new folder" in said
    assert [path.name for path in output.iterdir()] == ["notes.txt"]
    (tmp_path / "file").write_text("mine")
    code, said = outcome(BASELINES[1], "--output", str(tmp_path / "file"))
    assert code == 2 and "is a file" in said and (tmp_path / "file").read_text() == "mine"


def test_an_earlier_site_is_replaced_and_an_added_file_is_not(tmp_path: Path) -> None:
    output = tmp_path / "site"
    assert outcome(*BASELINES[:2], "--output", str(output))[0] == 0
    stale = [path.name for path in (output / "runs").iterdir()]
    assert len(stale) == 2
    assert outcome(BASELINES[1], "--output", str(output))[0] == 0
    assert len(list((output / "runs").iterdir())) == 1
    (output / "data/mine.js").write_text("")
    code, said = outcome(BASELINES[1], "--output", str(output))
    assert code == 2 and "data/mine.js" in said and (output / "data/mine.js").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_a_site_that_cannot_be_finished_leaves_the_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "site"
    build(BASELINES[1:2], output, "First", None)
    before = {p: p.read_bytes() for p in output.rglob("*") if p.is_file()}

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Site, "_assets", full_disk)
    with pytest.raises(OSError, match="No space"):
        build(BASELINES[:2], output, "Second", None)
    assert {p: p.read_bytes() for p in output.rglob("*") if p.is_file()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_a_folder_that_cannot_be_renamed_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A volume of a container is one."""
    output, rename = tmp_path / "site", Path.rename
    build(BASELINES[:2], output, "First", None)
    here_it_was = output.stat().st_ino

    def busy(path: Path, target: Path) -> Path:
        if path == output:
            raise OSError(16, "Device or resource busy", str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", busy)
    build(BASELINES[1:2], output, "Second", None)
    assert output.stat().st_ino == here_it_was
    assert [path.name for path in (output / "runs").iterdir()] == ["epyc-2-nodes-100mbit.html"]
    assert "Second" in (output / "index.html").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_a_digit_stands_for_each_capability_and_verdict() -> None:
    assert max(len(CAPABILITIES), len(VERDICTS)) <= len(data.DIGITS)


def test_a_bundle_is_shown_as_its_run(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", cases=24)
    packed = tmp_path / "run.tar.gz"
    assert here("bundle", str(path), "--output", str(packed)).returncode == 0
    done = here("site", str(packed), "--output", str(tmp_path / "site"))
    assert done.returncode == 0 and "1 run, 24 cases" in done.stdout, done.stderr


def test_runs_with_one_name_have_pages_of_their_own(tmp_path: Path) -> None:
    lines = list(map(undrawn, made.results(2)))
    paths = [made.write(tmp_path / f"{n}/Run", lines) for n in range(2)]
    build(list(map(str, paths)), tmp_path / "site", "Two", None)
    names = sorted(path.name for path in (tmp_path / "site/runs").iterdir())
    assert names == ["run-2.html", "run.html"]
    assert (tmp_path / "site/compare/run..run-2.html").is_file()


def test_a_series_is_a_site_of_its_runs(tmp_path: Path) -> None:
    from shardproof.site import series

    series.add(tmp_path / "series", BASELINES[:2])
    done = here("site", str(tmp_path / "series"), "--output", str(tmp_path / "site"))
    assert done.returncode == 0 and "2 runs" in done.stdout, done.stderr


# ------------------------------------------------------------------------------------- how large


@pytest.mark.slow
def test_the_full_matrix_is_built_in_20_seconds(tmp_path: Path) -> None:
    """11,000 cases with evidence as real ones leave it, and 770 faults: CPU seconds, because other
    tests run meanwhile.
    """
    path = write_run(tmp_path / "run", cases=11_000, failing=60, kills=770)
    began = time.process_time()
    site = build([str(path)], tmp_path / "site", "Full", None)
    took = time.process_time() - began
    first = sum(site.folder.sizes[name] for name in FIRST_VIEW)
    print(f"{took:.1f} s of CPU, first view {first:,} bytes, {len(site.folder.sizes)} files")
    assert site.index.count == 11_000
    assert took < 20
    assert first < 300_000


def test_the_first_view_grows_with_systems_and_not_with_cases(tmp_path: Path) -> None:
    def first(cases: int) -> int:
        path = write_run(tmp_path / f"run{cases}", cases=cases)
        site = build([str(path)], tmp_path / f"site{cases}", "Some", None)
        return sum(site.folder.sizes[name] for name in FIRST_VIEW)

    few, many = first(200), first(800)
    assert many < 1.05 * few < 300_000
