"""Fixtures that several files of tests share."""

from __future__ import annotations

import functools
import re
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import patience
import pytest
import pytest_timeout
import read_once
from hypothesis import settings
from kept_fork_server import KeptForkServer
from kept_python import KeptPython

from shardproof.commands import main
from shardproof.launch import pool

# How long an example takes depends on the machine's load, which is no finding.
settings.register_profile("shardproof", deadline=None)
settings.load_profile("shardproof")


def pytest_configure(config: pytest.Config) -> None:
    """A shell without job control starts what it puts into the background with SIGINT ignored, and
    whatever that starts inherits this: the commands under test would never see their Ctrl-C.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--part 1/2``: of tests that take long, as in CI, where each part has its day."""
    parser.addoption("--part", metavar="N/M", help="run the N-th of M parts of the tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of other parts; the name of a test decides, so that others change nothing."""
    if not (part := config.getoption("--part", None)):
        return
    if not (found := re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", part)) or int(found[1]) > int(found[2]):
        raise pytest.UsageError(f"--part {part}: write N/M, the N-th of M parts, such as 1/2")
    number, parts = int(found[1]), int(found[2])
    chosen: dict[bool, list[pytest.Item]] = {True: [], False: []}
    for item in items:
        chosen[zlib.crc32(item.nodeid.encode()) % parts == number % parts].append(item)
    config.hook.pytest_deselected(items=chosen[False])
    items[:] = chosen[True]


@pytest.hookimpl(hookwrapper=True)
def pytest_collection() -> Iterator[None]:
    """Files of tests are compiled once for all runs, also where PYTHONDONTWRITEBYTECODE is set, as
    in many images: compiling them takes more than half of a collection.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", False)
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> bool | None:
    """A test's timeout leaves out the time in which other work had the cores."""
    if settings.method != "signal" or not patience.is_possible():
        return None
    end = functools.partial(pytest_timeout.timeout_sigalrm, item, settings)
    item.cancel_timeout = patience.set_timer(settings.timeout, end)  # type: ignore[attr-defined]
    return True


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tests leave the caches of whoever runs them alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("caches")))
        yield


@pytest.fixture(scope="session", autouse=True)
def scenarios_are_read_once() -> Iterator[None]:
    """By all commands that run in this process."""
    yield from read_once.reads()


@pytest.fixture(scope="session")
def one_fork_server() -> Iterator[None]:
    """Ends the fork servers that were kept for the next test."""
    yield
    KeptForkServer.end_all()


@pytest.fixture(scope="module", autouse=True)
def keeps_fork_servers(one_fork_server: None) -> Iterator[None]:
    """Pools of this process share a fork server.  Tests of the fork server itself override this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "ForkServer", KeptForkServer)
        yield


@pytest.fixture(scope="session")
def kept_python() -> Iterator[KeptPython]:
    """Has imported torch, for ranks of scripts."""
    python = KeptPython()
    yield python
    python.end()


@pytest.fixture
def forked_ranks(kept_python: KeptPython) -> Iterator[None]:
    """Ranks that ``shardproof watch`` starts in this process are forks of a kept Python."""
    with kept_python.lends_forks():
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes on one thread: ranks as threads would fight for the cores."""
    import torch  # most tests of commands do without

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """``shardproof`` in this process: exit code, output, errors."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["shardproof", *arguments])
        with pytest.raises(SystemExit) as end:
            main.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where archives are unpacked; empty again after every test, however it went."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    monkeypatch.setenv("TMPDIR", str(place))
    yield place
    assert list(place.iterdir()) == []
