"""docs/strategies/: a page for every implementation, whose snippets and commands run."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import shardproof
from shardproof import registry
from shardproof.backends import BACKENDS
from shardproof.by_path import import_module
from shardproof.commands import main as command_line
from shardproof.training import places

ROOT = Path(__file__).parents[2]
#: Most lines of a page: one screen of a large monitor.
MOST = 100


made: Any = import_module(str(ROOT / "docs/make_strategies.py"))
TRAINED = [name for name in made.names() if "training" in made.entries()[name]]
THREADS = [name for name in TRAINED if not name.startswith("deepspeed/")]
WRAPPED = [name for name in TRAINED if made.entries()[name].get("wrap")]


@pytest.fixture(scope="module")
def pages() -> Mapping[Path, str]:
    found: Mapping[Path, str] = made.pages()
    return found


def test_every_implementation_has_an_entry() -> None:
    assert sorted(made.names()) == sorted(registry.names())


def test_the_committed_pages_are_what_the_generator_makes(pages: Mapping[Path, str]) -> None:
    stale = [path.name for path, text in pages.items() if path.read_text() != text]
    assert not stale, "run `make generated`"
    assert {*made.FOLDER.glob("*.md")} == {*pages} - {made.INDEX}


def test_every_page_fits_on_a_screen(pages: Mapping[Path, str]) -> None:
    long = {path.name: text.count("\n") for path, text in pages.items() if path.stem != "index"}
    assert {name: lines for name, lines in long.items() if lines > MOST} == {}


def test_every_strategy_of_the_suite_has_all_parts(pages: Mapping[Path, str]) -> None:
    parts = ("Use it", "Memory, communication, computation", "Speed", "When to use it", "Limits")
    for name in made.names():
        text = pages[made.FOLDER / made.file_of(name)]
        needed = parts if name.startswith("reference/") else ("Use it", "Speed", "Limits")
        assert [part for part in needed if f"## {part}\n" not in text] == [], name
        assert "**Best for:**" in text and "## Planted faults" in text
        assert not name.startswith("reference/") or "```text" in text, "a picture"


def test_the_first_page_has_every_trained_strategy_and_five_rows_of_advice() -> None:
    text = made.INDEX.read_text()
    for name, entry in made.entries().items():
        if name.startswith("reference/") and "estimate" in entry:
            assert f"[{entry['title']}](strategies/{made.file_of(name)})" in text
    assert len(made.entries()["guide"]) == 5
    assert len(re.findall(r"^    shardproof estimate ", text, re.MULTILINE)) == 5


def test_every_example_of_the_guide_fits() -> None:
    for one in made.entries()["guide"]:
        assert made.estimate(" ".join(one["command"].split()))["fits"] in (True, "fits"), one


def test_measured_bytes_are_those_of_the_formulas() -> None:
    """The cases judge it too; here that a page cannot show a figure beside another one."""
    for name, one in made.measured().items():
        for formula, found in (("promised", "held"), ("expected", "sent")):
            if one[formula] is not None and one[found] is not None:
                assert one[found] == one[formula], (name, found)


def test_every_measured_case_is_of_the_scenario() -> None:
    done = CliRunner().invoke(
        command_line.app, ["list", "cases", made.SCENARIO, "--tier", "full"], catch_exceptions=False
    )
    assert {*done.output.split()} >= {one["case"] for one in made.measured().values()}
    entries = [made.entries()[name] for name in made.names()]
    used = {entry["case"] for entry in entries if "case" in entry}
    used |= {key for entry in entries for key in entry.get("more_cases", ())}
    assert used == {*made.measured()}


def _commands() -> list[str]:
    texts = [path.read_text() for path in sorted(made.FOLDER.glob("*.md"))]
    found = [re.findall(r"^    (shardproof .*)$", text, re.MULTILINE) for text in texts]
    return sorted({line for lines in found for line in lines})


@pytest.mark.parametrize("command", _commands())
def test_a_command_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "run":
        words += ["--dry-run"]
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(command_line.app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output


def _setting() -> dict[str, Any]:
    """What the tutorial defines: a model, a loss and data."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.GELU())))
    inputs = torch.randn(32, 8)
    data = DataLoader(TensorDataset(inputs, inputs.argmax(1)), batch_size=16)
    return {"model": model, "loss": nn.functional.cross_entropy, "data": data}


def _follow(name: str, steps: int = 2) -> Any:
    page = (made.FOLDER / made.file_of(name)).read_text()
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = _setting()
    exec(code.replace("steps=100", f"steps={steps}"), names)
    return names["result"]


@pytest.mark.parametrize("name", THREADS)
def test_a_snippet_trains(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDPROOF_BACKEND", "in_memory")
    assert len(_follow(name).losses) == 2


@pytest.mark.launches
@pytest.mark.parametrize("name", sorted({*TRAINED} - {*THREADS}))
def test_a_snippet_of_processes_trains(name: str) -> None:
    pytest.importorskip("deepspeed")
    assert len(_follow(name).losses) == 2


@pytest.mark.parametrize("name", WRAPPED)
def test_a_loop_of_the_readers_own_trains(name: str) -> None:
    page = (made.FOLDER / made.file_of(name)).read_text()
    [code] = re.findall(r"In your own loop: `wrapped = (.*)`\.", page)
    given = _setting()

    def program(world: Any) -> float:
        model = copy.deepcopy(given["model"])
        wrapped = eval(code, {"shardproof": shardproof, "model": model})
        inputs, targets = next(iter(given["data"]))
        loss = given["loss"](wrapped(inputs), targets)
        loss.backward()
        wrapped.step()
        return float(loss.detach())

    ranks = 2 if "tensor" in name else 4
    assert all(places.run(BACKENDS["in_memory"], ranks, program, timeout=60.0))
