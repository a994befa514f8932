"""The command ``gate``, and the example files of CI as a shell and a code host take them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import synthetic as made
import typer.main
import yaml
from commands import python

from shardproof import verdicts
from shardproof.case import Case
from shardproof.cases.kills import pair
from shardproof.commands import main
from shardproof.commands.execution import Execution
from shardproof.compare import baseline, policy
from shardproof.registry import load_mutant
from shardproof.runs.bundle import packing
from shardproof.runs.durations import Durations
from shardproof.runs.run_folder import RunFolder, read
from shardproof.scenarios.budget import fit_cases

ROOT = Path(__file__).parents[2]
CI = ROOT / "deploy" / "ci"
EXPECTED = """\
xfails:
  - {cases: "ddp-gpt0::*", reason: the bug is known, until: 2026-11-30}
"""


def executed(path: Path, cases: list[Case]) -> Path:
    """A run that was run, with records to judge again."""
    durations = Durations(path.parent / "durations.json")
    with RunFolder(path, ["test"]) as folder:
        Execution(folder, fit_cases(cases, durations, 1, None), 1, durations).run()
    return path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that holds, and one with a failing case beside."""
    fault, root = pair(load_mutant("ddp_never_reduces")), tmp_path_factory.mktemp("runs")
    return {
        "pass": executed(root / "pass", [fault.parent]),
        "fail": executed(root / "fail", [fault.parent, fault.case]),
    }


def test_the_command_writes_what_it_was_asked_for(tmp_path: Path, command: Any) -> None:
    lines = made.results(3)
    old, new = str(made.write(tmp_path / "old", lines)), str(made.write(tmp_path / "new", lines))
    summary, junit = tmp_path / "out" / "summary.md", tmp_path / "out" / "gate.xml"
    more = ("--summary", str(summary), "--junit", str(junit), "--annotations", "github")
    code, out, _ = command("gate", new, "--against", old, *more)
    assert code == 0 and out.startswith("held: ")
    once = summary.read_text()
    assert command("gate", new, "--against", old, *more, "--append")[0] == 0
    assert summary.read_text() == once * 2
    ElementTree.parse(junit)
    code, _, err = command("gate", new, "--against", old, "--append")
    assert code == 2 and "--summary" in err
    code, _, err = command("gate", new, "--against", old, "--on", "tomorrow")
    assert code == 2 and "YYYY-MM-DD" in err
    code, _, err = command("gate", new, "--against", old, "--policy", str(tmp_path / "none.yaml"))
    assert code == 2 and "no such file" in err
    assert command("gate", "nothing", "--against", old)[0] == 2


def test_the_day_decides(tmp_path: Path, command: Any) -> None:
    failing = [made.result(made.case(0), 0, "fail")]
    run = str(made.write(tmp_path / "run", failing))
    path = tmp_path / "policy.yaml"
    path.write_text(EXPECTED)
    arguments = ("gate", run, "--against", run, "--policy", str(path), "--on")
    assert command(*arguments, "2026-11-30")[0] == 0
    code, out, _ = command(*arguments, "2026-12-01")
    assert code == 1 and "policy.yaml:2" in out


# --------------------------------------------------------------------------------- evidence


def forged(run: Path) -> None:
    """The first verdict of `run` becomes a pass."""
    path = run / "cases.jsonl"
    path.write_text(path.read_text().replace('"verdict": "fail"', '"verdict": "pass"', 1))


def test_a_run_that_was_changed_breaks_on_either_side(tmp_path: Path, command: Any) -> None:
    lines = made.results(3)
    old = made.write(tmp_path / "old", lines)
    lines[0] = made.result(made.case(0), 0, "fail")
    new = made.write(tmp_path / "new", lines)
    assert "verdict" in command("gate", str(new), "--against", str(old))[1]
    forged(new)
    code, out, _ = command("gate", str(new), "--against", str(old), "--annotations", "github")
    assert code == 1 and f"{new / 'cases.jsonl'}: line 1 ({made.case(0).id}) was changed" in out
    assert "::error title=shardproof gate%3A evidence::new: " in out
    assert command("gate", str(old), "--against", str(new))[0] == 1
    (new / "manifest.jsonl").unlink()
    code, out, _ = command("gate", str(new), "--against", str(old))
    assert code == 1 and "no manifest" in out


