"""The command line as people meet it: exit codes, one line a fault, names that are never cut."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import here, shardproof

from shardproof.runs.run_folder import read
from shardproof.table import number as numbered

ROOT = Path(__file__).parents[2]
CASE = "ddp-gpt::reference/ddp+small_buckets::in_memory::replicate2::sgd::noclip::fp64::quick"


def test_help_teaches_by_examples_and_needs_no_torch() -> None:
    for command in (
        *((), ("run",), ("mutants",), ("list",), ("check-scenario",), ("report",)),
        *(("compare",), ("gate",)),
    ):
        done = here(*command, "--help")
        assert done.returncode == 0
        assert "shardproof " in done.stdout
        assert done.stderr == ""
    code = "import sys; sys.argv = ['x', 'schema']; from shardproof.commands.main import app\n"
    code += "try:\n app()\nexcept SystemExit: pass\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["title"] == "Shardproof scenario"


def test_version() -> None:
    assert shardproof("--version").stdout.startswith("shardproof 0.")


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("impls", "reference/ddp"),
        ("backends", "in_memory"),
        ("scenarios", "ddp-gpt"),
        ("mutants", "mutants/ddp_last_backward_only"),
        ("checks", "equivalence"),
        ("traits", "conditional_by_micro_batch"),
        ("cases", CASE),
    ],
)
def test_piped_lists_print_one_full_name_a_line(what: str, name: str) -> None:
    done = here("list", what)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert name in lines
    assert all(" " not in line for line in lines)
    assert len(set(lines)) == len(lines)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "ddp-gtp"), "unknown scenario (ddp-gtp) - did you mean ddp-gpt?"),
        (("run", "absent.yaml"), "absent.yaml: no such file"),
        (("run", "ddp-gpt", "--impl", "reference/dpd"), "did you mean reference/ddp?"),
        (
            ("run", "ddp-gpt", "--impl", "mutants/nothing"),
            "unknown implementation (mutants/nothing)",
        ),
        (
            ("run", "ddp-gpt", "--impl", "absent:Mine"),
            "(absent:Mine) - there is no module 'absent' here or installed",
        ),
        (("run", "ddp-gpt", "--impl", "zzz*"), "--impl matches no implementation (zzz*)"),
        (("run", "ddp-gpt", "--backend", "glo"), "did you mean gloo?"),
        (("run", "--world", "99"), "--world matches nothing (99) - valid: 1, 2, 3, 4, 5"),
        (("run", "ddp-gpt", "-k", "nosuchword"), "-k matches nothing (nosuchword)"),
        (
            ("run", "ddp-gpt", "--impl", "mutants/backend_offset_is_ignored", "-k", "nosuchword"),
            "-k matches nothing (nosuchword) - `shardproof run --dry-run` with the same --impl",
        ),
        (("run", "ddp-gpt", "-k", "a and"), "column 6 (a and)"),
        (("run", f"{CASE}".replace("sgd", "adam")), "no such case"),
        (("run", "--campaign", "3", "ddp-gpt"), "leave out SCENARIO"),
        (("run", "ddp-gpt", "--results", "README.md"), "results cannot be written"),
        (("run", "ddp-gpt", "--world", "0"), "--world matches nothing (0)"),
        (("mutants", "--impl", "no_such_fault"), "--impl matches no fault (no_such_fault)"),
        (("list", "impls", "-k", "x"), "filters apply to `list cases`"),
        (("report", "no-such-run"), "no such run (no-such-run)"),
        (
            ("run", "ddp-gpt", "--results", "docs"),
            "docs: holds files, but no run.json - ",
        ),
        (("mutants", "--results", "docs"), "docs: holds files, but no run.json - "),
        (("run", "ddp-gpt", "--results", ""), "'--results': the name is empty"),
        (("run", "ddp-gpt", "--junit", "docs"), "--junit: Is a directory (docs) - name a file"),
        (("run", "ddp-gpt", "--junit", ""), "--junit: Is a directory (.) - name a file"),
        (("run", "ddp-gpt", "--junit", "README.md/x"), "--junit: Not a directory (README.md/x)"),
        (("run", "ddp-gpt", "--junit", "x" * 300), "--junit: File name too long"),
        (("run", "ddp-gpt", "--junit", "/proc/x"), "--junit: "),
        (("report", "--into", "docs"), "--into: Is a directory (docs)"),
        (("compare", "a", "b", "--save", "docs"), "--save: Is a directory (docs)"),
        (("compare", "a", "b", "--into", "docs"), "--into: Is a directory (docs)"),
        (("gate", "a", "--against", "b", "--summary", "docs"), "--summary: Is a directory (docs)"),
        (("gate", "a", "--against", "b", "--junit", "docs"), "--junit: Is a directory (docs)"),
    ],
)
def test_bad_selections_end_with_code_2_and_one_line(arguments: tuple[str, ...], says: str) -> None:
    done = here(*arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_check_scenario_tells_every_fault_of_every_file(tmp_path: Path) -> None:
    good = ROOT / "scenarios" / "conformance" / "data" / "plain.yaml"
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        good.read_text().replace("- {label: cnn", "- {lable: cnn").replace("adamw", "adm")
    )
    (tmp_path / "copy.yaml").write_text(good.read_text())
    files = [str(good), str(bad), str(tmp_path / "copy.yaml"), str(tmp_path / "absent.yaml")]
    done = here("check-scenario", *files)
    assert done.returncode == 2
    assert "plain.yaml: plain, " in done.stdout
    lines = done.stderr.splitlines()
    assert any("unknown key matrix.workload[2].lable" in line for line in lines)
    assert any("did you mean adamw?" in line for line in lines)
    assert any("absent.yaml: no such file" in line for line in lines)
    assert any("already used" in line for line in lines)
    assert all(line.count(" - ") >= 1 for line in lines)
    assert here("check-scenario", str(good)).returncode == 0


def test_check_scenario_asks_systems_for_their_options(tmp_path: Path) -> None:
    """As ``run`` does, and each in the line that gives them; expected refusals are none."""
    orders = "[[F0@0, BW0@0, F1@0, BW1@0], [F0@1, F1@1, BW0@1, BW1@1]]"
    lines = [
        "name: asked",
        "about: options that systems take and refuse",
        "sees: [options]",
        "workload: {name: charnames_gpt, micro_batches: 2}",
        "matrix:",
        "  implementation:",
        "    - {name: reference/ddp, label: a, options: {bucket_bites: 3}}",
        "    - {name: reference/ddp, label: b, options: {bucket_bytes: 3}}",
        "    - name: reference/pipeline",
        "      label: c",
        f"      options: {{schedule: {{orders: {orders}}}}}",
        "  backend: in_memory",
        "  mesh: [{replicate: 2}, {pipe: 2}]",
        "  optimizer: sgd",
        "exclude:",
        "  - {implementation: reference/ddp, mesh: pipe2, reason: has no such axis}",
        "  - {implementation: reference/pipeline, mesh: replicate2, reason: the same}",
        "checks: [equivalence]",
    ]
    (tmp_path / "asked.yaml").write_text("\n".join(lines) + "\n")
    done = here("check-scenario", "asked.yaml", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    bucket, schedule = done.stderr.splitlines()
    assert bucket.startswith("asked.yaml:7: unknown option 'bucket_bites'; did you mean")
    assert schedule.startswith("asked.yaml:9: option 'schedule.orders': deadlock: rank 0 waits")


def test_dry_run_prints_ids_and_writes_nothing(tmp_path: Path) -> None:
    done = here("run", "--dry-run", "--budget", "0.2", cwd=tmp_path)
    assert done.returncode == 0
    ids = done.stdout.splitlines()
    assert all(len(name.split("::")) == 8 for name in ids)
    assert "left out by the budget" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_whole_id_selects_one_case_in_any_tier() -> None:
    for arguments in ((CASE,), ("-k", CASE), ("ddp-gpt", "--tier", "full", "-k", CASE)):
        assert here("run", "--dry-run", *arguments).stdout.splitlines() == [CASE]
    full = CASE.replace("sgd::noclip", "adamw::noclip").replace("quick", "full")
    assert here("run", "--dry-run", "ddp-gpt", "-k", full).stdout.splitlines() == [full]
    other = CASE.replace("ddp-gpt", "ddp-gpt[seed5]")
    other = other.replace("reference/ddp+small_buckets", "shardproof.impls.plain:Plain")
    assert here("run", "--dry-run", other).stdout.splitlines() == [other]


def test_systems_without_scenario_take_every_cell() -> None:
    done = here("run", "ddp-gpt", "--impl", "shardproof.impls.plain:Plain", "--dry-run")
    ids = done.stdout.splitlines()
    assert ids
    assert all(name.split("::")[1] == "shardproof.impls.plain:Plain" for name in ids)


OWN = ("--impl", "adopted:GreedyZero1", "--dry-run")
SUPPORT = ROOT / "tests" / "support"


def test_a_class_of_ones_own_gets_the_cells_whose_axes_it_declares() -> None:
    done = here("run", *OWN, paths=[SUPPORT])
    assert done.returncode == 0, done.stderr
    axes = {name.split("::")[3].rstrip("0123456789") for name in done.stdout.splitlines()}
    assert axes == {"shard"}
    told = re.search(r"adopted:GreedyZero1 declares the axes shard: (\d+) of (\d+) ", done.stderr)
    assert told and int(told[1]) < int(told[2])
    # Asked for by name, a scenario runs as it is: what does not fit is a skip with its reason.
    assert "replicate2" in here("run", "ddp-gpt", *OWN, paths=[SUPPORT]).stdout
    none = here("run", *OWN, "-k", "replicate2", paths=[SUPPORT])
    assert none.returncode == 2 and "that the class declares: shard" in none.stderr


def test_a_class_of_ones_own_takes_the_options_of_systems_like_it() -> None:
    done = here("run", *OWN, "--like", "reference/zero1*", paths=[SUPPORT])
    ids = done.stdout.splitlines()
    assert ids, done.stderr
    assert all("::adopted:GreedyZero1+reference.zero1" in name for name in ids)
    [one] = [name for name in ids if name.startswith("zero-gpt[two]")]
    assert "+reference.zero1.small_buckets::" in one
    again = here("run", one, "--dry-run", paths=[SUPPORT])
    assert again.stdout.splitlines() == [one], "the printed rerun command has the id alone"
    for arguments, says in (
        (("--like", "reference/zero9*"), "--like matches nothing"),
        (("--like", "reference/zero1*", "--impl", "reference/zero1"), "of your own"),
        (("--like", "reference/zero1*", "--resume"), "--like is only for a new run"),
        (("--like", "reference/zero1*", "--campaign", "3"), "leave out --like"),
    ):
        done = here("run", *OWN[:2], "--dry-run", *arguments, paths=[SUPPORT])
        assert done.returncode == 2 and says in done.stderr, done.stderr
    assert here("run", "--like", "reference/zero1*", "--dry-run").returncode == 2


def test_a_run_leaves_evidence_and_can_be_shown_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    selection = "replicate2 and small_buckets and fp64"
    done = here("run", "ddp-gpt", "--backend", "in_memory", "-k", selection, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 judged (2 pass), 0 xfailed, 0 skipped, 0 left out" in done.stdout
    assert "in_memory" in done.stdout
    assert "= formula" in done.stdout
    [folder] = (tmp_path / "results").iterdir()
    assert f"evidence: {Path('results') / folder.name}" in done.stdout
    files = {
        "run.json",
        "planned.jsonl",
        "cases.jsonl",
        "manifest.jsonl",
        "report.html",
        "report.md",
        "coverage.json",
    }
    assert {path.name for path in folder.iterdir()} == files | {"junit.xml", "records"}
    run = read(folder)
    assert CASE in [line.id for line in run.cases]
    assert run.header.invocations[0].exit_code == 0
    assert CASE in json.loads((tmp_path / "caches/shardproof/durations.json").read_text())
    shown = here("report", "--format", "markdown", cwd=tmp_path)
    assert "| reference/ddp |" in shown.stdout
    page = here("report", folder.name, "--format", "html", cwd=tmp_path)
    assert "</html>" in page.stdout
    assert "2 judged" in here("report", str(folder), cwd=tmp_path).stdout


def test_what_still_has_room_is_not_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Durations of a busier machine leave a case out of the plan, not out of the run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    arguments = ("run", "ddp-gpt", "--backend", "in_memory", "--budget", "15", "-j", "1")
    selection = ("-k", "replicate2 and small_buckets and fp64")
    plan = here(*arguments, *selection, "--dry-run", cwd=tmp_path)
    ids = [line for line in plan.stdout.splitlines() if line.startswith("ddp-gpt")]
    assert len(ids) == 2, plan.stdout
    known = tmp_path / "caches/shardproof/durations.json"
    known.parent.mkdir(parents=True)
    known.write_text(json.dumps({key: [500.0] for key in ids}))
    assert "1 left out by the budget" in here(*arguments, *selection, "--dry-run").stderr
    done = here(*arguments, *selection, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 judged (2 pass), 0 xfailed, 0 skipped, 0 left out" in done.stdout
    [folder] = (tmp_path / "results").iterdir()
    assert len(read(folder).cases) == 2
    assert here("verify", str(folder)).returncode == 0


def test_one_folder_takes_a_run_and_its_mutants(tmp_path: Path) -> None:
    folder = tmp_path / "both"
    first = here("run", CASE, "--results", str(folder), "-j", "1")
    assert first.returncode == 0, first.stdout + first.stderr
    second = here("mutants", "--impl", "ddp_never_reduces", "--results", str(folder))
    assert second.returncode == 0, second.stdout + second.stderr
    assert "1 fault judged (1 killed, 0 survive), 0 left out" in second.stdout
    run = read(folder)
    assert [line.id for line in run.cases] == [CASE]
    assert [line.name for line in run.kills] == ["ddp_never_reduces"]
    assert len(run.mutant_cases) == 2
    assert [i.exit_code for i in run.header.invocations] == [0, 0]


def test_a_mutant_named_exactly_fails_with_a_rerun_line(tmp_path: Path) -> None:
    selection = "in_memory and replicate2 and sgd and fp64"
    done = here(
        "run", "ddp-gpt", "--impl", "mutants/ddp_never_reduces", "-k", selection, cwd=tmp_path
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "fail: ddp-gpt::mutants/ddp_never_reduces::in_memory" in done.stdout
    assert "rerun: shardproof run ddp-gpt" in done.stdout


def test_list_cases_takes_like(tmp_path: Path) -> None:
    (tmp_path / "mine_alike.py").write_text(
        "from shardproof.impls.reference.zero1 import IMPLEMENTATION as Base\n"
        "class Mine(Base): ...\n"
    )
    arguments = ("--impl", "mine_alike:Mine", "--like", "reference/zero1*", "--tier", "quick")
    listed = here("list", "cases", *arguments, cwd=tmp_path, paths=[tmp_path])
    planned = here("run", *arguments, "--dry-run", cwd=tmp_path, paths=[tmp_path])
    assert listed.returncode == 0 == planned.returncode, listed.stderr + planned.stderr
    assert listed.stdout == planned.stdout and "zero1" in listed.stdout
    refused = here("list", "impls", "--like", "x")
    assert refused.returncode == 2 and "filters apply to `list cases`" in refused.stderr


def test_fail_fast_leaves_the_rest_to_resume(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    selection = ["--impl", "mutants/ddp_never_reduces", "-k", "in_memory and sgd and fp64"]
    selection = ["ddp-gpt", *selection, "--tier", "full", "--world", "2", "-j", "1"]
    done = here("run", *selection, "--fail-fast", "2", "--results", folder)
    assert done.returncode == 1, done.stdout + done.stderr
    run = read(tmp_path / "run")
    assert [r.verdict for r in run.cases] == ["fail"] * 2 and run.left_out
    assert {line.reason for line in run.left_out} == {"stopped after 2 failures"}
    told = f"{numbered(len(run.left_out), 'case')} not run; run them with: shardproof run --resume"
    assert told in done.stdout
    assert f"--resume --results {folder}" in done.stdout
    again = here("run", "--resume", "--results", folder, "--dry-run")
    assert again.stdout.split() == [line.id for line in run.left_out]


#: Options that only the implementation can refuse -> what it says of them.
REFUSED = {
    "reference/fsdp, {sharding_strategy: NO_SHARD, offload: optimizer}, replicate": "host; set",
    "reference/zero3, {recompute_every: 9}, shard": "the model has 3 units; valid: 0 (never) to 3",
    "pytorch/fsdp2, {reshard_after_forward: 3}, shard": "valid: true, false, null, 1, 2",
    "pytorch/fsdp1, {wrap: {module_class: [Blok]}}, shard": "did you mean 'Block'?",
    "pytorch/zero_redundancy_optimizer, {offload: disk}, shard": "unknown option 'offload'; valid:",
}


def test_options_that_are_refused_end_with_code_2_and_one_sentence(tmp_path: Path) -> None:
    cells = [text.split(", ") for text in REFUSED]
    entries = []
    for number, (name, *options, axis) in enumerate(cells):
        choice = f"name: {name}, label: n{number}, options: {', '.join(options)}"
        entries.append(
            f"  - {{reason: a fault, implementation: {{{choice}}}, mesh: {{{axis}: 2}}}}"
        )
    text = f"""\
