"""Records of strategies: the suite's own are whole; those of packages are checked when used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import here

from shardproof import axes, by_path, registry, strategies
from shardproof.costs import cost_model_class
from shardproof.costs.families import FAMILIES, family_of
from shardproof.costs.model import CostModel
from shardproof.errors import InputError
from shardproof.registry.declaration import Declaration
from shardproof.strategies import BrokenStrategy, in_tree

RECORD = """
from shardproof.strategies import Strategy

STRATEGY = Strategy(
    name="guest",
    cost_model="guest_strategy:Costs",
    family="ddp",
    profile=frozenset({"clipping"}),
    axes=("replicate",),
)


def __getattr__(name):
    if name != "Costs":
        raise AttributeError(name)
    from shardproof.costs.ddp import DDP

    return type("Costs", (DDP,), {"strategy": "guest", "source": "a guest's"})
"""
SYSTEM = """
from shardproof.impls.plain import Plain


class System(Plain):
    strategy = "guest"
"""

Install = Callable[..., None]


def forget() -> None:
    """What this process knows of installed packages."""
    for known in (by_path.entry_points, strategies.registered, cost_model_class):
        known.cache_clear()


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts packages on the path that register strategies; they are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)

    def installed(text: str, name: str = "guest", package: str = "guest-package") -> None:
        (tmp_path / "guest_strategy.py").write_text(text)
        (tmp_path / "guest_system.py").write_text(SYSTEM)
        info = tmp_path / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        entry = f"[{strategies.GROUP}]\n{name} = guest_strategy:STRATEGY\n"
        (info / "entry_points.txt").write_text(entry)
        importlib.invalidate_caches()
        forget()

    yield installed
    importlib.sys.modules.pop("guest_strategy", None)
    monkeypatch.undo()
    forget()


# --------------------------------------------------------------------------------- the suite's own


@pytest.mark.parametrize("name", in_tree())
def test_every_record_is_whole(name: str) -> None:
    record, cost_model = strategies.of(name), cost_model_class(name)
    assert cost_model.strategy == record.name == name
    assert cost_model.source
    assert {*record.axes} <= {*axes.names()}
    assert not record.family or record.family in FAMILIES
    assert not cost_model.textbook or strategies.of(cost_model.textbook).is_known


def test_families_are_named_as_the_strategies_that_they_are_the_bounds_of() -> None:
    assert {record.family for record in in_tree().values()} == {"", *FAMILIES}
    for name in FAMILIES:
        assert in_tree()[name].family == name
    assert family_of("fsdp", {"sharding_strategy": "NO_SHARD"}) is FAMILIES["ddp"]
    assert family_of("fsdp2", {"sharding_strategy": "FULL_SHARD"}) is FAMILIES["zero3"]
    assert family_of("a name of my own", {}) is None


@pytest.mark.parametrize(
    "name", [name for name in registry.names() if name.startswith(("reference/", "pytorch/"))]
)
def test_implementations_use_axes_of_their_strategy(name: str) -> None:
    system = registry.load(name)
    record = strategies.of(system.strategy)
    try:
        declared = Declaration.of(system, {})
    except ValueError:  # it takes options
        return
    if record.is_known and system.depth == "layout":
        assert {*declared.axes} <= {*record.axes}


def test_an_unknown_name_has_an_empty_record() -> None:
    record = strategies.of("nobody's")
    assert not record.is_known
    assert not record.profile
    with pytest.raises(LookupError):
        cost_model_class("nobody's")


# ------------------------------------------------------------------------------ those of packages


def test_a_package_adds_a_strategy(install: Install) -> None:
    install(RECORD)
    assert strategies.registered_names() == ["guest"]
    assert strategies.of("guest").family == "ddp"
    assert issubclass(cost_model_class("guest"), CostModel)
    done = here("list", "strategies")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [*in_tree(), "guest"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import nothing_like_it\n", "cannot be imported: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "cannot be imported: SystemExit: 3"),
        ("STRATEGIES = []\n", "has no 'STRATEGY' in guest_strategy"),
        ("STRATEGY = 'guest'\n", "is a str, not a shardproof.strategies.Strategy"),
        (RECORD.replace('name="guest"', 'name="gest"'), "is called 'gest' in its record"),
        (RECORD.replace('cost_model="guest_strategy:Costs",', ""), "has no cost_model"),
        (
            RECORD.replace('"clipping"', '"cliping"'),
            "has profile 'cliping': did you mean clipping?",
        ),
        (RECORD.replace('family="ddp"', 'family="dpd"'), "has family 'dpd': did you mean ddp?"),
        (RECORD.replace('("replicate",)', '("replicas",)'), "has axes 'replicas'"),
        (RECORD.replace(":Costs", ":Cost"), "has no 'Cost' in guest_strategy"),
        (RECORD.replace("(DDP,)", "()"), "is not a subclass of shardproof.costs.model.CostModel"),
        (
            RECORD.replace("ddp import DDP", "model import CostModel as DDP"),
            "does not define: flows",
        ),
    ],
    ids=lambda text: text[:40] if len(text) < 60 else "record",
)
def test_a_broken_one_is_told_where_it_is_used_and_nowhere_else(
    install: Install, text: str, says: str
) -> None:
    install(text)
    assert strategies.of("zero2").is_known, "others are not asked for it"
    with pytest.raises(BrokenStrategy) as caught:
        cost_model_class("guest")
    (problem,) = caught.value.problems
    assert problem.what.startswith("strategy 'guest' of guest-package 1.0 ")
    assert says in str(problem)
    assert "(guest_strategy:STRATEGY)" in str(problem)
    assert "entry point in the group 'shardproof.strategies'" in problem.remedy
    listed = here("list", "strategies")
    assert listed.returncode == 2
    assert listed.stdout.split() == [*in_tree()], "the rest is listed"
    assert listed.stderr.count("strategy 'guest'") == 1


def test_names_are_taken_once(install: Install) -> None:
    install(RECORD, name="zero2")
    assert strategies.of("zero2") is in_tree()["zero2"], "the suite's own stays"
    listed = here("list", "strategies")
    assert listed.returncode == 2
    assert "has the same name as a built-in strategy" in listed.stderr
    assert listed.stdout.split().count("zero2") == 1


def test_two_packages_cannot_share_a_name(install: Install) -> None:
    install(RECORD)
    install(RECORD, package="other-package")
    with pytest.raises(BrokenStrategy, match=r"guest-package 1.0 and other-package 1.0|other-"):
        strategies.of("guest")


def test_a_run_of_a_system_that_claims_a_broken_one_is_bad_input(
    install: Install, tmp_path: Path
) -> None:
    install("import nothing_like_it\n")
    words = ("run", "ddp-gpt", "--impl", "guest_system:System", "--dry-run")
    done = here(*words, paths=[tmp_path])
    told = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2, told
    assert "strategy 'guest' of guest-package 1.0 cannot be imported" in told
    assert here("run", "ddp-gpt", "--impl", "reference/ddp", "--dry-run").returncode == 0


def test_errors_are_those_of_input() -> None:
    assert issubclass(BrokenStrategy, InputError)
