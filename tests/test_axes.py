"""The table of axes, and what a mesh with one more axis than today's gets from it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardproof import axes
from shardproof.axes import Axis

SUITE = Path(__file__).parents[1] / "suite"
#: Files of one axis each, which may name it.
COST_FILES = {
    "costs/pipeline.py": "pipe",
    "costs/tensor.py": "tensor",
    "costs/context/__init__.py": "context",
    "costs/context/exchange.py": "context",
    "costs/hybrid.py": "context",
    "costs/expert/__init__.py": "expert",
}
#: Files and folders in which a word that is also an axis means something else.
OTHER_WORDS = {
    "tensor": (
        # a strategy or a feature
        *("strategies.py", "costs/families.py"),
        # a form of calls, of hidden states and of pieces
        *("cases/kinds/calls", "backends", "workloads/gpt.py", "registry/answers.py"),
        # rows of records
        *("runs/records.py", "reproduce/reproduced.py", "report/limits.py"),
    ),
    # a strategy, a family, a feature and an option
    "context": ("strategies.py", "costs/families.py", "coverage/features.py"),
    # a strategy, a family, and a role
    "expert": (
        *("strategies.py", "costs/families.py", "contract.py", "workloads/mixture.py"),
        *("costs/shapes", "simulate/model.py"),
    ),
    # `shardproof run --shard`
    "shard": ("cluster/command.py", "commands/project.py"),
}
#: An axis that the suite does not have, with properties that no axis of today has together.
FURTHER = Axis("further", "state", role="further", own_samples=True, activations="passed on")


def literals(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every whole string in ``path`` that is the name of an axis."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and node.value in axes.names():
            yield node.lineno, node.value


def is_other_word(name: str, axis: str) -> bool:
    """Whether the file ``name`` of the suite may have the word ``axis``."""
    return any(f"{name}/".startswith(f"{place}/") for place in OTHER_WORDS.get(axis, ()))


def test_no_module_names_an_axis_but_the_table_and_the_costs_of_that_axis() -> None:
    wrong = []
    for path in SUITE.rglob("*.py"):
        name = path.relative_to(SUITE).as_posix()
        if name == "axes.py" or name.startswith("impls/"):
            continue
        for line, axis in literals(path):
            if COST_FILES.get(name) != axis and not is_other_word(name, axis):
                wrong.append(f"suite/{name}:{line} names the axis {axis!r}: ask shardproof.axes")
    assert not wrong, "\n".join(wrong)


def test_the_exceptions_are_needed() -> None:
    for axis, places in OTHER_WORDS.items():
        for place in places:
            files = [SUITE / place] if place.endswith(".py") else [*(SUITE / place).rglob("*.py")]
            assert any(axis == word for path in files for _, word in literals(path)), place


def test_a_mesh_of_today() -> None:
    mesh = {"pipe": 2, "replicate": 3, "shard": 2, "tensor": 1}
    assert axes.names() == ("pipe", "replicate", "shard", "context", "expert", "tensor")
    assert axes.parts(mesh, "layers") == 2
    assert axes.parts({"shard": 2}, "layers") == 1
    assert axes.sharing(mesh) == axes.summing(mesh) == ("replicate", "shard")
    assert axes.splitting(mesh) == axes.exchanging(mesh) == ("pipe", "tensor")
    assert axes.dividing(mesh) == ("pipe", "tensor")
    assert axes.combining(mesh) == ("tensor",)
    assert axes.joint_groups(mesh) == (("replicate", "shard"),)
    assert axes.joint_groups({"replicate": 2, "tensor": 2}) == ()
    assert axes.growing(["pipe", "replicate", "shard"]) == ("shard", "replicate")
    assert (axes.sharded(mesh), axes.replicated(mesh)) == (("shard",), ("replicate",))
    assert axes.replicas(4) == {"replicate": 4}
    assert {"replicate", "shard"} in map(set, axes.roles())


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        ({"replicate": 2, "shard": 3}, "replicate+shard"),
        ({"replicate": 1, "shard": 3}, "shard"),
        ({"replicate": 1, "shard": 1}, "replicate+shard"),
        ({"tensor": 2}, ""),
    ],
)
def test_the_name_of_a_group_leaves_axes_of_one_rank_out(mesh: dict[str, int], name: str) -> None:
    assert axes.joined(mesh, axes.summing(mesh)) == name


def test_a_mesh_that_cuts_positions() -> None:
    mesh = {"replicate": 2, "shard": 3, "context": 2}
    assert axes.sharing(mesh) == ("replicate", "shard")
    assert axes.summing(mesh) == axes.summing(mesh, "expert") == ("replicate", "shard", "context")
    assert axes.sharded(mesh) == ("shard", "context")
    assert axes.replicated(mesh) == ("replicate",)
    assert axes.joint_groups(mesh) == (
        ("replicate", "shard"),
        ("replicate", "shard", "context"),
        ("shard", "context"),
    )
    # Without shards its ranks hold copies, as replicas do.
    assert axes.sharded({"replicate": 2, "context": 2}) == ()
    assert axes.replicated({"replicate": 2, "context": 2}) == ("replicate", "context")
    assert axes.splitting(mesh) == axes.combining(mesh) == ("context",)
    assert axes.dividing(mesh) == ()


def test_a_mesh_that_cuts_experts() -> None:
    mesh = {"replicate": 2, "shard": 3, "context": 2, "expert": 2, "tensor": 2}
    assert axes.sharing(mesh) == ("replicate", "shard", "expert")
    assert axes.summing(mesh) == ("replicate", "shard", "context", "expert")
    assert axes.summing(mesh, "expert") == ("replicate", "shard", "context")
    assert axes.sharded(mesh, "expert") == ("shard", "context")
    assert axes.sharded(mesh) == ("shard", "context", "expert")
    assert ("shard", "context") in axes.joint_groups(mesh)
    assert axes.dividing(mesh) == ("expert", "tensor")
    assert axes.growing(mesh) == ("shard", "replicate")


def test_families_and_cost_models_ask_the_table() -> None:
    from shardproof.costs.families import FAMILIES
    from shardproof.costs.model_facts import ModelFacts, TensorFacts
    from shardproof.costs.zero import Zero1

    dense, expert = TensorFacts("w", (12,), "float64"), TensorFacts("e", (24,), "float64")
    mesh = {"replicate": 2, "shard": 3, "context": 2, "expert": 2}
    facts = ModelFacts(mesh, {}, (dense,), roles={"e": "expert"})
    assert facts.group(dense) == facts.group() == "replicate+shard+context+expert"
    assert facts.group(expert) == "replicate+shard+context"
    gradients = 12 * 8
    # D copies become one sum in D - 1 additions: D = 24 for dense parameters, 12 for experts.
    assert FAMILIES["ddp"].bytes(facts)[0] == 2 * (24 - 1) * gradients
    both = FAMILIES["ddp"].bytes(replace(facts, parameters=(dense, expert)))[0]
    assert both == 2 * (24 - 1) * gradients + 2 * (12 - 1) * 24 * 8
    # ZeRO shards over shard x context x expert; each of the two groups of 12 sends as much.
    flows = {flow.operation: flow for flow in Zero1(facts).flows()}
    assert flows["all_gather"].axis == "shard+context+expert"
    assert flows["all_gather"].bytes == 2 * (12 - 1) * gradients
    ranks = [facts.data_coordinate(rank) for rank in range(facts.world)]
    assert ranks[:4] == [0, 1, 0, 1]
    assert max(ranks) + 1 == 2 * 3 * 2


IMPORT_ALL = """
import importlib, pkgutil, sys
from shardproof import axes
sys.path.insert(0, {tests!r})
from test_axes import FURTHER
*outer, tensor = axes.AXES
axes.AXES = (*outer, FURTHER, tensor)
import shardproof
names = [m.name for m in pkgutil.walk_packages(shardproof.__path__, "shardproof.")]
skipped = ("shardproof.impls.", "shardproof.__main__")
for name in names:
    if not name.startswith(skipped) and not name.endswith("__main__"):
        importlib.import_module(name)
from shardproof.case import Case
from shardproof.scenarios import schema
from pydantic import TypeAdapter
read = TypeAdapter(schema.Mesh).validate_python
assert read({{"context": [2], "further": 2}}) == {{"context": [2], "further": [2]}}
from shardproof.costs.expression import FACTS
assert "context" in FACTS and "further" in FACTS
"""


def test_every_module_is_imported_with_one_more_axis() -> None:
    script = IMPORT_ALL.format(tests=str(Path(__file__).parent))
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        cwd=SUITE.parent,
    )
    assert done.returncode == 0, done.stderr
