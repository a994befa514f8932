"""A package that is not ours brings a backend: installed, listed, put on trial, and found out."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from commands import here
from plugin_environment import PLUGINS, ROOT, PluginEnvironment

pytestmark = [pytest.mark.launches, pytest.mark.timeout(600)]

#: Name -> what is typed where the package is installed; three of its operations hold.
COMMANDS = {
    "backends": ("list", "backends"),
    "passed": (
        *("run", "backends", "--backend", "acme", "-k", "all_reduce or gather] or send_recv]"),
        *("-j", "1", "--results", "passed"),
    ),
    "trained": (
        *("run", "ddp-gpt", "fsdp-native", "--backend", "acme"),
        *("-k", "sgd and (reference/naive_ddp or pytorch/fsdp2+kept)"),
        *("-j", "1", "--results", "trained"),
    ),
    "short": (
        *("run", "backends", "--backend", "acme_short", "-k", "all_reduce"),
        *("-j", "1", "--results", "short"),
    ),
    "gone": ("run", "backends", "--backend", "acme_gone", "-j", "1"),
    "verified": ("verify", "passed"),
}
Done = dict[str, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> PluginEnvironment:
    made = PluginEnvironment(tmp_path_factory.mktemp("plugin"))
    made.install("backend")
    return made


@pytest.fixture(scope="module")
def done(environment: PluginEnvironment) -> Done:
    return environment.shardproof(COMMANDS)


def told(done: subprocess.CompletedProcess[str]) -> str:
    """What it printed, in one line."""
    return " ".join((done.stdout + done.stderr).split())


def verdicts_of(folder: Path) -> dict[str, str]:
    lines = map(json.loads, (folder / "cases.jsonl").read_text().splitlines())
    return {line["id"]: line["verdict"] for line in lines if line["kind"] == "case"}


def test_it_is_listed_with_those_that_cannot_be_used(done: Done) -> None:
    assert {"in_memory", "gloo", "acme", "acme_gone"} <= {*done["backends"].stdout.split()}


def test_the_cells_of_the_scenario_move_to_it_and_pass(
    environment: PluginEnvironment, done: Done
) -> None:
    assert done["passed"].returncode == 0, told(done["passed"])
    cells = verdicts_of(environment.folder / "passed")
    assert {name.split("::")[2] for name in cells} == {"acme"}
    assert {name.partition("::")[0] for name in cells} == {
        *("backends[all_reduce]", "backends[all_gather]", "backends[gather]"),
        "backends[send_recv]",
    }
    assert {*cells.values()} == {"pass"}


def test_systems_train_on_it_with_exact_bytes(environment: PluginEnvironment, done: Done) -> None:
    assert done["trained"].returncode == 0, told(done["trained"])
    assert {*verdicts_of(environment.folder / "trained").values()} == {"pass"}
    assert told(done["trained"]).count("= formula") == 2


def test_a_sum_without_the_last_rank_is_found(environment: PluginEnvironment, done: Done) -> None:
    assert done["short"].returncode == 1, told(done["short"])
    assert {*verdicts_of(environment.folder / "short").values()} == {"fail"}
    assert "collectives: all_reduce" in told(done["short"])


def test_an_entry_point_that_is_broken_is_named_with_its_package(done: Done) -> None:
    assert done["gone"].returncode == 2
    assert (
        "acme_collectives.trial:AcmeGone (entry point 'acme_gone' of acme-collectives 1.0, group "
        "shardproof.backends) has no 'AcmeGone'"
    ) in told(done["gone"])
    assert "correct it, or uninstall acme-collectives" in told(done["gone"])


def test_without_the_package_verify_says_what_to_install(
    environment: PluginEnvironment, done: Done
) -> None:
    assert done["verified"].returncode == 0, told(done["verified"])
    elsewhere = here("verify", str(environment.folder / "passed"))
    assert elsewhere.returncode == 1
    wanted = "unknown backend 'acme': install the package that registers it in"
    assert wanted in told(elsewhere)


def test_the_page_shows_the_package_as_it_is() -> None:
    page = (ROOT / "docs/add-a-backend.md").read_text()
    for name in ("pyproject.toml", "acme_collectives/trial.py"):
        assert (PLUGINS / "backend" / name).read_text().strip() in page
    library = (PLUGINS / "backend/acme_collectives/__init__.py").read_text()
    parts = re.findall(r"```python\n# acme_collectives/__init__\.py, in part\n(.*?)```", page, re.S)
    assert parts and all(part.strip() in library for part in parts)
