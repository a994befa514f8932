"""Runs that nobody trained: results, records, faults, times and scaling, as many as a test wants.

For what reads runs (reports, comparisons), in sizes that would take an hour to train.  The same
arguments give the same run.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardproof import VERSION
from shardproof.case import Case, WorkloadSpec
from shardproof.compare import baseline
from shardproof.compare.snapshot import Snapshot
from shardproof.contract import OptimizerSpec
from shardproof.runs.header import FORMAT
from shardproof.runs.records import Manifest

Line = dict[str, Any]

MACHINE = {
    "cpu": "Synthetic 9000",
    "cores": 2,
    "memory_bytes": 2**34,
    "system": "Linux",
    "machine": "x86_64",
    "gpus": [],
}
#: In the order in which :func:`case` goes through them.
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "fsdp", "pipeline", "tensor", "hybrid")
CLASSES = ("activations", "all", "communication", "gradients", "optimizer_state", "parameters")


def case(number: int, world: int = 0, **fields: Any) -> Case:
    """The case of that number; ids do not repeat."""
    strategy = STRATEGIES[number % len(STRATEGIES)]
    family = ("reference", "pytorch", "deepspeed")[number // 8 % 3]
    backend = ("in_memory", "gloo")[number // 24 % 2]
    world = world or 2 + number % 4
    scenario = f"{strategy}-gpt{number // 48}"
    name = f"{scenario}::{family}/{strategy}::{backend}::shard{world}::adamw::noclip::fp64::quick"
    values: dict[str, Any] = {
        "id": name,
        "scenario": scenario,
        "implementation": f"{family}/{strategy}",
        "backend": backend,
        "mesh": {"shard": world},
        "workload": WorkloadSpec("charnames_gpt", seed=number // 500),
        "optimizer": OptimizerSpec(),
        "lane": "fp64",
        "checks": ("equivalence", "replicas", "norm", "traffic", "memory", "overlap"),
        "source": f"scenarios/conformance/{scenario}.yaml:{7 + number % 9}",
    }
    return Case(**(values | fields))


def result(of: Case, number: int = 0, verdict: str = "pass", **more: Any) -> Line:
    """A line of ``cases.jsonl`` as long as those of real runs."""
    strategy = of.implementation.split("/")[-1]
    sent = 1000 * (number + 1)
    peaks = {
        str(rank): {
            phase: {kind: 100 * number + 7 * rank + len(kind) for kind in CLASSES}
            for phase in ("forward", "backward", "update")
        }
        for rank in range(of.world)
    }
    figures: dict[str, Line] = {
        "equivalence": {"compared": 1339, "not_tested": [f"layer.{n}.step" for n in range(15)]},
        "replicas": {"compared": 960, "different": 0},
        "norm": {},
        "traffic": {
            "formula": f"{strategy}.payload_bytes",
            "bytes_sent": str(sent),
            "calls_per_step": 4,
            "setup_bytes": str(sent // 2),
            "control_bytes": "592",
            "source": "a paper, section V-A" * 8,
            "flows": [{"axis": "shard", "operation": "all_reduce", "calls": 3, "bytes": str(sent)}],
            "bytes_expected": str(sent),
        },
        "memory": {
            "strategy": strategy,
            "source": "a paper, section V-A" * 8,
            "accounting": "A32",
            "bytes_held": 69724 + number,
            "bytes_promised": 69724 + number,
            "bytes_whole": 163704,
            "not_judged": {},
            "ratio_measured": "40926/17431",
            "ratio_limit": None,
            "resident": {rank: {"device": told["update"]} for rank, told in peaks.items()},
            "peaks": peaks,
        },
        "overlap": {"reductions": 15, "issued_inside_backward": 15, "hidden": 10},
    }
    checks = [
        check_line(name, "skip" if name == "norm" else "pass", figures=told)
        for name, told in figures.items()
    ]
    line = case_line(of, verdict, "" if verdict == "pass" else "because", checks)
    line |= {
        "bytes_sent": str(sent),
        "bytes_expected": str(sent),
        "record": f"records/{number}.parquet",
        "data": "ab" * 32,
    }
    copied: Line = json.loads(json.dumps(line | more))
    return copied


def check_line(name: str, status: str, message: str = "", figures: Line | None = None) -> Line:
    """What one check says."""
    return {
        "check": name,
        "status": status,
        "message": message,
        "worst": None,
        "figures": figures or {},
    }


def case_line(of: Case, verdict: str, reason: str, checks: list[Line]) -> Line:
    """A line of ``cases.jsonl`` without bytes."""
    return {
        "kind": "case",
        "id": of.id,
        "case": of.to_dict(),
        "verdict": verdict,
        "reason": reason,
        "checks": checks,
        "seconds": 0.25,
        "worst_error": 9.2e-16,
        "bound": 1e-12,
        "bytes_sent": None,
        "bytes_expected": None,
        "rerun": f"shardproof run {of.scenario} -k '{of.id}'",
    }


def bench(name: str, mean: float = 0.02, sd: float = 0.05, blocks: int = 24, **more: Any) -> Line:
    """A line of a comparison; ``mean`` and ``sd`` are those of the blocks' log ratios."""
    side: Line = {"options": {}, "mesh": {}}
    low, high = mean - sd, mean + sd
    line = {
        "kind": "bench",
        "id": f"bench::{name}::reference/{name} v pytorch/ddp::gloo::2::charnames_gpt+20m",
        "pair": {
            "name": name,
            "a": {"implementation": f"reference/{name}", **side},
            "b": {"implementation": "pytorch/ddp", **side},
            "backend": "gloo",
            "world": 2,
            "workload": {"name": "charnames_gpt", "traits": [], "params": {}, "micro_batches": 1},
            "optimizer": {"name": "adamw", "lr": 0.001},
            "dtype": "float32",
            "size": "20m",
            "goal": None,
            "blocks": blocks,
            "launches": 3,
        },
        "meshes": {"a": {"shard": 2}, "b": {"replicate": 2}, "twin": {"shard": 2}},
        "seconds": 50.0,
        "blocks": blocks,
        "launches": 3,
        "memory": {"kind": "ledger", "a": 1000, "b": 2000, "ratio": 0.5},
        "profile": None,
        "problem": None,
        "verdict": "same",
        "reason": "",
        "ratio": math.exp(mean),
        "low": math.exp(low),
        "high": math.exp(high),
        "half_width": sd,
        "sd": sd,
        "p": 0.5,
        "p_exact": True,
        "margin": 0.05,
        "smallest_effect": 0.06,
        "goal_met": None,
        "launches_differ_p": 0.4,
        "aa": {"ratio": 1.0, "low": 0.99, "high": 1.01, "half_width": 0.01, "sd": sd}
        | {"blocks": blocks, "blocks_needed": 5},
        "median_seconds": {"a": math.exp(mean), "b": 1.0},
        "targets_per_step": {"a": 512, "b": 512},
        "targets_per_second": {"a": 1000.0, "b": 1000.0 * math.exp(mean)},
        "log": {
            "blocks": blocks,
            "mean": mean,
            "low": low,
            "high": high,
            "sd": sd,
            "p": 0.5,
            "exact": True,
        },
    }
    return line | more


