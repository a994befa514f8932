"""A package that is not ours brings a backend: installed, listed, put on trial, and found out."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import shardproof
from plugin_environment import PLUGINS, ROOT, PluginEnvironment

pytestmark = pytest.mark.launches


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> PluginEnvironment:
    made = PluginEnvironment(tmp_path_factory.mktemp("plugin"))
    made.install("backend")
    return made


def run(environment: PluginEnvironment, *words: str) -> tuple[int, str]:
    done = environment.shardproof("run", *words, "-j", "1")
    return done.returncode, done.stdout + done.stderr


def verdicts_of(folder: Path) -> dict[str, str]:
    lines = map(json.loads, (folder / "cases.jsonl").read_text().splitlines())
    return {line["id"]: line["verdict"] for line in lines if line["kind"] == "case"}


@pytest.fixture(scope="module")
def passed(environment: PluginEnvironment) -> Path:
    """The run folder of three of its operations, which hold."""
    chosen = "all_reduce or gather] or send_recv]"
    code, told = run(
        environment, "backends", "--backend", "acme", "-k", chosen, "--results", "passed"
    )
    assert code == 0, told
    return environment.folder / "passed"


def test_it_is_listed_with_those_that_cannot_be_used(environment: PluginEnvironment) -> None:
    names = environment.shardproof("list", "backends").stdout.split()
    assert {"in_memory", "gloo", "acme", "acme_gone"} <= {*names}


def test_the_cells_of_the_scenario_move_to_it_and_pass(passed: Path) -> None:
    cells = verdicts_of(passed)
    assert {name.split("::")[2] for name in cells} == {"acme"}
    assert {name.partition("::")[0] for name in cells} == {
        *("backends[all_reduce]", "backends[all_gather]", "backends[gather]"),
        "backends[send_recv]",
    }
    assert {*cells.values()} == {"pass"}


def test_systems_train_on_it_with_exact_bytes(environment: PluginEnvironment) -> None:
    chosen = "sgd and (reference/naive_ddp or pytorch/fsdp2+kept)"
    words = "ddp-gpt", "fsdp-native", "--backend", "acme", "-k", chosen, "--results", "trained"
    code, told = run(environment, *words)
    assert code == 0, told
    assert {*verdicts_of(environment.folder / "trained").values()} == {"pass"}
    assert told.count("= formula") == 2


def test_a_sum_without_the_last_rank_is_found(environment: PluginEnvironment) -> None:
    words = "backends", "--backend", "acme_short", "-k", "all_reduce", "--results", "short"
    code, told = run(environment, *words)
    assert code == 1, told
    assert {*verdicts_of(environment.folder / "short").values()} == {"fail"}
    assert "collectives: all_reduce" in told


def test_an_entry_point_that_is_broken_is_named_with_its_package(
    environment: PluginEnvironment,
) -> None:
    code, told = run(environment, "backends", "--backend", "acme_gone")
    assert code == 2
    assert (
        "acme_collectives.trial:AcmeGone (entry point 'acme_gone' of acme-collectives 1.0, group "
        "shardproof.backends) has no 'AcmeGone'"
    ) in told
    assert "correct it, or uninstall acme-collectives" in told


def test_without_the_package_verify_says_what_to_install(
    environment: PluginEnvironment, passed: Path
) -> None:
    there = environment.shardproof("verify", str(passed))
    assert there.returncode == 0, there.stdout + there.stderr
    elsewhere = shardproof("verify", str(passed))
    assert elsewhere.returncode == 1
    told = " ".join((elsewhere.stdout + elsewhere.stderr).split())
    assert "backend 'acme' is not known here: install the package that registers it in" in told


def test_the_page_shows_the_package_as_it_is() -> None:
    page = (ROOT / "docs/add-a-backend.md").read_text()
    for name in ("pyproject.toml", "acme_collectives/trial.py"):
        assert (PLUGINS / "backend" / name).read_text().strip() in page
    library = (PLUGINS / "backend/acme_collectives/__init__.py").read_text()
    parts = re.findall(r"```python\n# acme_collectives/__init__\.py, in part\n(.*?)```", page, re.S)
    assert parts and all(part.strip() in library for part in parts)
