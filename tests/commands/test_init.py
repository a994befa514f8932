"""``shardproof init``: what it writes runs as it stands, passes the sound class and not another."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from commands import here, pytest_here

from shardproof.commands import main
from shardproof.compare import policy
from shardproof.init import requirement
from shardproof.init.command import BASELINE, PLACES, _ignoring, written

pytestmark = pytest.mark.launches

ROOT = Path(__file__).parents[2]
MINE = """\
from shardproof.impls.reference.zero1 import ReferenceZero1


class Mine(ReferenceZero1):
    depth = "family"
"""
SPOILT = """
    def step(self, batch, observe):
        for micro in batch.micro_batches:
            micro.weights.mul_(0.5)
        return super().step(batch, observe)
"""
WORKFLOW = ROOT / "suite/init/workflow.yaml"
ACTION = ROOT / "deploy/ci/action.yaml"


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Somebody's, after `shardproof init`."""
    folder = tmp_path_factory.mktemp("repository")
    (folder / "mine.py").write_text(MINE)
    done = here("init", "mine:Mine", cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 judged (8 pass)" in done.stdout + done.stderr
    assert "note: the workflow " in done.stderr and "--install" in done.stderr
    assert "evidence" not in done.stdout + done.stderr, "the run of the baseline does not stay"
    return folder


def test_it_writes_what_it_says_and_nothing_else(repository: Path) -> None:
    files = {str(p.relative_to(repository)) for p in repository.rglob("*") if p.is_file()}
    files = {file for file in files if "__pycache__" not in file}
    test = "tests/test_shardproof.py"
    assert files == {"mine.py", test, str(BASELINE), ".gitignore", *map(str, PLACES.values())}
    assert (repository / ".gitignore").read_text() == "/results/\n"
    read = policy.read(repository / PLACES["policy.yaml"]).policy
    assert read.level("fail") == "break" and read.level("skip") == "new"
    (repository / "tests" / "test_shardproof.py").write_text("changed\n")
    again = here("init", "mine:Mine", cwd=repository)
    assert again.returncode == 2 and again.stderr.count("the file exists") == 2, again.stderr
    assert test in again.stderr and str(BASELINE) in again.stderr, "what would be lost"
    texts = written("mine:Mine", ["shard"], ["in_memory"], "shardproof")
    (repository / test).write_text(texts[Path(test)])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("*.pyc", "*.pyc\n/results/\n"),
        ("*.pyc\n\n", "*.pyc\n\n/results/\n"),
        ("results/\n", ""),
        ("# mine\n/results/", ""),
    ],
)
def test_git_ignores_runs_and_whatever_it_ignored_before(
    tmp_path: Path, before: str, after: str
) -> None:
    (tmp_path / ".gitignore").write_text(before)
    assert _ignoring(tmp_path / ".gitignore") == after


def test_its_test_passes(repository: Path) -> None:
    done = pytest_here("-q", cwd=repository)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("files", "installed"),
    [
        ((), []),
        (("pyproject.toml",), ["."]),
        (("setup.py", "requirements.txt"), [".", "-r", "requirements.txt"]),
    ],
)
def test_its_workflow_installs_what_is_there(
    repository: Path, tmp_path: Path, files: tuple[str, ...], installed: list[str]
) -> None:
    """The repository itself only where pip can: one of modules alone is judged where it lies."""
    for file in files:
        (tmp_path / file).touch()
    pip = tmp_path / "bin" / "pip"
    pip.parent.mkdir()
    pip.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    pip.chmod(0o755)
    steps = _steps(yaml.safe_load((repository / PLACES["workflow.yaml"]).read_text()))
    (text,) = [step["run"] for step in steps if step.get("name") == "Set up"]
    environment = {"PATH": f"{pip.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-e", "-c", text],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    wanted = ["install", requirement.default()[0], *installed]
    assert (done.returncode, done.stdout.split("\n")[:-1]) == (0, wanted), done.stderr


CRASHES = """
    def setup(self, *args, **kwargs):
        raise RuntimeError("no such device")
"""


def test_where_nothing_passes_there_is_no_baseline(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE + CRASHES)
    done = here("init", "mine:Mine", cwd=tmp_path)
    told = done.stdout + done.stderr
    assert done.returncode == 1 and "RuntimeError: no such device" in told, told
    assert "no case passes (8 crash), so no baseline was written" in told
    scenario = PLACES["strategy.yaml"]
    assert f"nothing was written but {scenario}" in told and "wrote " not in told
    left = {p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()}
    assert {path for path in left if path.suffix != ".pyc"} == {Path("mine.py"), scenario}
    (rerun,) = re.findall(r"rerun: shardproof (.*)", told)
    done = here(*shlex.split(rerun), "--dry-run", cwd=tmp_path)
    assert done.returncode == 0 and "1 case," in done.stderr, "the scenario that it names is there"
    (tmp_path / "mine.py").write_text(MINE)
    done = here("init", "mine:Mine", cwd=tmp_path)
    assert done.returncode == 0, "what it has written itself is not in its way"