def scaling(name: str, mean: float = -0.1, sd: float = 0.03, world: int = 2, **more: Any) -> Line:
    """A line of a scaling scenario; ``mean`` is that of the log efficiency."""
    ratio = interval(math.exp(mean), math.exp(mean - sd), math.exp(mean + sd), mean, sd)
    implementation = more.get("implementation", f"reference/{name}")
    mode = more.get("mode", "strong")
    workload: Line = {"name": "charnames_gpt", "traits": [], "params": {}, "global_batch": 32}
    workload["micro_batches"] = 1
    line = {
        "kind": "scaling",
        "id": f"scaling::strong::reference/{name}::gloo::{world}::charnames_gpt+1m",
        "mode": "strong",
        "implementation": f"reference/{name}",
        "backend": "gloo",
        "world": world,
        "target": 0.8,
        "cell": {
            "system": {"implementation": implementation, "options": {}, "mesh": {}},
            "workload": workload,
            "base": workload,
            "optimizer": {"name": "adamw"},
            "dtype": "float32",
            "size": "1m",
            "name": mode,
            "mode": mode,
            "label": "",
            "backend": "gloo",
            "world": world,
            "target": 0.8,
        },
        "verdict": "holds",
        "reason": "",
        "efficiency": {"plain": ratio, "wrapped": ratio},
        "wrapping": ratio,
        "modelled": {"world": world, "efficiency": 0.88, "compute_seconds": 0.1},
        "scorecard": {"achieved_over_predicted": 1.05, "exposed_share": 0.2},
        "median_seconds": {},
        "times": None,
        "blocks": 12,
        "launches": 3,
        "seconds": 40.0,
        "launches_differ_p": 0.5,
    }
    return line | more


