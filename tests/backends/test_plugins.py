"""Backends as classes: what they say of themselves, what systems need of them, and plugins."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hollow_backend import Hollow, judged
from made_case import made_case

from shardproof import by_path, checks
from shardproof.backends import BACKENDS, Joining, plugins
from shardproof.cases.kinds.calls import workload
from shardproof.contract import Capabilities
from shardproof.launch.pool import Pool
from shardproof.registry.declaration import Declaration
from shardproof.runs import blocks

MODULE = """
from shardproof.backends import Backend, TorchBackend

class Right(TorchBackend):
    name = "right"

class Nameless(TorchBackend):
    pass

class Incomplete(Backend):
    name = "incomplete"

number = 3
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that names backends, most of which cannot be used."""
    (tmp_path / "guest_backends.py").write_text(MODULE)
    folder = tmp_path / "guest-2.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 2.1\n")
    points = {"misnamed": "Right", "nameless": "Nameless", "incomplete": "Incomplete"}
    points |= {"right": "Right", "number": "number", "gloo": "Right"}
    lines = [f"{name} = guest_backends:{found}" for name, found in points.items()]
    lines.append("absent = guest_elsewhere:Absent")
    (folder / "entry_points.txt").write_text("\n".join([f"[{plugins.GROUP}]", *lines]) + "\n")
    monkeypatch.syspath_prepend(tmp_path)
    for known in (by_path.entry_points, plugins._loaded):
        known.cache_clear()
    yield
    for known in (by_path.entry_points, plugins._loaded):
        known.cache_clear()


def test_properties_are_told_without_torch() -> None:
    program = (
        "import sys; from shardproof.backends import BACKENDS\n"
        "print([b.threads for b in BACKENDS.own.values()])\n"
        "assert not {'torch', 'numpy', 'mpi4py'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "[True, False, False, False, False]\n", done


@pytest.mark.usefixtures("installed")
def test_a_backend_of_a_package_is_listed_behind_the_suite_s_own() -> None:
    assert [*BACKENDS][:5] == [*BACKENDS.own] and "right" in BACKENDS and len(BACKENDS) == 11
    assert type(BACKENDS["right"]).__name__ == "Right" and BACKENDS["right"].takes_over
    assert BACKENDS["gloo"] is BACKENDS.own["gloo"]
    assert Declaration().usable() == (*BACKENDS.own,) and not Declaration().denied("right")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("misnamed", "has name = 'right', not the name of its entry point"),
        ("nameless", "has name = None, not the name of its entry point"),
        ("incomplete", "does not define available, join"),
        ("absent", "cannot be imported: ModuleNotFoundError: No module named 'guest_elsewhere'"),
        ("number", "is not a subclass of shardproof.backends.Backend"),
    ],
)
def test_one_that_is_broken_says_why_and_breaks_nothing_else(name: str, says: str) -> None:
    reason = str(BACKENDS[name].available())
    assert says in reason and f"entry point {name!r} of guest 2.1" in reason
    assert reason.endswith("correct it, or uninstall guest")
    with pytest.raises(RuntimeError, match="uninstall guest"):
        BACKENDS[name].join(Joining(0, 1, Path(), 1.0, ledgers=False))


def test_a_record_may_name_one_that_is_not_known_here() -> None:
    with pytest.raises(KeyError):
        BACKENDS["carrier_pigeon"]
    unknown = BACKENDS.of_record("carrier_pigeon")
    assert (unknown.threads, unknown.device) == (False, "cpu")
    order = [blocks.size(2, 1, 1, name, False) for name in ("in_memory", "gloo", "carrier_pigeon")]
    assert order == sorted(order)


def test_systems_say_what_they_need_and_not_where_they_run() -> None:
    def runs(**said: object) -> list[str]:
        return [*replace(Declaration(), **said).usable()]

    assert runs() == ["in_memory", "gloo", "gloo_cuda", "nccl", "mpi"]
    assert runs(needs=("processes",)) == ["gloo", "gloo_cuda", "nccl", "mpi"]
    assert runs(needs=("cpu",)) == ["in_memory", "gloo", "mpi"]
    assert runs(needs=("sends",)) == ["in_memory", "gloo", "nccl", "mpi"]
    assert runs(needs=("any_thread",)) == ["gloo", "gloo_cuda", "nccl"]
    denies = {"gloo_cuda": "it ends the process"}
    assert runs(denies=denies) == ["in_memory", "gloo", "nccl", "mpi"]
    assert Declaration(denies=denies).denied("gloo_cuda") == (
        "does not run on gloo_cuda: it ends the process"
    )
    assert Declaration(needs=("processes",)).denied("in_memory") == (
        "needs processes, but in_memory runs its ranks as threads of one process"
    )
    assert "'threads' is not a known word" in Declaration(needs=("threads",)).problem()  # type: ignore[arg-type]


def test_an_allow_list_of_contract_2_is_honoured() -> None:
    declared = Declaration(backends=("gloo", "nccl"))
    assert declared.usable() == ("gloo", "nccl") and not declared.runs_on_threads
    assert declared.denied("mpi") == "runs on gloo, nccl only" and not declared.problem()
    assert "'glo' is not a known word" in Declaration(backends=("glo",)).problem()
    assert Capabilities().backends == ()


def test_what_a_backend_lacks_skips_the_checks_that_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BACKENDS, "own", {**BACKENDS.own, "hollow": Hollow()})
    case = made_case("reference/ddp", {"replicate": 4}, backend="hollow", checks=("memory",))

    def why(name: str, **changes: object) -> str:
        needs = checks._module(name).NEEDS
        return checks.lacking(needs, replace(case, **changes), Declaration())

    skipped = {name: why(name) for name in checks.CHECKS}
    assert skipped["norm"] == skipped["equivalence"] == "tensors have no values on hollow"
    assert skipped["data"] == "not every rank runs on hollow"
    judged = {name for name, reason in skipped.items() if not reason}
    assert judged == {*("traffic", "memory", "overlap", "active", "schedule"), "refusals", "faults"}
    assert why("traffic", ledgers=False) == why("memory", ledgers=False) == "ledgers are off"
    assert why("memory", backend="gloo") == "gloo frees memory late: measure memory on in_memory"
    assert checks.weighs(case, Declaration()) and not checks.weighs(
        replace(case, checks=("traffic",)), Declaration()
    )


def test_calls_that_a_backend_does_not_take_are_not_made() -> None:
    offered = {"gather": {"form": ("list",)}, "batch": {}, "barrier": {}}
    takes = {"gather": {"dtype": ("int32",), "form": ("list", "tensor")}, "batch": None}
    assert workload.within(offered, takes) == {
        "gather": {"form": ["list"], "dtype": ["int32"]},
        "barrier": {},
    }


@pytest.mark.launches
@pytest.mark.parametrize(
    ("system", "axis"), [("reference/ddp", "replicate"), ("reference/zero3", "shard")]
)
def test_one_rank_without_values_is_held_to_bytes_of_all(
    system: str, axis: str, tmp_path: Path
) -> None:
    """What a simulation can be judged by: calls, bytes and memory, never numbers."""
    asked = ("equivalence", "norm", "replicas", "traffic", "memory", "active")
    case = made_case(system, {axis: 4}, backend="hollow", checks=asked)
    with Pool(1) as pool:
        (end,) = pool.run(judged, [("hollow", (case, tmp_path), 120.0)])
    assert end.value is not None, end.output
    (record,) = end.value["records"]
    assert (record["rank"], record["stands_for"]) == (0, [0, 1, 2, 3])
    said = {one["check"]: one for one in end.value["result"]["checks"]}
    assert {n: one["status"] for n, one in said.items()} == {
        **dict.fromkeys(("equivalence", "norm", "replicas"), "skip"),
        **dict.fromkeys(("traffic", "memory", "active"), "pass"),
    }, end.value["result"]["reason"]
    sent = said["traffic"]["figures"]
    assert sent["bytes_sent"] == sent["bytes_expected"] != "0"
