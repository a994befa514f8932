"""deploy/node.sh, the command of compose.yaml, with programs that stand in for its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
#: Without --results: each launch has a folder of its own.
JUDGE = "shardproof.cluster.judge"


def head(
    results: Path, torchrun: str, judge: str = "exit 0", deadline: str = "100"
) -> tuple[int, str]:
    """Exit code and output of the head; ``torchrun`` and ``judge`` are lines of shell.

    ``torchrun`` finds the folder of its records in ``$records``.
    """
    programs = results / "bin"
    programs.mkdir()
    find = 'for word; do [ "$before" = --records ] && records=$word; before=$word; done\n'
    for name, does in (("torchrun", find + torchrun), ("python", f'echo "judged: $*"\n{judge}')):
        (programs / name).write_text(f"#!/bin/sh\n{does}\n")
        (programs / name).chmod(0o755)
    chosen = {"RESULTS": str(results), "RUN": "run", "NODES": "2", "RANKS_PER_NODE": "2"}
    chosen |= {"SCENARIO": "ddp-gpt", "TIER": "quick", "EXPRESSION": "", "DEADLINE": deadline}
    done = subprocess.run(
        [ROOT / "deploy" / "node.sh", "head"],
        cwd=results,
        env={"PATH": f"{programs}:{os.environ['PATH']}"} | chosen,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_folder_that_cannot_be_written_is_told_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    code, said = head(tmp_path, "exit 1")
    assert code == 2 and said.count("\n") == 1
    assert said.startswith(f"user {os.getuid()} cannot write {tmp_path}/run (File exists): ")
    assert f"which is user {tmp_path.stat().st_uid}: OWNER=$(id -u) docker compose up" in said


@pytest.mark.parametrize(
    ("commit", "source", "says"),
    [
        ("c0ffee", "ab12", "image of commit c0ffee, source ab12"),
        ("", "", "image of commit unknown"),
    ],
)
def test_the_head_begins_with_what_its_image_is_of(
    commit: str, source: str, says: str, tmp_path: Path
) -> None:
    line = f'{{"commit": "{commit}", "source": "{source}"}}\n'  # as the Dockerfile writes it
    (tmp_path / "image.json").write_text(line)
    _, said = head(tmp_path, "exit 1")
    assert said.splitlines()[0] == says


def test_the_head_ends_with_where_the_evidence_is_on_the_host(tmp_path: Path) -> None:
    _, said = head(tmp_path, COMES)
    assert said.splitlines()[-1] == f"{tmp_path} is ./results beside compose.yaml, on the host"


def test_the_plan_of_an_earlier_run_is_not_judged(tmp_path: Path) -> None:
    plan = tmp_path / "run" / "cluster" / "plan.json"
    plan.parent.mkdir(parents=True)
    plan.touch()
    head(tmp_path, "exit 1")
    assert not plan.exists()


COMES = 'mkdir -p "$records"; touch "$records/plan.json"'


def test_a_deadline_before_any_case_leaves_it_undecided(tmp_path: Path) -> None:
    code, said = head(tmp_path, "sleep 100", deadline="1")
    assert code == 3 and "judged: -m" not in said and "cannot touch" not in said, said
    assert "DEADLINE=1: no case began in so many seconds, so nothing was judged" in said


def test_a_number_of_ranks_without_cases_is_stated_with_those_that_have_some(
    tmp_path: Path,
) -> None:
    code, said = head(tmp_path, "exit 1")
    assert code == 2 and "judged: -m" not in said
    last = said.splitlines()[-1]
    assert "no case began on NODES=2 x RANKS_PER_NODE=2 = 4 ranks" in last
    worlds = re.search(r"by-hand has cases of ([\d, and]+)", last)
    assert worlds and [*map(int, re.findall(r"\d+", worlds[1]))] == BY_HAND


#: Numbers of ranks of the default scenarios, which the message and the pages name.
BY_HAND = [2, 3, 4, 6, 8]


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_the_default_scenarios_have_cases_of_every_documented_number_of_nodes(nodes: int) -> None:
    """Both scenarios, references and systems of PyTorch, at the default of 2 ranks per node."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = ["list", "cases", "by-hand", "--tier", "quick", "--backend", "gloo"]
    done = subprocess.run(
        [sys.executable, "-m", "shardproof", *words, "--world", str(2 * nodes)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    systems = {line.split("::")[1].split("+")[0] for line in done.stdout.split()}
    assert done.returncode == 0, done.stderr
    assert systems == {"reference/ddp", "pytorch/ddp", "reference/zero2", "reference/fsdp"}


def test_the_documented_command_starts_as_many_nodes_as_it_names() -> None:
    for page in ("compose.yaml", "docs/containers.md"):
        lines = (ROOT / page).read_text().splitlines()
        (command,) = [line for line in lines if "docker compose up --scale" in line]
        nodes, others = re.search(r"NODES=(\d).*--scale node=(\d)", command).groups()  # type: ignore[union-attr]
        assert int(others) == int(nodes) - 1 and 2 * int(nodes) in BY_HAND


def test_what_the_deadline_cut_off_is_judged(tmp_path: Path) -> None:
    code, said = head(tmp_path, f"{COMES}; sleep 100", "exit 3", deadline="1")
    assert code == 3 and "judged:" in said
    assert (tmp_path / "run" / "cluster" / "out_of_time").exists()


def test_a_deadline_of_an_earlier_run_is_not_this_ones(tmp_path: Path) -> None:
    left = tmp_path / "run" / "cluster" / "out_of_time"
    left.parent.mkdir(parents=True)
    left.touch()
    code, said = head(tmp_path, COMES)
    assert code == 0 and not left.exists(), said


@pytest.mark.parametrize("judged", [0, 1, 3])
def test_the_code_is_that_of_the_judge(judged: int, tmp_path: Path) -> None:
    code, said = head(tmp_path, COMES, f"exit {judged}")
    assert code == judged
    assert f"judged: -m {JUDGE} {tmp_path}/run/cluster --prune" in said


@pytest.mark.parametrize(("again", "code"), [(0, 0), (1, 1), (3, 3), (124, 3)])
def test_what_held_is_run_again_in_local_processes(again: int, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "run" / "20260102-030405"
    judge = (
        f'case "$*" in *reproduce*) exit {again};; esac\nmkdir -p {folder}; touch {folder}/run.json'
    )
    found, said = head(tmp_path, COMES, judge)
    assert found == code
    assert f"-m shardproof reproduce {folder} --results {folder}-local\n" in said


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_four_nodes_judge_the_default_scenarios_on_eight_ranks(tmp_path: Path) -> None:
    """The containers of ``NODES=4 docker compose up --scale node=3``, as processes here."""
    chosen = {"RESULTS": str(tmp_path), "RUN": "run", "NODES": "4", "RANKS_PER_NODE": "2"}
    chosen |= {"SCENARIO": "by-hand", "TIER": "quick", "EXPRESSION": "", "DEADLINE": "500"}
    chosen |= {"HEAD": "localhost", "COMPARE": "no", "GLOO_SOCKET_IFNAME": "lo"}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **chosen, "PATH": path, "PYTHONPATH": str(ROOT)}
    script = ["sh", str(ROOT / "deploy" / "node.sh")]
    others = [
        subprocess.Popen(
            [*script, "node"], cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
        )
        for _ in range(3)
    ]
    try:
        done = subprocess.run(
            [*script, "head"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
    finally:
        for one in others:
            one.terminate()
            one.wait()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 judged (4 pass)" in done.stdout
