"""``shardproof`` in a process of its own, as people start it, and in this one."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import pytest

from shardproof.commands import main

ROOT = Path(__file__).parents[2]
#: Runs each command of a list, and tells what it did in a file.
_IN_TURN = """
import json, sys
from pathlib import Path
from commands import here
from kept_fork_server import KeptForkServer
from shardproof.launch import pool
pool.ForkServer = KeptForkServer
done = [here(*words, cwd=Path.cwd()) for words in json.loads(sys.argv[1])]
KeptForkServer.end_all()
told = [(each.returncode, each.stdout, each.stderr) for each in done]
Path(sys.argv[2]).write_text(json.dumps(told), encoding="utf-8")
"""


def shardproof(
    *arguments: str,
    cwd: Path = ROOT,
    paths: Sequence[Path] = (),
    stdout: IO[str] | int = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    """What the command did; modules in ``paths`` can be imported, too."""
    return _done(_command(arguments), cwd, _environment(paths), stdout)


def here(
    *arguments: str, cwd: Path = ROOT, paths: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """As :func:`shardproof`, in this process, which has imported torch already."""
    return _here(main.main, ["shardproof", *arguments], [cwd, *paths])


def in_turn(
    *commands: Sequence[str], told: Path, cwd: Path, tree: Path = ROOT, python: str = sys.executable
) -> list[subprocess.CompletedProcess[str]]:
    """What each of ``commands`` did, one after the other in one process of ``python`` with the
    suite of ``tree``: each in a process of its own would import torch.  ``told``: a file for it.
    """
    path = os.pathsep.join([str(tree), str(tree / "tests" / "support")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    words = [python, "-c", _IN_TURN, json.dumps(commands), str(told)]
    subprocess.run(words, cwd=cwd, env=environment, check=True)
    done = json.loads(told.read_text(encoding="utf-8"))
    return [
        subprocess.CompletedProcess([*command], *each)
        for command, each in zip(commands, done, strict=True)
    ]


def study(
    *arguments: str, cwd: Path = ROOT, paths: Sequence[Path] = ()
) -> subprocess.CompletedProcess[str]:
    """What ``python -m tools.studies`` did, in this process."""
    from tools.studies.__main__ import studies

    run = functools.partial(main.main, studies)
    return _here(run, ["tools.studies", *arguments], [cwd, *paths])


def assert_refused(file: Path, text: str, line: int, says: str) -> None:
    """A scenario file of ``text`` is bad input, told in one sentence with its line."""
    file.write_text(text)
    done = here("run", str(file), "--dry-run")
    told = done.stdout + done.stderr
    assert done.returncode == 2, told
    assert f"{file}:{line}: " in told and says in told, told


def script(path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """What a Python program of a user did that imports the suite, in this process."""
    program = functools.partial(runpy.run_path, str(path), run_name="__main__")
    return _here(program, [str(path)], [cwd, path.parent])


def module(name: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """As :func:`script`, of what ``python -m name`` runs in ``cwd``."""
    program = functools.partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    return _here(program, [name], [cwd])


def pytest_here(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """What another pytest did in this process, with the settings of the repository ``cwd``."""
    words = ["-p", "no:cacheprovider", "--capture=no", *arguments]

    def program() -> None:
        raise SystemExit(pytest.main(words))

    return _here(program, words, [cwd])


def _here(
    program: Callable[[], object], words: list[str], paths: Sequence[Path]
) -> subprocess.CompletedProcess[str]:
    """What ``program`` did in the first of ``paths``; modules there are forgotten afterwards."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    # A test there may be called as one of the suite's own is, which is loaded already.
    hidden = {p.stem: sys.modules.pop(p.stem, None) for p in paths[0].glob("test_*.py")}
    known, code = {*sys.modules}, 0
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        patch.chdir(paths[0])
        patch.setattr(sys, "argv", words)
        patch.setenv("COLUMNS", "60")
        for path in paths:
            patch.syspath_prepend(str(path))
        pipe = signal.getsignal(signal.SIGPIPE)
        try:
            program()
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            signal.signal(signal.SIGPIPE, pipe)  # `list` lets a closed pipe end the process
    for name in {*sys.modules} - known:
        file = Path(getattr(sys.modules[name], "__file__", None) or ROOT)
        if not file.is_relative_to(ROOT) and {*paths} & {*file.parents}:
            del sys.modules[name]
    sys.modules.update({name: own for name, own in hidden.items() if own is not None})
    texts = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return subprocess.CompletedProcess(words, code, *texts)


def python(*arguments: str, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """What Python did that can import the suite; ``variables`` of its environment."""
    return _done([sys.executable, *arguments], cwd, _environment() | variables)


def _done(
    command: Sequence[str],
    cwd: Path,
    environment: dict[str, str],
    stdout: IO[str] | int = subprocess.PIPE,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


def started(*arguments: str, cwd: Path = ROOT) -> subprocess.Popen[str]:
    """The command as it runs, with both outputs in ``stdout``."""
    return subprocess.Popen(
        _command(arguments),
        cwd=cwd,
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "shardproof", *arguments]


def _environment(paths: Sequence[Path] = ()) -> dict[str, str]:
    """One thread, the suite of this checkout, and a window in which names might be cut."""
    path = os.pathsep.join(map(str, [*paths, ROOT]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "COLUMNS": "60"}