ALONE = """
    @classmethod
    def capabilities(cls, options):
        return dataclasses.replace(super().capabilities(options), max_world=1)
"""


def test_where_nothing_is_decided_the_exit_code_is_3(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import dataclasses\n\n" + MINE + ALONE)
    done = here("init", "mine:Mine", cwd=tmp_path)
    told = done.stdout + done.stderr
    assert done.returncode == 3 and "no case passes (8 skip)" in told, told
    assert f"nothing was written but {PLACES['strategy.yaml']}" in told, told


def pull_request(repository: Path, folder: Path, text: str) -> list[str]:
    """The texts of the steps that run and judge it; the target branch is as `init` left it."""
    (folder / "mine.py").write_text(text)
    for name in ("conformance", "target/conformance"):
        (folder / name).mkdir(parents=True)
        for file in (repository / "conformance").iterdir():
            (folder / name / file.name).write_bytes(file.read_bytes())
    steps = _steps(yaml.safe_load((repository / PLACES["workflow.yaml"]).read_text()))
    return [step["run"] for step in steps if step.get("name") in ("Run", "Gate")]


def test_its_gate_holds_where_nothing_has_changed(repository: Path, tmp_path: Path) -> None:
    """The commands of the steps, in this process."""
    for text in pull_request(repository, tmp_path, MINE):
        tool, *words = shlex.split(text.partition("||")[0])
        done = here(*words, cwd=tmp_path)
        assert (tool, done.returncode) == ("shardproof", 0), done.stdout + done.stderr


def test_its_workflow_runs_and_its_gate_judges(repository: Path, tmp_path: Path) -> None:
    """The steps' own texts, by a shell: a run that fails goes on to the gate, which breaks."""
    texts = pull_request(repository, tmp_path, MINE + SPOILT)
    tool = tmp_path / "bin" / "shardproof"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m shardproof "$@"\n')
    tool.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tool.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }
    codes = []
    for text in texts:
        done = subprocess.run(
            ["bash", "-e", "-c", text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        codes.append(done.returncode)
    assert codes == [0, 1], done.stdout + done.stderr


def test_a_class_that_is_not_there_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    done = here("init", "nowhere:Mine", cwd=tmp_path)
    assert done.returncode == 2 and "no module 'nowhere' here or installed" in done.stderr
    assert not list(tmp_path.iterdir())


REFUSES = """\
import os
from pathlib import Path

from shardproof.contract import Refused
from shardproof.impls.reference.zero1 import ReferenceZero1

with Path({pids!r}).open("a") as file:
    print(os.getpid(), file=file)


class Mine(ReferenceZero1):
    @classmethod
    def capabilities(cls, options):
        {body}
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise Refused(\"option 'x' is needed\")", "option 'x' is needed"),
        ("return {}", "capabilities(options) returned a dict, not Capabilities"),
        ("return super().capabilities(options).__class__(axes=())", "declares no axes"),
    ],
    ids=["refuses", "broken", "no-axes"],
)
def test_a_class_that_cannot_be_without_options_is_bad_input(
    tmp_path: Path, body: str, says: str
) -> None:
    """It is asked in a leader: here it is never imported."""
    folder, pids = tmp_path / "repository", tmp_path / "pids"
    folder.mkdir()
    (folder / "refusing.py").write_text(REFUSES.format(pids=str(pids), body=body))
    done = here("init", "refusing:Mine", cwd=folder)
    assert done.returncode == 2, done.stdout + done.stderr
    assert says in done.stderr and "works without options" in done.stderr
    assert "Traceback" not in done.stderr
    assert pids.read_text() and str(os.getpid()) not in pids.read_text().split()
    assert {path.name for path in folder.iterdir()} <= {"refusing.py", "__pycache__"}


COUNTS = """
    def setup(self, *args, **kwargs):
        with open({counts!r}, "a") as file:
            print("setup", file=file)
        return super().setup(*args, **kwargs)
"""


def test_ctrl_c_writes_nothing(tmp_path: Path) -> None:
    """Sent once the second case runs; what --force was to replace is there as before."""
    folder, counts = tmp_path / "repository", tmp_path / "counts"
    kept = folder / PLACES["policy.yaml"]
    kept.parent.mkdir(parents=True)
    kept.write_text("mine\n")
    (folder / "mine.py").write_text(MINE + COUNTS.format(counts=str(counts)))
    command = [sys.executable, "-m", "shardproof", "init", "mine:Mine", "--force", "-j", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        try:
            until = time.monotonic() + 90
            while not counts.exists() or len(counts.read_text().splitlines()) < 3:
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            said, _ = process.communicate()
        finally:
            process.kill()
    assert process.returncode == 130, said
    assert b"nothing was written" in said and b"wrote" not in said.replace(b"was written", b"")
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert files == {"mine.py", str(PLACES["policy.yaml"])} and kept.read_text() == "mine\n"
    assert not (folder / ".github").exists()


def test_several_axes_make_a_mesh() -> None:
    texts = written("mine:Mine", ["replicate", "shard"], ["gloo"], "shardproof")
    scenario = yaml.safe_load(texts[PLACES["strategy.yaml"]])
    assert scenario["matrix"]["mesh"] == {"replicate": 2, "shard": 2}
    call = 'meshes=[{"replicate": 2, "shard": 2}], backends=("gloo",))'
    assert call in texts[Path("tests/test_shardproof.py")], "in_memory is what prove takes"


def _steps(document: Any) -> list[dict[str, Any]]:
    if "runs" in document:
        return list(document["runs"]["steps"])
    (job,) = document["jobs"].values()
    return list(job["steps"])


@pytest.mark.parametrize("file", [WORKFLOW, ACTION], ids=["workflow", "action"])
def test_actions_are_pinned_and_options_exist(file: Path) -> None:
    group: Any = typer.main.get_command(main.app)
    found = []
    for step in _steps(yaml.safe_load(file.read_text())):
        used = step.get("uses", "")
        assert not used or re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", used), used
        words = shlex.split(str(step.get("run", "")).split("||")[0])
        if words[:1] == ["shardproof"]:
            known = {option for p in group.commands[words[1]].params for option in p.opts}
            assert {word for word in words[2:] if word.startswith("--")} <= known
            found.append(words[1])
            # Inputs reach the shell as variables, never as text.
            assert "${{" not in step["run"]
    assert found == ["run", "gate"]


def test_the_action_s_defaults_are_where_init_writes() -> None:
    inputs = yaml.safe_load(ACTION.read_text())["inputs"]
    named = {inputs[name]["default"] for name in ("scenario", "baseline", "policy")}
    wanted = (PLACES["strategy.yaml"], PLACES["policy.yaml"], BASELINE)
    assert named == set(map(str, wanted))


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("remote", "wanted"),
    [
        ("https://host/a/b.git", "git+https://host/a/b.git"),
        ("https://user:secret@host/a/b.git", "git+https://host/a/b.git"),
        ("git@host:a/b.git", "git+ssh://git@host/a/b.git"),
        ("ssh://git:secret@host/a/b.git", "git+ssh://git@host/a/b.git"),
        ("/somewhere/here", ""),
    ],
)
def test_ci_installs_the_commit_of_a_checkout(tmp_path: Path, remote: str, wanted: str) -> None:
    """No index has the version of a checkout, and CI has no folder of this machine."""
    name = ["-c", "user.name=a", "-c", "user.email=a"]
    commands = (["init", "-q"], ["remote", "add", "origin", remote])
    for words in (*commands, [*name, "commit", "-q", "--allow-empty", "-m", "a"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    found, note = requirement.of_checkout(tmp_path)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tmp_path, check=True, capture_output=True, text=True
    ).stdout.strip()
    assert "secret" not in found + note
    if wanted:
        assert found == f"shardproof @ {wanted}@{head}" and head[:12] in note
    else:
        assert found == f"shardproof @ {tmp_path.as_uri()}"
        assert "only this machine has" in note and "--install" in note


def test_metadata_that_lies_in_a_checkout_is_no_installation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """setuptools leaves some there, without the source: as after an index."""

    class Metadata:
        def read_text(self, name: str) -> None:
            assert name == "direct_url.json"

    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Metadata())
    assert requirement.default() == requirement.of_checkout(ROOT)


def test_ci_installs_what_was_installed_from_elsewhere() -> None:
    direct = {"url": "https://host/r.git", "vcs_info": {"vcs": "git", "commit_id": COMMIT}}
    assert requirement.of_url(direct)[0] == f"shardproof @ git+https://host/r.git@{COMMIT}"
    wheel = "https://host/shardproof.whl"
    assert requirement.of_url({"url": wheel})[0] == f"shardproof @ {wheel}"


def test_hints_that_name_an_extra_need_no_index() -> None:
    """pip takes the installed distribution for 'shardproof[mpi]', whatever an index has."""
    words = ["-m", "pip", "install", "--no-index", "--dry-run", "shardproof[cluster]"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    told = done.stdout + done.stderr
    if "No matching distribution found for docker" not in told:
        assert done.returncode == 0, told
