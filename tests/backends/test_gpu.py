"""What can be told of GPUs without one: devices, refusals, `make gpu`, and the allocator."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from made_case import made_case
from test_costs import plan

from shardproof.backends import BACKENDS, Joining, base, cuda, joined
from shardproof.by_path import import_module
from shardproof.case import Case, Death
from shardproof.cases.verdict import decide_case
from shardproof.checks import Outcome, memory, weighs
from shardproof.checks.results import CaseResult
from shardproof.commands import prove
from shardproof.compare import exact_figures
from shardproof.contract import Piece, Untrained
from shardproof.costs import CostModel, cost_model_of
from shardproof.doctor import findings as doctor
from shardproof.evidence.account import Account
from shardproof.evidence.records import RankRecord, StepRecord
from shardproof.impls.reference.checkpoint.loading import Loading
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.masters import Masters
from shardproof.impls.reference.parts import reducers
from shardproof.impls.reference.parts.reducers import Reducer
from shardproof.ledgers.memory.summary import MemoryRow
from shardproof.registry import load
from shardproof.registry.declaration import Declaration
from shardproof.report import memory as report_memory
from shardproof.scenarios.load import find
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed

ROOT = Path(__file__).parents[2]
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


@pytest.fixture(scope="module")
def command() -> ModuleType:
    """``deploy/gpu.py``."""
    return import_module(str(ROOT / "deploy/gpu.py"))


def _case(backend: str, mesh: dict[str, int], checks: tuple[str, ...] = ("traffic",)) -> Case:
    return made_case("reference/ddp", mesh, backend=backend, checks=checks)


# ------------------------------------------------------------------------------------- backends


def test_ranks_share_gpus_in_turn() -> None:
    assert [cuda.gpu_of(rank, 1) for rank in range(4)] == [0, 0, 0, 0]
    assert [cuda.gpu_of(rank, 3) for rank in range(4)] == [0, 1, 2, 0]
    assert [cuda.gpu_of(rank, 8) for rank in range(4)] == [0, 1, 2, 3]


def test_a_rank_takes_its_gpu_before_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: calls.append(f"GPU {gpu}"))
    monkeypatch.setattr(torch.cuda, "init", lambda: calls.append("init"))
    monkeypatch.setattr(
        BACKENDS["gloo"].group, "join_default", lambda place: calls.append(f"join {place.rank}")
    )
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    torch.backends.cuda.matmul.allow_tf32 = True
    joined.join("gloo_cuda", Joining(3, 4, Path("meeting"), 1.0, ledgers=False))
    assert calls == ["GPU 1", "init", "join 3"]
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
    calls.clear()
    joined.join("gloo", Joining(3, 4, Path("meeting"), 1.0, ledgers=False))
    assert calls == ["join 3"]
    base.JOINED.set(None, process=True)


def test_one_gpu_is_enough_for_all_ranks_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = BACKENDS["gloo_cuda"]
    assert not shared.threads and shared.device == "cuda"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert shared.available(4) is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    wanted = (
        "gloo with CUDA tensors needs at least one GPU, but this machine has no GPU: run where "
    )
    assert (shared.available(4) or "").startswith(wanted)
    assert BACKENDS["gloo"].available(4) is None and BACKENDS["in_memory"].available(4) is None


@no_gpu
def test_without_a_gpu_a_case_is_skipped_with_the_reason() -> None:
    (row,) = prove.prove("reference/ddp", backends=["gloo_cuda"], worlds=[2]).to_dict("records")
    assert row["verdict"] == "skip" and "needs at least one GPU" in row["reason"]
    finding = doctor._gpus()
    assert finding.state == "note" and "no GPU" in finding.found and "skipped" in finding.remedy


@pytest.mark.parametrize(
    "options",
    [
        {"all_reduce": "ring"},
        {"reduce_scatter": "ring"},
        {"data_options": {"all_gather": "ring"}},
        {"all_reduce": {"algorithm": "hierarchical", "ranks_per_node": 2}},
    ],
)
def test_sums_by_sending_are_no_case_of_gloo_on_gpus(options: dict[str, Any]) -> None:
    declared = Declaration(axes=("shard",), strategy="zero1")
    on_gpus = replace(_case("gloo_cuda", {"shard": 2}), options=options)
    reason = declared.excludes_case(on_gpus, "")
    assert reason == "sums by send and recv, but gloo_cuda cannot send from one rank to another"
    assert declared.excludes_case(replace(on_gpus, backend="gloo"), "") == ""
    plain = replace(on_gpus, options={"all_reduce": "backend"})
    assert declared.excludes_case(plain, "") == ""


def test_stages_are_no_case_of_gloo_on_gpus() -> None:
    declared = Declaration(axes=("pipe", "shard"), strategy="pipeline")
    for mesh in ({"pipe": 2}, {"pipe": 1, "shard": 2}):  # one stage may send to itself
        reason = declared.excludes_case(_case("gloo_cuda", mesh), "")
        assert reason == "has stages, but gloo_cuda cannot send from one rank to another"
    assert declared.excludes_case(_case("gloo", {"pipe": 2}), "") == ""


def test_a_death_inside_a_step_is_no_case_of_processes() -> None:
    declared = Declaration(strategy="elastic")
    dies = replace(_case("mpi", {"replicate": 2}), deaths=(Death(rank=1, step=1),))
    assert declared.excludes_case(dies, "") == "a member cannot die inside a step on mpi"
    assert declared.excludes_case(replace(dies, backend="in_memory"), "") == ""


def test_a_process_that_hides_its_gpus_shows_them_to_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "_hidden", None)
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    for visible in ("2,3", None):
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        cuda.hide()
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        cuda.hide()  # by the next task of the same leader
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
        assert cuda.count() == 2 and cuda.available(2) is None
        cuda._show()
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == visible


def test_a_refusal_that_moves_to_another_backend_is_judged_there() -> None:
    """What a moved cell asks that the backend cannot do is left out, but not what is refused."""
    asked = replace(_case("mpi", {"replicate": 2}), is_moved=True)
    refused = replace(asked, expect={"refuses": "as few"})
    told: dict[str, Any] = {
        "declaration": Declaration(strategy="ddp"),
        "cannot_fit": "as few as that",
    }
    assert decide_case(Account(asked, **told)).verdict == "skip"
    assert decide_case(Account(refused, **told)).verdict == "pass"


def test_a_gpu_s_numbers_are_held_to_bounds_not_bits() -> None:
    """Its kernels add up in another order than those of the CPU on which the oracle trains."""
    assert BACKENDS["gloo"].adds_like_one(2) and not BACKENDS["gloo"].adds_like_one(3)
    assert BACKENDS["mpi"].adds_like_one(5)
    assert not any(BACKENDS[name].adds_like_one(1) for name in ("nccl", "gloo_cuda"))


def test_servers_are_no_case_of_gloo_on_gpus() -> None:
    declared = Declaration(strategy="parameter_server", features=frozenset({"roles"}))
    reason = declared.excludes_case(_case("gloo_cuda", {"replicate": 2}), "")
    assert reason == "has servers, but gloo_cuda cannot send from one rank to another"
    assert declared.excludes_case(_case("gloo", {"replicate": 2}), "") == ""


def test_gloo_alone_declared_is_not_gloo_on_gpus() -> None:
    declared = Declaration(backends=("gloo",), strategy="zero1")
    assert declared.excludes("gloo_cuda", "float64", 2) == "runs on gloo only"


# --------------------------------------------------------------------------------------- memory


def _record(*rows: MemoryRow) -> RankRecord:
    return RankRecord(0, 1, Declaration(strategy="ddp"), memory=list(rows))


def test_memory_is_measured_on_nccl_not_on_gloo() -> None:
    measured = {
        backend: weighs(_case(backend, {"replicate": 2}, ("memory",)), Declaration())
        for backend in BACKENDS
    }
    exact = ("in_memory", "nccl", "mpi")
    assert measured == {backend: backend in exact for backend in BACKENDS}


def test_the_allocator_stands_beside_the_ledger_and_is_not_judged() -> None:
    record = _record(
        MemoryRow("allocator", 0, "step", "cuda:0", "all", 5000),
        MemoryRow("allocator", 1, "step", "cuda:0", "all", 4096),
        MemoryRow("peak", 1, "backward", "cuda:0", "all", 4000),
    )
    peaks = {"forward": {"all": 1000}, "backward": {"all": 4000}}
    figures = {"allocator": memory._allocator(record, 1, peaks)}
    assert figures == {"allocator": {"0": {"allocated": 4096, "ledger": 4000}}}
    assert memory._allocator(_record(), 1, {}) == {}
    assert "memory.allocator" in exact_figures.INEXACT
    assert memory._bytes_at(record, "mark") == {}
    result = CaseResult("c", _case("nccl", {"replicate": 1}), "pass")
    assert not report_memory.allocator([result]).rows
    result.checks = [Outcome("memory", "pass", figures=figures)]
    table = report_memory.allocator([result])
    assert table.texts == [["reference/ddp", "sgd", "1", "4,096", "4,000", "1.024x"]]


def test_step_counters_on_the_host_count_beside_a_gpu_only() -> None:
    model: Any = SimpleNamespace(facts=SimpleNamespace(parameters=("w", "b")))
    on_gpu = _record(MemoryRow("mark", 0, "after_update", "cuda:0", "parameters", 800))
    on_cpu = _record(MemoryRow("mark", 0, "after_update", "cpu", "parameters", 800))
    counters = {"host": {"optimizer_state": 8}}
    assert memory._counters(model, on_gpu, counters) == 8
    assert memory._counters(model, on_cpu, counters) == 0
    assert memory._counters(model, on_gpu, {"host": {"optimizer_state": 1600}}) == 0  # state


def test_one_factor_comes_down_to_gradients_in_host_memory_beside_a_gpu_only() -> None:
    optimizer = {"options": {"offload": "optimizer"}, "steps": 3}
    clipped, plain, at_rest = (
        cost_model_of("zero1", plan("zero1", 1, **fields))
        for fields in ({"clipped": True, **optimizer}, optimizer, {"clipped": True, "steps": 3})
    )
    on_gpu, on_cpu = (
        _record(MemoryRow("mark", 0, "after_update", device, "parameters", 800))
        for device in ("cuda:0", "cpu")
    )
    for record in (on_gpu, on_cpu):
        record.steps = [
            StepRecord(step, 0, 1.0, None, metrics={"skipped": float(step == 1)})
            for step in range(3)
        ]
    evidence: Any = SimpleNamespace(steps=range(3), updated_before=-1)

    def more(cost_model: CostModel | None, record: RankRecord) -> dict[tuple[int, str], int]:
        """Bytes that are promised beside those of ``host_traffic``."""
        assert cost_model is not None
        found = {}
        for _, step, _, kind, _, least, most in memory._moved(evidence, cost_model, record):
            updated = 0 if step == 1 else step
            way = kind.split()[0]
            assert least == most
            found[step, way] = most - cost_model.host_traffic(0, step, updated)[way]
        return {key: size for key, size in found.items() if size}

    assert more(clipped, on_gpu) == {(0, "down"): 8, (2, "down"): 8}  # the step between is skipped
    assert more(clipped, on_cpu) == {}
    assert more(plain, on_gpu) == more(at_rest, on_gpu) == {}


def test_the_factor_of_gradients_stays_on_the_device_of_the_masters() -> None:
    working = torch.zeros(2, dtype=torch.bfloat16, device="meta")
    masters = Masters([{"params": [("w", working)]}], {"w": torch.float32})
    masters.scale_gradients(torch.tensor(0.5, dtype=torch.float64))  # a loss scale's
    assert masters.factor.item() == 0.5
    masters.scale_gradients(torch.ones((), dtype=torch.float64, device="meta"))
    assert masters.factor.is_meta and masters.factor.dtype == torch.float64


class _Keeps(Reducer):
    """Keeps what it is given."""

    def load_pieces(self, pieces: Sequence[Piece]) -> list[Piece]:
        self.given = pieces
        return []


def test_a_reducer_gets_what_was_saved_on_its_device() -> None:
    own, slot = (Piece.whole(name, torch.ones(2)) for name in ("w.residual@1", "w.exp_avg"))
    of_reducer, others = reducers.pieces_on(torch.device("meta"), [own, slot])
    assert of_reducer.tensor.is_meta and of_reducer.name == own.name
    assert others is slot
    reducer = _Keeps()
    system: Any = SimpleNamespace(
        reducer=reducer,
        mesh=SimpleNamespace(device="meta"),
        finish_copies=lambda: None,
        held_pieces=lambda kind: [],
        settle=lambda kind: None,
    )
    Engine.load_pieces(system, "optimizer", [own, slot])
    assert [piece.tensor.is_meta for piece in reducer.given] == [True, False]


def test_what_a_checkpoint_holds_of_a_reducer_goes_to_its_device() -> None:
    reducer = _Keeps()
    want = SimpleNamespace(name=("extra", "w.residual@1"))
    about = SimpleNamespace(scaler=None, step=3)
    loading: Any = SimpleNamespace(
        system=SimpleNamespace(
            reducer=reducer,
            mesh=SimpleNamespace(device="meta"),
            settle=lambda kind: None,
            scaler=None,
        ),
        checkpoint=SimpleNamespace(manifest=SimpleNamespace(about=about)),
        contents=SimpleNamespace(generators=dict),
        wants=defaultdict(list, {"extra": [want]}),
        read=lambda _: torch.ones(2),
    )
    Loading.fill(loading)
    assert [piece.tensor.is_meta for piece in reducer.given] == [True]
    assert loading.system.steps_done == 3


# ------------------------------------------------------------------------------------- make gpu


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        (["NVIDIA H100 80GB HBM3"], "h100-x1"),
        (["NVIDIA H200"] * 8, "h200-x8"),
        (["NVIDIA A100-SXM4-40GB"] * 2, "a100-x2"),
        (["Tesla V100-SXM2-16GB"], "v100-x1"),
        (["NVIDIA GeForce RTX 4090"], "4090-x1"),
        (["AMD Radeon/../x"], "amd-x1"),
        (["!"], "gpu-x1"),
    ],
)
def test_a_baseline_is_named_by_the_gpu(command: ModuleType, gpus: list[str], name: str) -> None:
    assert command.baseline_name(gpus) == name


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8])
def test_all_parts_end_within_the_limit(command: ModuleType, gpus: int) -> None:
    parts = command.parts(gpus, Path("results/r"), Path("results/baselines/b.json"), 4)
    assert sum(part.minutes + command.GRACE for part in parts) <= command.LIMIT == 40
    for part in parts:
        if "--budget" in part.command:
            assert part.command[part.command.index("--budget") + 1] == f"{part.minutes:g}"
    (bench,) = (part.command for part in parts if part.name == "bench")
    assert bench[bench.index("--world") + 1] == {1: "1", 2: "2", 3: "2", 4: "4", 8: "8"}[gpus]
    assert ("meshes" in {part.name for part in parts}) == (gpus >= 4)


@pytest.mark.parametrize("gpus", [1, 8])
def test_the_dry_run_names_cases_and_pairs_that_exist(
    command: ModuleType, gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    from typer.testing import CliRunner

    from shardproof.commands.main import app

    assert command.main(["--dry-run", "--gpus", str(gpus)]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [words[1] for words in lines] == (
        ["run", "run", "bench", *(["bench"] * (gpus >= 4)), "compare", "report"]
    )
    for words in lines:
        if words[1] in ("run", "bench"):
            done = CliRunner().invoke(app, [*words[1:], "--dry-run"])
            assert done.exit_code == 0, done.output
            assert "nccl" in done.output or "gloo_cuda" in done.output
    assert f"results/baselines/gpu-x{gpus}.json" in lines[-2]


#: Systems around a part of the user's own, whose scenarios name that part.
AROUND_A_PART = {
    *("pytorch/ddp_hook", "pytorch/ddp_optimizer"),
    *("pytorch/own_schedule", "pytorch/tensor_plan"),
}


def test_nccl_meets_every_strategy_and_one_gpu_leaves_some_of_each() -> None:
    cases = [
        case
        for file in find(["nccl", "nccl-sharded", "scenarios/gpu"])
        for case in expand(file, installed())
    ]
    assert {case.backend for case in cases} == {"nccl", "gloo_cuda"}
    asked = {case.backend for case in cases if case.implementation == "pytorch/collectives"}
    assert asked == {"nccl", "gloo_cuda"}
    cases = [case for case in cases if case.implementation != "pytorch/collectives"]
    names = {n for n in installed().implementations if n.startswith(("reference/", "pytorch/"))}
    names = {name for name in names - AROUND_A_PART if not issubclass(load(name), Untrained)}
    # DDP with torch's hooks, ranks that train alone, members that change: no cells on GPUs so far.
    names -= {"pytorch/ddp_compressed", "pytorch/post_local_sgd"}
    names -= {"reference/local_sgd", "reference/diloco", "reference/async_sgd"}
    names -= {"reference/elastic"}
    # Cut positions of PyTorch have no cells on GPUs so far.
    names -= {"pytorch/context"}
    of_nccl = [case for case in cases if case.backend == "nccl"]
    assert {case.implementation for case in of_nccl} == names
    assert {case.implementation for case in of_nccl if case.world == 1} == names
    assert max(case.world for case in of_nccl) == 8
    stages = {"reference/pipeline", "pytorch/pipelining"}
    of_gloo = [case for case in cases if case.backend == "gloo_cuda"]
    assert {case.implementation for case in of_gloo} == names - stages
    assert {case.world for case in of_gloo} == {2, 4}
    assert all(case.tier == "full" for case in cases)


@no_gpu
def test_without_a_gpu_the_command_stops_with_the_remedy(
    command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main([]) == 2
    told = capsys.readouterr().err
    assert "sees no GPU" in told and "make gpu PYTHON=" in told
    done = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "make gpu" in done.stdout


def test_what_is_missing_is_named(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert [name for name in command.missing() if "nvidia" not in name] == []
    assert command.python_for_all() == sys.executable or command.missing()
    monkeypatch.setattr(command, "VENV", tmp_path / "venv")
    monkeypatch.setattr(command, "missing", lambda: ["pydantic>=2.7,<3", "nvidia-ml-py>=12"])
    monkeypatch.setattr(command, "_failure", lambda argv: "no network")
    with pytest.raises(command.Unusable, match=r"lacks pydantic.*no network.*PIP_FIND_LINKS"):
        command.python_for_all()
    monkeypatch.setattr(command, "missing", lambda: ["nvidia-ml-py>=12"])
    assert command.python_for_all() == sys.executable


def test_a_part_that_takes_too_long_is_stopped_as_ctrl_c_does(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "python"
    body = f"trap 'echo stopped > {tmp_path}/told; exit 3' INT\nwhile :; do sleep 0.05; done\n"
    script.write_text(f"#!/bin/sh\n{body}")
    script.chmod(0o755)
    monkeypatch.setattr(command, "GRACE", 0.0)
    part = command.Part("p", "what", 0.01, ("run",))
    assert command.run_part(part, str(script)) == 124
    assert (tmp_path / "told").read_text() == "stopped\n"
    script.write_text('#!/bin/sh\necho "$@" > "$OUT"\nexit 3\n')
    monkeypatch.setenv("OUT", str(tmp_path / "argv"))
    assert command.run_part(replace(part, minutes=1.0), str(script)) == 3
    assert (tmp_path / "argv").read_text() == "-m shardproof run\n"


def test_parts_go_on_after_a_fault(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = command.Machine(("NVIDIA H100 80GB HBM3",), "2.11.0+cu130", "2.28.9", "580.1")
    codes = {"nccl": 1, "gloo": 3, "bench": 124, "baseline": 0, "report": 0}
    monkeypatch.setattr(command, "look", lambda: machine)
    monkeypatch.setattr(command, "python_for_all", lambda downloads: "python")
    monkeypatch.setattr(command, "run_part", lambda part, python, grace: codes[part.name])
    assert command.main([]) == 1
    told = capsys.readouterr().out
    for words in ("1 x NVIDIA H100 80GB HBM3", "2.28.9", "[5/5,", "results/baselines/h100-x1.json"):
        assert words in told
    assert "bench ended with exit code 124" in told
    assert command.main(["--parts", "gloo,report"]) == 0


def test_a_short_run_fits_its_limit_and_takes_cases_of_cpu_baselines(
    command: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    from typer.testing import CliRunner

    from shardproof.commands.main import app

    parts = command.short_parts(Path("results/r"), Path("results/baselines/b.json"), 4)
    judged = [part for part in parts if part.command[0] == "run"]
    assert sum(part.minutes + command.SHORT_GRACE for part in parts) <= command.SHORT_LIMIT == 8
    assert command.main(["--short", "--dry-run", "--gpus", "1"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [words[1] for words in lines] == ["run", "run", "run", "compare", "report"]
    ids = []
    for words in lines[: len(judged)]:
        kept = [w for w in words[1:] if not w.startswith("results/")]
        kept.remove("--results")
        done = CliRunner().invoke(app, [*kept, "--dry-run"])
        assert done.exit_code == 0, done.output
        ids.append({line for line in done.output.splitlines() if "::" in line})
    baseline = json.loads((ROOT / "results/baselines/xeon-2-cores.json").read_text())
    assert len(ids[0] & {*baseline["cases"]}) > 100
    assert all("gloo_cuda" in name for name in ids[1]) and len(ids[1]) > 50
    assert all("nccl" in name for name in ids[2]) and len(ids[2]) > 10


def test_a_short_run_resumes_with_the_parts_that_did_not_finish(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first time the second part is stopped; then only it, the baseline and the report run."""
    log, script, run = tmp_path / "log", tmp_path / "python", tmp_path / "run"
    script.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\nmkdir -p {run}\necho "{{}}" > {run}/run.json\n'
        'case "$*" in *gloo_cuda*) exit 124;; esac\nexit 0\n'
    )
    script.chmod(0o755)
    machine = command.Machine(("NVIDIA H100 80GB HBM3",), "2.11.0+cu130", "2.28.9", "580.1")
    monkeypatch.setattr(command, "look", lambda: machine)
    monkeypatch.setattr(command, "python_for_all", lambda downloads: str(script))
    words = ["--short", "--results", str(run)]
    assert command.main(words) == 1
    first = log.read_text().splitlines()
    assert len(first) == 5
    log.unlink()
    assert command.main(words) == 0
    again = log.read_text().splitlines()
    assert [line.split()[2] for line in again] == ["run", "compare", "report"]
    assert "--resume" in again[0] and str(run) in again[0]


def test_a_short_run_downloads_nothing(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, str | None] = {}
    monkeypatch.delenv("PIP_NO_INDEX", raising=False)
    monkeypatch.setattr(command, "VENV", tmp_path / "venv")
    monkeypatch.setattr(command, "missing", lambda: ["pydantic>=2.7,<3"])

    def failed(argv: Sequence[str]) -> str:
        asked["index"] = os.environ.get("PIP_NO_INDEX")
        return "no wheel"

    monkeypatch.setattr(command, "_failure", failed)
    with pytest.raises(command.Unusable, match="lacks pydantic"):
        command.python_for_all(downloads=False)
    assert asked["index"] == "1"
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
