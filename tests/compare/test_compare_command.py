"""The command ``compare``: what it writes, its exit codes, and the table that is committed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import synthetic as made
from commands import python

from shardproof.compare import baseline, formats, hardware
from shardproof.compare.compare import compare
from shardproof.report import insert
from shardproof.runs import run_folder
from shardproof.runs.bundle import packing
from shardproof.scenarios.load import find
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed

ROOT = Path(__file__).parents[2]
BASELINES = ROOT / "results" / "baselines"


def test_the_baseline_of_the_page_holds_todays_quick_cases() -> None:
    """A gate against it would miss whatever is no longer quick."""
    page = (ROOT / "docs/compare-and-gate.md").read_text()
    (named,) = set(re.findall(r"--against (results/baselines/\S+)", page))
    cases = [case for file in find() for case in expand(file, installed())]
    quick = {case.id for case in cases if case.tier == "quick"}
    kept = set(baseline.load(str(ROOT / named)).cases)
    assert kept and not kept - quick, sorted(kept - quick)


def test_the_command_informs_and_only_bad_input_fails(tmp_path: Path, command: Any) -> None:
    lines = made.results(3)
    old = str(made.write(tmp_path / "old", lines))
    worse = made.changed(lines, 0, made.figure("traffic", "bytes_sent", "77777"))
    new = str(made.write(tmp_path / "new", worse))
    code, out, _ = command("compare", old, new)
    assert code == 0 and "77,777" in out
    far = str(made.write(tmp_path / "far", lines, torch="2.14.0"))
    for more in ([], ["--format", "json"], ["--by", "hardware"]):
        code, out, err = command("compare", old, far, *more)
        assert code == 3
        assert "nothing is comparable: torch 2.13.0+cpu, now 2.14.0 (3 results)" in out + err
    lines_of_others = [made.result(made.case(9), 9)]
    other = str(made.write(tmp_path / "other", lines_of_others))
    code, out, _ = command("compare", old, other)
    assert code == 3 and "the runs have no result in common" in out
    for arguments in ([old], [old, "nothing"], [old, new, "--into", "x.md", "--format", "json"]):
        code, _, err = command("compare", *arguments)
        assert code == 2 and len(err.splitlines()) == 1
    saved = str(tmp_path / "base.json")
    assert command("compare", old, "--save", saved)[0] == 0
    assert command("compare", saved, old, "--only-changed")[0] == 0
    code, _, err = command("compare", old, "--save", saved, "--by", "backend")
    assert code == 2 and "--by" in err


def test_a_baseline_is_replaced_only_by_force(tmp_path: Path, command: Any) -> None:
    old = str(made.write(tmp_path / "old", made.results(3)))
    new = str(made.write(tmp_path / "new", made.results(2)))
    saved = tmp_path / "base.json"
    assert command("compare", old, "--save", str(saved))[0] == 0
    before = saved.read_bytes()
    code, _, err = command("compare", new, "--save", str(saved))
    assert code == 2 and "the file exists" in err and "--force" in err
    assert saved.read_bytes() == before
    assert command("compare", new, "--save", str(saved), "--force")[0] == 0
    assert saved.read_bytes() != before
    code, _, err = command("compare", old, new, "--force")
    assert code == 2 and "--save" in err


def test_a_bundle_may_stand_for_its_run(tmp_path: Path) -> None:
    with run_folder.RunFolder(tmp_path / "run", ["shardproof"]) as folder:
        for line in made.results(2):
            folder.add(line)
        folder.close(0)
    told = baseline.load(str(tmp_path / "run"))
    output = tmp_path / "run.tar.gz"
    packing.pack(tmp_path / "run", output)
    assert compare(told, baseline.load(str(output))).unchanged


def test_the_committed_table_is_what_the_command_makes(tmp_path: Path) -> None:
    """``shardproof compare results/baselines/*.json --by hardware --into results/README.md``."""
    files = sorted(BASELINES.glob("*.json"))
    assert files, "commit a baseline: docs/compare-and-gate.md"
    reference, *others = (baseline.load(str(path)) for path in files)
    report = hardware.report(reference, [compare(reference, other) for other in others])
    copy = tmp_path / "README.md"
    committed = (ROOT / "results" / "README.md").read_text(encoding="utf-8")
    copy.write_text(committed, encoding="utf-8")
    insert(formats.markdown(report), copy, formats.BEGIN, formats.END)
    assert copy.read_text(encoding="utf-8") == committed
    assert all(path.stat().st_size < 500_000 for path in files)


def test_what_has_no_case_in_common_with_the_first_is_compared_with_another(
    tmp_path: Path,
) -> None:
    """As GPUs, whose cases are on other backends than those of CPUs."""

    def on(backend: str, line: made.Line) -> made.Line:
        changed = json.loads(json.dumps(line).replace("::in_memory::", f"::{backend}::"))
        changed["case"]["backend"] = backend
        return changed  # type: ignore[no-any-return]

    lines = made.results(3)
    other = [on("nccl", line) for line in lines]
    assert {line["id"] for line in lines}.isdisjoint(line["id"] for line in other)
    cpu = made.snapshot(tmp_path / "cpu", lines)
    gpus = [made.snapshot(tmp_path / name, other) for name in ("h100", "h200")]
    report = hardware.report(cpu, [compare(cpu, gpu) for gpu in gpus])
    told = [row[-1] for row in report.tables[0].rows]
    assert told[:2] == ["reference", "no case in common: nccl here, in_memory there"]
    assert str(told[2]).startswith("all ") and str(told[2]).endswith(" equal (h100)")


def test_two_runs_are_compared_without_the_slow_imports(tmp_path: Path) -> None:
    """Two runs of 2,000 cases in 3 s are the aim; what would cost more is asserted, not seconds."""
    lines = made.results(200)
    old = made.write(tmp_path / "old", lines)
    new = made.write(
        tmp_path / "new", made.changed(lines, 9, made.figure("traffic", "bytes_sent", "7"))
    )
    program = (
        "import sys; sys.argv = ['shardproof', 'compare', *sys.argv[1:]]\n"
        "from shardproof.commands.main import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    slow = {'torch', 'scipy', 'numpy', 'pandas', 'pyarrow'} & set(sys.modules)\n"
        "    print('slow imports:', sorted(slow))\n"
    )
    done = python("-c", program, str(old), str(new))
    assert done.returncode == 0, done.stderr
    assert "200 results compared" in done.stdout and "slow imports: []" in done.stdout