def interval(ratio: float, low: float, high: float, mean: float = 0.0, sd: float = 0.1) -> Line:
    """A ratio of a scaling cell; ``mean`` and ``sd`` are those of the logs of 12 blocks."""
    log = {"blocks": 12, "mean": mean, "low": mean, "high": mean, "sd": sd, "p": 0.5, "exact": True}
    return {"ratio": ratio, "low": low, "high": high, "half_width": (high - low) / 2, "log": log}


def kill(name: str, killed: bool = True, named: str = "equivalence", *also: str) -> Line:
    """A line of a planted fault: ``named`` should see it, the checks ``also`` do."""
    return {
        "kind": "kill",
        "name": name,
        "parent": f"reference/{name.split('_')[0]}",
        "killed_by": [named],
        "failing": [named, *also] if killed else list(also),
        "killed": killed,
        "why_not": "" if killed else f"survives {named}",
        "verdict": "fail",
        "reason": "",
        "lane": "fp64",
        "margin": 5e9 if killed else None,
        "seconds": 0.5,
    }


def write(
    folder: Path,
    lines: Sequence[Mapping[str, Any]],
    torch: str = "2.13.0+cpu",
    suite: str = VERSION,
    python: str = "3.11.7",
    machine: Mapping[str, Any] = MACHINE,
    key: str = "one",
    left_out: Sequence[str] = (),
    exit_code: int = 0,
) -> Path:
    """A run's folder that holds ``lines``, as one invocation leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    planned = [*(line["id"] for line in lines if "id" in line), *left_out]
    invocation = {
        "command": ["shardproof", "run", "--tier", "quick"],
        "started": "2026-11-22T02:00:00+00:00",
        "ended": "2026-11-22T02:05:00+00:00",
        "exit_code": exit_code,
        "suite": suite,
        "commit": "0123456789abcdef0123456789abcdef01234567",
        "python": python,
        "packages": {"torch": torch, "numpy": "2.4.6"},
        "fingerprint": dict(machine),
        "planned": planned,
        "key": {"suite": suite, "scenarios": key, "data": key},
    }
    header = {"format": FORMAT, "id": folder.name, "invocations": [invocation]}
    (folder / "run.json").write_text(json.dumps(header))
    told = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "cases.jsonl").write_text(told)
    seal(folder)
    return folder


def seal(folder: Path) -> None:
    """The manifest of what `write` wrote, as it is now."""
    lines = (folder / "cases.jsonl").read_bytes().splitlines()
    parts: list[tuple[str, int | None, bytes]] = [
        ("cases.jsonl", number, line) for number, line in enumerate(lines, 1)
    ]
    parts.append(("run.json", None, (folder / "run.json").read_bytes()))
    entries, last = [], b""
    for file, number, content in parts:
        digest, before = (hashlib.sha256(part).hexdigest() for part in (content, last))
        entry = {"file": file, "line": number, "sha256": digest, "before": before}
        last = json.dumps(entry).encode()
        entries.append(last + b"\n")
    (folder / Manifest.NAME).write_bytes(b"".join(entries))


def results(count: int) -> list[Line]:
    """That many results, of every strategy."""
    return [result(case(number), number) for number in range(count)]


def changed(lines: Sequence[Line], number: int, change: Callable[[Line], None]) -> list[Line]:
    """A copy of ``lines`` in which ``change`` was done to one."""
    copied = copy.deepcopy(list(lines))
    change(copied[number])
    return copied


def figure(check: str, key: str, value: Any) -> Callable[[Line], None]:
    """Sets one figure of a check."""

    def change(line: Line) -> None:
        told = next(c for c in line["checks"] if c["check"] == check)
        told["figures"][key] = value

    return change


def snapshot(folder: Path, lines: Sequence[Mapping[str, Any]], **more: Any) -> Snapshot:
    """`lines` written as a run, and read as it is compared."""
    return baseline.load(str(write(folder, lines, **more)))
