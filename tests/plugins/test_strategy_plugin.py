"""A package that is not ours brings a strategy: installed, listed, run, and held to the byte."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from commands import shardproof
from plugin_environment import PLUGINS, ROOT, PluginEnvironment

pytestmark = pytest.mark.launches

#: Three replicas do not divide the gradients: the buffer is padded.
CASES = "rows and replicate3"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> PluginEnvironment:
    made = PluginEnvironment(tmp_path_factory.mktemp("plugin"))
    made.install("strategy")
    return made


def checks_of(run: Path) -> dict[str, dict[str, object]]:
    """The checks of the one case of ``run`` that was judged, by name."""
    lines = map(json.loads, (run / "cases.jsonl").read_text().splitlines())
    (result,) = (line for line in lines if line["kind"] == "case" and line["verdict"] != "skip")
    return {check["check"]: check for check in result["checks"]}


def run(environment: PluginEnvironment, system: str, folder: str) -> tuple[int, str]:
    words = ("run", "no-layer-norm", "--tier", "full", "-k", CASES, "--impl", system)
    done = environment.shardproof(*words, "--results", folder)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def passed(environment: PluginEnvironment) -> Path:
    """The folder of a run of the strategy, all of whose cases hold."""
    code, told = run(environment, "flat/ddp", "passes")
    assert code == 0, told
    return environment.folder / "passes"


def test_it_is_listed_beside_the_suites_own(environment: PluginEnvironment) -> None:
    names = environment.shardproof("list", "strategies").stdout.split()
    assert {"ddp", "zero2", "flat_ddp"} <= {*names}
    assert "flat/ddp" in environment.shardproof("list", "impls").stdout.split()


def test_its_bytes_and_memory_are_checked_exactly_and_pass(passed: Path) -> None:
    checks = checks_of(passed)
    assert {checks[name]["status"] for name in ("traffic", "memory", "active")} == {"pass"}
    figures = checks["traffic"]["figures"]
    assert isinstance(figures, dict)
    assert figures["formula"] == "flat_ddp.payload_bytes"
    assert int(figures["bytes_sent"]) == int(figures["bytes_expected"]) > 0
    held = checks["memory"]["figures"]
    assert isinstance(held, dict)
    assert held["strategy"] == "flat_ddp"
    assert held["bytes_held"] == held["bytes_promised"] > held["bytes_whole"], "it is padded"


def test_twice_the_bytes_fail_in_traffic(environment: PluginEnvironment) -> None:
    code, told = run(environment, "flat/twice", "fails")
    assert code == 1, told
    checks = checks_of(environment.folder / "fails")
    assert [name for name, check in checks.items() if check["status"] == "fail"] == ["traffic"]
    assert "flat_ddp promises 277,776: 2 times as many" in told


def test_a_formula_of_a_scenario_names_it(environment: PluginEnvironment) -> None:
    scenario = environment.folder / "flat.yaml"
    scenario.write_text(
        "name: flat\nabout: its own bytes\nsees: [bytes]\nworkload: {name: charnames_gpt}\n"
        "matrix: {implementation: flat/ddp, backend: gloo, mesh: {replicate: 2}, optimizer: sgd,"
        " clip: null, lane: fp64}\nchecks: [traffic]\n"
        "expect: {traffic: 'flat_ddp.payload_bytes'}\n"
    )
    done = environment.shardproof("run", str(scenario), "--results", "formula")
    assert done.returncode == 0, done.stdout + done.stderr
    scenario.write_text(scenario.read_text().replace("flat_ddp.payload", "flat_dpd.payload"))
    done = environment.shardproof("run", str(scenario), "--dry-run")
    assert done.returncode == 2
    assert "did you mean flat_ddp.payload_bytes?" in done.stdout + done.stderr


def test_without_the_package_verify_says_what_to_install(
    environment: PluginEnvironment, passed: Path
) -> None:
    there = environment.shardproof("verify", str(passed))
    assert there.returncode == 0, there.stdout + there.stderr
    elsewhere = shardproof("verify", str(passed))
    assert elsewhere.returncode == 1
    told = " ".join((elsewhere.stdout + elsewhere.stderr).split())
    assert "strategy 'flat_ddp' is not known here: install the package" in told


def test_the_page_shows_the_package_as_it_is() -> None:
    page = (ROOT / "docs/strategy-from-outside.md").read_text()
    for name in ("pyproject.toml", "flat_ddp_costs.py"):
        assert (PLUGINS / "strategy" / name).read_text().strip() in page
    for part in re.findall(r"```python\n# flat_ddp\.py, in part\n(.*?)```", page, re.DOTALL):
        assert part.strip() in (PLUGINS / "strategy/flat_ddp.py").read_text()
