"""Ways in and out: torchrun, one import, bad input, nothing to judge, Ctrl-C, a killed parent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import watched_script
from commands import ROOT, python, started

from shardproof.launch.process_control import state_of
from shardproof.watch.rank import Settings

pytestmark = pytest.mark.launches

IMPORT = ("import os\n", "import shardproof.watch\nimport os\n")


def torchrun(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script under the user's own launcher, on two ranks."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, "--master-port", port, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def report_in(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("results/*-watch/report.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


#: Spawned, they run the script's first lines with the rank's environment.
WORKERS = (
    "        x, y = batch(generator)\n",
    "        x, y = batch(generator)\n"
    "        if step == 2:\n"
    "            data = torch.utils.data.TensorDataset(x)\n"
    "            context = 'spawn'\n"
    "            for _ in torch.utils.data.DataLoader(\n"
    "                data, num_workers=1, multiprocessing_context=context\n"
    "            ):\n"
    "                pass\n",
)


@pytest.mark.parametrize("way", ["import", "module"])
def test_under_torchrun(tmp_path: Path, way: str) -> None:
    """Imported, with workers of a loader, which are no ranks."""
    if way == "import":
        watched_script.write(tmp_path, IMPORT, WORKERS)
        done = torchrun(tmp_path, "train.py")
    else:
        watched_script.write(tmp_path)
        done = torchrun(tmp_path, "-m", "shardproof.watch", "train.py")
    assert done.returncode == 0, done.stderr
    report = report_in(tmp_path)
    assert report["verdict"] == "pass" and {*report["ranks"]} == {"0", "1"}
    assert done.stderr.count("pass: equal on all replicas: initial parameters") == 1, done.stderr
    assert report["ranks"]["1"]["optimizers"][0]["compared"][-1] == 12
    assert len([*tmp_path.glob("results/*")]) == 1 and done.stderr.count("evidence: ") == 1


def test_a_fault_under_torchrun_is_told_and_changes_no_exit_code(tmp_path: Path) -> None:
    watched_script.write(tmp_path, IMPORT, ("lr=0.05", "lr=0.05 * (1 + rank)"))
    done = torchrun(tmp_path, "train.py")
    assert done.returncode == 0, done.stderr
    assert "fail: hyperparameters differ at step 1: lr of group 0" in done.stderr
    assert report_in(tmp_path)["verdict"] == "fail"


def test_a_rank_that_raises_under_torchrun_is_named(tmp_path: Path, command: Any) -> None:
    step = "        optimizer.step()\n"
    raising = step + "        if rank == 1 and step == 5:\n            raise ValueError('bad')\n"
    watched_script.write(tmp_path, IMPORT, (step, raising))
    done = torchrun(tmp_path, "train.py")
    assert done.returncode == 1
    assert "rank 1 raised ValueError: bad in main" in done.stderr, done.stderr
    (folder,) = tmp_path.glob("results/*-watch")
    code, out, _ = command("watch", "--judge", str(folder))
    assert code == 1 and "rank 1 raised ValueError: bad in main" in out


def test_every_attempt_of_torchrun_has_its_own_folder() -> None:
    given = {"SHARDPROOF_WATCH_RESULTS": "kept/a-watch", "TORCHELASTIC_RESTART_COUNT": "0"}
    again = given | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert Settings.read(given).folder == Path("kept/a-watch")
    assert Settings.read(again).folder == Path("kept/a-restart1-watch")


RESTARTED = "what ranks did before they were restarted (once): this is the last attempt"


def test_a_restart_by_torchrun_is_watched_and_told(tmp_path: Path) -> None:
    """Each attempt has its report; the first names the fault, the last says that it is a later."""
    step = "        optimizer.step()\n"
    fails = "rank == 1 and step == 5 and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    raising = f"{step}        if {fails}:\n            raise ValueError('bad')\n"
    watched_script.write(tmp_path, IMPORT, (step, raising))
    # In the launcher's own store a second attempt would find the first one's addresses, watched or
    # not: gloo cannot connect then.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = torchrun(tmp_path, "--standalone", "--max-restarts", "1", "train.py", **own_store)
    assert done.returncode == 0, done.stderr
    first, last = sorted(tmp_path.glob("results/*-watch"), key=lambda path: len(path.name))
    assert last.name == f"{first.name.removesuffix('-watch')}-restart1-watch"
    reports = [json.loads((folder / "report.json").read_text()) for folder in (first, last)]
    assert reports[0]["reason"].startswith("rank 1 raised ValueError: bad in main")
    assert reports[1]["verdict"] == "pass" and RESTARTED in reports[1]["cannot_see"], done.stderr
    assert RESTARTED not in reports[0]["cannot_see"] and RESTARTED in done.stderr
    assert reports[1]["ranks"]["1"]["optimizers"][0]["compared"][-1] == 12


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ("sys.orig_argv", 0, RESTARTED),
        ("[sys.executable, '-c', 'pass']", 3, "left Python at once, as os._exit and os.exec do"),
    ],
    ids=["watched again", "no longer watched"],
)
def test_a_script_that_restarts_itself(
    command: Any, tmp_path: Path, words: str, code: int, says: str
) -> None:
    again = (
        "    main()\n",
        "    import sys\n"
        "    if 'AGAIN' not in os.environ:\n"
        "        os.environ['AGAIN'] = '1'\n"
        f"        os.execv(sys.executable, {words})\n"
        "    main()\n",
    )
    script = watched_script.write(tmp_path, again)
    done, out, err = command("watch", str(script), "--results", str(tmp_path / "run"))
    assert done == code and says in out, out + err


@pytest.mark.usefixtures("forked_ranks")
def test_records_of_another_run_are_not_mixed(command: Any, tmp_path: Path) -> None:
    """The same folder twice: the second run is told so, by every rank that was there before."""
    kept = str(tmp_path / "kept")
    script = watched_script.write(tmp_path, IMPORT, ("steps=12", "steps=1"))
    code, out, err = command("watch", str(script), "--results", kept)
    assert code == 0, out + err
    before = (tmp_path / "kept/rank0.json").read_text()
    done = torchrun(tmp_path, "train.py", SHARDPROOF_WATCH_RESULTS=kept)
    assert done.returncode == 1 and "holds the records of another run" in done.stderr
    assert (tmp_path / "kept/rank0.json").read_text() == before


def test_without_a_launcher_the_import_does_nothing(tmp_path: Path) -> None:
    program = "import sys, shardproof.watch; assert 'torch' not in sys.modules"
    variables = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment = {**variables, "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=60
    )
    assert list(tmp_path.iterdir()) == []


def test_the_module_needs_a_launcher(tmp_path: Path) -> None:
    done = python("-m", "shardproof.watch", "train.py", cwd=tmp_path)
    assert done.returncode == 2 and "RANK and WORLD_SIZE are not set" in done.stderr


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    ("text", "ranks", "says"),
    [
        (watched_script.CLEAN, 1, "one rank has no replicas"),
        ("print('no group')\n", 2, "no rank called init_process_group"),
        (
            "import torch.distributed as dist\n"
            "dist.init_process_group('gloo')\ndist.barrier()\ndist.destroy_process_group()\n",
            2,
            "no step of an optimizer of torch.optim was seen",
        ),
    ],
    ids=["one rank", "no group", "no step"],
)
def test_nothing_to_judge(command: Any, tmp_path: Path, text: str, ranks: int, says: str) -> None:
    script = watched_script.write(tmp_path, text=text)
    results = str(tmp_path / "run")
    code, out, err = command("watch", str(script), "--nproc", str(ranks), "--results", results)
    assert code == 3 and says in out, out + err


@pytest.mark.usefixtures("forked_ranks")
def test_arguments_of_the_script_are_its_own(command: Any, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("WORD = 'beside the script'\n")
    text = (
        "import sys, helper\nopen('told', 'a').write(' '.join([*sys.argv[1:], helper.WORD, '']))\n"
        "assert __name__ == '__main__' and sys.argv[0].endswith('train.py')\n"
    )
    script = watched_script.write(tmp_path, text=text.replace("'told'", repr(f"{tmp_path}/told")))
    words = ["--nproc", "1", "--results", str(tmp_path / "run"), "--", "--epochs", "3"]
    code, out, err = command("watch", str(script), *words)
    assert code == 3, out + err
    assert (tmp_path / "told").read_text() == "--epochs 3 beside the script "


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name a script: shardproof watch train.py"),
        (["no_such.py"], "no such script (no_such.py)"),
        (["SCRIPT", "--nproc", "3", "--replicas", "2"], "3 ranks cannot be cut into sets of 2"),
        (["SCRIPT", "--results", "FULL"], "--results: the folder is not empty"),
        (["--judge", "no_such"], "no such folder (no_such)"),
        (["--judge", "EMPTY"], "no record of a watched run"),
        (["SCRIPT", "--judge", "FULL"], "--judge takes no script"),
        (
            ["SCRIPT", "--epochs", "3"],
            "this is not an option of shardproof watch (--epochs) - Options of the script stand",
        ),
        (["SCRIPT", "--nprocs", "3"], "(--nprocs) - did you mean --nproc? Options of the script"),
        (["SCRIPT", "--replicas", "foo"], "--replicas: 'foo' is not a rank (foo) - write all, a"),
        (["SCRIPT", "--replicas", "0,1/"], "--replicas: a set is empty (0,1/) - write all, a"),
        (["--judge", "DAMAGED"], "rank0.json: damaged"),
    ],
)
def test_bad_input_is_refused(command: Any, tmp_path: Path, words: list[str], says: str) -> None:
    for name in ("FULL", "EMPTY", "DAMAGED"):
        (tmp_path / name).mkdir()
    (tmp_path / "FULL" / "file").write_text("of another run")
    (tmp_path / "DAMAGED" / "rank0.json").write_text('{"rank": 0, "wor')
    (tmp_path / "SCRIPT").write_text("")
    given = [str(tmp_path / word) if (tmp_path / word).exists() else word for word in words]
    code, out, err = command("watch", *given)
    assert code == 2 and says in err, out + err


@pytest.mark.usefixtures("forked_ranks")
def test_a_script_that_does_not_take_its_arguments_is_told(command: Any, tmp_path: Path) -> None:
    """``argparse`` ends it: whose option it was, and what its parser said."""
    parse = "    import argparse\n    argparse.ArgumentParser().parse_args()\n"
    script = watched_script.write(
        tmp_path, ("def main(steps=12):\n", f"def main(steps=12):\n{parse}")
    )
    results = str(tmp_path / "run")
    code, out, err = command("watch", str(script), "--results", results, "--", "--lrr", "3")
    says = (
        "crash: rank 0 exited with code 2: the script rejected its arguments: "
        "unrecognized arguments: --lrr 3"
    )
    assert code == 1 and says in out, out + err


WAITS = (
    "        optimizer.zero_grad()\n",
    "        optimizer.zero_grad()\n        time.sleep(0.2)\n",
)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_rank_outlives_its_parent(tmp_path: Path, signum: signal.Signals) -> None:
    script = watched_script.write(tmp_path, WAITS, ("steps=12", "steps=10_000"))
    results = tmp_path / "run"
    parent = started("watch", str(script), "--results", str(results))
    try:
        ranks = _ranks(results)
        parent.send_signal(signum)
        out, _ = parent.communicate()
    finally:
        parent.kill()
    until = time.monotonic() + 20
    while any(state_of(pid) != "Z" for pid in ranks) and time.monotonic() < until:
        time.sleep(0.05)
    assert [state_of(pid) for pid in ranks] == ["Z", "Z"]
    if signum != signal.SIGKILL:
        assert parent.returncode == 130, out
        assert "initial parameters" in out  # what was compared until then is told


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_before_the_first_record_is_no_bad_input(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: Any, signum: signal.Signals
) -> None:
    """The ranks are just being started."""
    script = watched_script.write(tmp_path)

    def start(*_: object) -> None:
        os.kill(os.getpid(), signum)

    monkeypatch.setattr("shardproof.watch.launch.run", start)
    code, out, err = command("watch", str(script), "--results", str(tmp_path / "run"))
    assert code == 130 and "before any rank left a record" in out, out + err


def _ranks(results: Path) -> list[int]:
    """Pids of both ranks, once they have compared something."""
    until = time.monotonic() + 100
    while time.monotonic() < until:
        found = []
        for path in results.glob("rank?.json"):
            record = json.loads(path.read_text())
            if any(seen["counts"] for seen in record["optimizers"]):
                found.append(record["pid"])
        if len(found) == 2:
            return found
        time.sleep(0.1)
    raise AssertionError("the ranks never compared anything")