name: refused
about: options that contradict each other, the mesh or the model
sees: [nothing]
workload: {{name: charnames_gpt}}
matrix: {{implementation: plain, backend: in_memory, mesh: {{replicate: 1}}, optimizer: sgd}}
checks: [equivalence]
include:
{chr(10).join(entries)}
"""
    (tmp_path / "refused.yaml").write_text(text)
    results = str(tmp_path / "run")
    done = here("run", str(tmp_path / "refused.yaml"), "-j", "2", "--results", results)
    assert done.returncode == 2, done.stdout + done.stderr
    told = {r.case.label: r for r in read(tmp_path / "run").cases if r.case.label}
    for number, says in enumerate(REFUSED.values()):
        result = told[f"n{number}"]
        assert result.verdict == "refused" and says in result.reason, result.reason
        assert "option '" in result.reason and result.reason in done.stdout
        line = 1 + next(n for n, row in enumerate(text.splitlines()) if f"label: n{number}," in row)
        assert result.reason.startswith(f"{tmp_path / 'refused.yaml'}:{line}: ")
        assert f"shardproof run {tmp_path / 'refused.yaml'} " in result.rerun


#: A cell's options and mesh, and what its refusal says.
HYBRIDS = {
    "{}, {shard: 1, tensor: 3}": "'blocks.0.attention.qkv' has 4 heads and 4 KV heads",
    "{schedule: zb_v}, {pipe: 2}": "asks for 4 stages, but charnames_gpt has 3 units",
    "{schedule: {orders: [[F0@0], [F0@1, BW0@1]]}}, {pipe: 2}": "rank 0 never does B0@0",
    "{schedule: interleaved}, {pipe: 2}": "not 3; use 4 micro-batches",
    "{data: zero1}, {replicate: 2}": "this mesh has replicate = 2: set replicate to 1",
}


def test_axes_that_do_not_go_together_end_with_code_2(tmp_path: Path) -> None:
    text = """\
name: refused
about: axes that do not go with the model, or with each other
sees: [nothing]
workload: {name: charnames_gpt, micro_batches: 3, params: {layers: 3}}
matrix: {implementation: plain, backend: in_memory, mesh: {replicate: 1}, optimizer: sgd}
checks: [equivalence]
include:
"""
    for number, cell in enumerate(HYBRIDS):
        options, mesh = cell.rsplit(", {", 1)
        choice = f"name: reference/hybrid, label: n{number}, options: {options}"
        text += f"  - {{reason: a fault, implementation: {{{choice}}}, mesh: {{{mesh}}}\n"
    (tmp_path / "own.yaml").write_text(text)
    done = here("run", "own.yaml", "-j", "2", "--results", "run", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    told = {r.case.label: r for r in read(tmp_path / "run").cases if r.case.label}
    for number, says in enumerate(HYBRIDS.values()):
        reason = told[f"n{number}"].reason
        assert reason.startswith(f"own.yaml:{8 + number}: ") and says in reason, reason
        assert reason in done.stdout
