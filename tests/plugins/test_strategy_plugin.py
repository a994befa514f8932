"""A package that is not ours brings a strategy: installed, listed, run, and held to the byte."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from commands import here
from plugin_environment import PLUGINS, ROOT, PluginEnvironment

pytestmark = [pytest.mark.launches, pytest.mark.timeout(600)]

#: Three replicas do not divide the gradients: the buffer is padded.
CASES = "rows and replicate3"
SCENARIO = (
    "name: flat\nabout: its own bytes\nsees: [bytes]\nworkload: {name: charnames_gpt}\n"
    "matrix: {implementation: flat/ddp, backend: gloo, mesh: {replicate: 2}, optimizer: sgd,"
    " clip: null, lane: fp64}\nchecks: [traffic]\n"
    "expect: {traffic: 'flat_ddp.payload_bytes'}\n"
)
JUDGED = ("run", "no-layer-norm", "--tier", "full", "-k", CASES)
#: Name -> what is typed where the package is installed.
COMMANDS = {
    "strategies": ("list", "strategies"),
    "impls": ("list", "impls"),
    "passes": (*JUDGED, "--impl", "flat/ddp", "--results", "passes"),
    "fails": (*JUDGED, "--impl", "flat/twice", "--results", "fails"),
    "formula": ("run", "flat.yaml", "--results", "formula"),
    "misspelt": ("run", "misspelt.yaml", "--dry-run"),
    "verified": ("verify", "passes"),
}
Done = dict[str, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> PluginEnvironment:
    made = PluginEnvironment(tmp_path_factory.mktemp("plugin"))
    made.install("strategy")
    (made.folder / "flat.yaml").write_text(SCENARIO)
    misspelt = SCENARIO.replace("flat_ddp.payload", "flat_dpd.payload")
    (made.folder / "misspelt.yaml").write_text(misspelt)
    return made


@pytest.fixture(scope="module")
def done(environment: PluginEnvironment) -> Done:
    return environment.shardproof(COMMANDS)


def told(done: subprocess.CompletedProcess[str]) -> str:
    """What it printed, in one line."""
    return " ".join((done.stdout + done.stderr).split())


def checks_of(run: Path) -> dict[str, dict[str, object]]:
    """The checks of the one case of ``run`` that was judged, by name."""
    lines = map(json.loads, (run / "cases.jsonl").read_text().splitlines())
    (result,) = (line for line in lines if line["kind"] == "case" and line["verdict"] != "skip")
    return {check["check"]: check for check in result["checks"]}


def test_it_is_listed_beside_the_suites_own(done: Done) -> None:
    assert {"ddp", "zero2", "flat_ddp"} <= {*done["strategies"].stdout.split()}
    assert "flat/ddp" in done["impls"].stdout.split()


def test_its_bytes_and_memory_are_checked_exactly_and_pass(
    environment: PluginEnvironment, done: Done
) -> None:
    assert done["passes"].returncode == 0, told(done["passes"])
    checks = checks_of(environment.folder / "passes")
    assert {checks[name]["status"] for name in ("traffic", "memory", "active")} == {"pass"}
    figures = checks["traffic"]["figures"]
    assert isinstance(figures, dict)
    assert figures["formula"] == "flat_ddp.payload_bytes"
    assert int(figures["bytes_sent"]) == int(figures["bytes_expected"]) > 0
    held = checks["memory"]["figures"]
    assert isinstance(held, dict)
    assert held["strategy"] == "flat_ddp"
    assert held["bytes_held"] == held["bytes_promised"] > held["bytes_whole"], "it is padded"


def test_twice_the_bytes_fail_in_traffic(environment: PluginEnvironment, done: Done) -> None:
    assert done["fails"].returncode == 1, told(done["fails"])
    checks = checks_of(environment.folder / "fails")
    assert [name for name, check in checks.items() if check["status"] == "fail"] == ["traffic"]
    assert "flat_ddp promises 277,776: 2 times as many" in told(done["fails"])


def test_a_formula_of_a_scenario_names_it(done: Done) -> None:
    assert done["formula"].returncode == 0, told(done["formula"])
    assert done["misspelt"].returncode == 2
    assert "did you mean flat_ddp.payload_bytes?" in told(done["misspelt"])


def test_without_the_package_verify_says_what_to_install(
    environment: PluginEnvironment, done: Done
) -> None:
    assert done["verified"].returncode == 0, told(done["verified"])
    elsewhere = here("verify", str(environment.folder / "passes"))
    assert elsewhere.returncode == 1
    assert "unknown strategy 'flat_ddp': install the package" in told(elsewhere)


def test_the_page_shows_the_package_as_it_is() -> None:
    page = (ROOT / "docs/strategy-from-outside.md").read_text()
    for name in ("pyproject.toml", "flat_ddp_costs.py"):
        assert (PLUGINS / "strategy" / name).read_text().strip() in page
    for part in re.findall(r"```python\n# flat_ddp\.py, in part\n(.*?)```", page, re.DOTALL):
        assert part.strip() in (PLUGINS / "strategy/flat_ddp.py").read_text()