def test_digests_that_were_made_right_again_do_not_help(
    runs: dict[str, Path], tmp_path: Path, command: Any
) -> None:
    base, archive = tmp_path / "base.json", tmp_path / "run.tar.gz"
    baseline.save(baseline.load(str(runs["pass"])), base)
    arguments = ("--against", str(base), "--verify")
    assert command("gate", str(runs["pass"]), *arguments)[0] == 0
    run = Path(shutil.copytree(runs["fail"], tmp_path / "run"))
    assert command("gate", str(run), *arguments)[0] == 1
    [failing] = [line for line in read(run).cases if line.verdict == "fail"]
    with RunFolder(run, ["forged"]) as folder:
        folder.add(replace(failing, verdict="pass", reason=""))
    packing.pack(run, archive)
    assert command("gate", str(archive), "--against", str(base))[0] == 0
    for name in (str(run), str(archive)):
        code, out, _ = command("gate", name, *arguments)
        assert code == 1 and "the record gives verdict 'fail'" in out
        assert f": {name}/records/" in out, "and no temporary folder"


def test_a_baseline_is_no_run(tmp_path: Path, command: Any) -> None:
    base = tmp_path / "base.json"
    baseline.save(baseline.load(str(made.write(tmp_path / "run", made.results(2)))), base)
    code, _, err = command("gate", str(base), "--against", str(base))
    assert code == 2 and "no records to judge" in err


def test_digests_are_checked_without_the_slow_imports(tmp_path: Path) -> None:
    run = made.write(tmp_path / "run", made.results(200))
    program = (
        "import sys; sys.argv = ['shardproof', 'gate', sys.argv[1], '--against', sys.argv[1]]\n"
        "from shardproof.commands.main import main\n"
        "try:\n    main()\n"
        "finally:\n"
        "    slow = {'torch', 'scipy', 'numpy', 'pandas', 'pyarrow'} & set(sys.modules)\n"
        "    print('slow imports:', sorted(slow))\n"
    )
    done = python("-c", program, str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "slow imports: []" in done.stdout


# ------------------------------------------------------------------------------ the example files


def test_the_example_policy_has_every_default() -> None:
    text = (CI / "policy.yaml").read_text()
    written = yaml.safe_load(text)
    written.pop("about")
    default = policy.Policy.model_validate({}).model_dump()
    del default["about"], default["xfails"], default["figures"]["allow"], default["times"]["allow"]
    assert written == default | {"verdicts": dict(policy.VERDICTS)}
    for key in ("xfails:", "allow:"):
        assert f"# {key}" in text, "an example stands beside it"
    read = policy.read(CI / "policy.yaml").policy
    assert {verdict: read.level(verdict) for verdict in verdicts.VERDICTS} == policy.VERDICTS


def test_the_examples_in_the_example_policy_are_valid(tmp_path: Path) -> None:
    text = (CI / "policy.yaml").read_text()
    text = re.sub(r"^( *)# (?=(  |- |allow|xfails|figures|reason|until))", r"\1", text, flags=re.M)
    (tmp_path / "policy.yaml").write_text(text)
    read = policy.read(tmp_path / "policy.yaml").policy
    assert len(read.figures.allow) == len(read.times.allow) == len(read.xfails) == 1


def workflow() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((CI / "github-workflow.yaml").read_text())
    return loaded


def steps() -> list[dict[str, Any]]:
    [job] = workflow()["jobs"].values()
    return list(job["steps"])


def test_actions_are_pinned_by_commit() -> None:
    used = [step["uses"] for step in steps() if "uses" in step]
    assert used
    for name in used:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", name), name
    assert workflow()["permissions"] == {"contents": "read"}


def test_the_workflow_s_commands_exist_with_these_options() -> None:
    group = typer.main.get_command(main.app)
    found = []
    for step in steps():
        for line in str(step.get("run", "")).splitlines():
            words = shlex.split(line.split("||")[0])
            if words[:1] != ["shardproof"]:
                continue
            name = words[1]
            known = {option for p in group.commands[name].params for option in p.opts}  # type: ignore[attr-defined]
            given = {word for word in words[2:] if word.startswith("-")}
            assert given <= known, f"{name} has no {given - known}"
            found.append(name)
    assert found == ["run", "gate"]
    for path in (CI / "policy.yaml", ROOT / "Makefile"):
        assert path.is_file()
    assert re.search(r"^setup:", (ROOT / "Makefile").read_text(), re.M)


def option(name: str) -> Path:
    """The file that the workflow's gate takes for an option."""
    [text] = [step["run"] for step in steps() if step.get("name") == "Gate"]
    words = shlex.split(text)
    return Path(words[words.index(name) + 1])


def test_the_gate_s_policy_and_baseline_are_the_target_branch_s() -> None:
    """Checked out after the last step that runs code of the pull request, before the gate."""
    names = [step.get("name", step.get("with", {}).get("path", "")) for step in steps()]
    assert names.index("Run") < names.index("target") == names.index("Gate") - 1
    [target] = [step for step in steps() if step.get("with", {}).get("path") == "target"]
    assert target["with"]["ref"] == "${{ github.event.pull_request.base.sha }}"
    folders = target["with"]["sparse-checkout"].split()
    for path in (option("--policy"), option("--against")):
        assert path.parts[0] == "target"
        assert str(path.relative_to("target").parent) in folders


@pytest.mark.parametrize(("verdict", "expected"), [("pass", 0), ("fail", 1)])
def test_the_workflow_s_gate_runs_as_it_stands(
    runs: dict[str, Path], tmp_path: Path, verdict: str, expected: int
) -> None:
    """The step's own text, by a shell, in a folder that looks like the two checkouts.

    The pull request's own policy lets everything pass, and its own baseline knows the failure.
    """
    [gate_step] = [step["run"] for step in steps() if step.get("name") == "Gate"]
    shutil.copytree(runs[verdict], tmp_path / "results" / "pull-request")
    weak = "verdicts: {fail: ignore}\n"
    for folder, base, rules in (
        (tmp_path, runs[verdict], weak),
        (tmp_path / "target", runs["pass"], (CI / "policy.yaml").read_text()),
    ):
        baseline.save(baseline.load(str(base)), folder / option("--against").relative_to("target"))
        path = folder / option("--policy").relative_to("target")
        path.parent.mkdir(parents=True)
        path.write_text(rules)
    tools = tmp_path / "bin"
    tools.mkdir()
    tool = tools / "shardproof"
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shardproof "$@"\n')
    tool.chmod(0o755)
    summary = tmp_path / "step summary.md"
    summary.write_text("before\n")
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(summary),
    }
    done = subprocess.run(
        ["bash", "-e", "-c", gate_step],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == expected, done.stdout + done.stderr
    assert summary.read_text().startswith("before\n## Shardproof gate: ")
    tests = ElementTree.parse(tmp_path / "gate.xml").getroot()[0]
    assert tests.get("failures") == str(expected)
    assert ("::error " in done.stdout) == (expected == 1)


def test_the_baseline_that_the_workflow_names_is_committed() -> None:
    path = ROOT / option("--against").relative_to("target")
    assert json.loads(path.read_text())["kind"] == baseline.KIND


def test_a_run_that_was_killed_breaks(command: Any, tmp_path: Path) -> None:
    lines = made.results(4)
    whole = made.write(tmp_path / "whole", lines)
    cut = made.write(tmp_path / "cut", lines, left_out=["s::reference/ddp::never"])
    says = "1 planned without a result"
    for words, breaks in (((cut, whole), True), ((whole, cut), True), ((whole, whole), False)):
        run, against = map(str, words)
        code, out, err = command("gate", run, "--against", against)
        assert code == (verdicts.BROKEN if breaks else verdicts.HELD), out + err
        assert (says in out) == breaks, out
