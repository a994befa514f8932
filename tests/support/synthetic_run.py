"""One run with something of everything, made of the lines of :mod:`synthetic`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from synthetic import (
    Line,
    bench,
    case,
    case_line,
    check_line,
    interval,
    kill,
    scaling,
    write,
)

from shardproof.case import Case, WorkloadSpec
from shardproof.contract import OptimizerSpec
from shardproof.runs import records
from shardproof.schedules import Action, Schedule, simulate, with_messages

IMPLEMENTATIONS = (
    *("reference/ddp", "reference/zero1", "reference/zero2", "reference/zero3", "reference/fsdp"),
    *("pytorch/ddp", "pytorch/fsdp1", "pytorch/fsdp2", "deepspeed/zero2", "deepspeed/zero3"),
)
PIPELINES = ("reference/pipeline", "pytorch/pipelining")
BACKENDS = ("in_memory", "gloo")
TRAITS = ("tied", "frozen", "unused", "scalar", "unequal_tokens", "dropout_counter", "late_results")
LANES = ("fp64", "dyadic", "bitwise", "working_precision")
CHECKS = ("equivalence", "replicas", "norm", "traffic", "memory", "overlap", "active")
TENSORS = tuple(
    f"blocks.{block}.{part}.{kind}"
    for block in range(4)
    for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down", "norm1")
    for kind in ("weight", "bias")
)


#: A run that has something of all that the core makes.
FULL: dict[str, Any] = {
    "cases": 420,
    "failing": 30,
    "kills": 40,
    "survivors": 2,
    "pipelines": 6,
    "left_out": 3,
}


def write_run(
    path: Path,
    cases: int = 60,
    failing: int = 0,
    seed: int = 0,
    kills: int = 0,
    survivors: int = 0,
    benches: int = 0,
    scalings: bool = False,
    pipelines: int = 0,
    left_out: int = 0,
) -> Path:
    """Write a run into the new folder ``path``; ``failing`` of its ``cases`` fail with records."""
    path.mkdir(parents=True)
    draw = random.Random(seed)
    made = list(itertools.islice(_cases(), cases + left_out))
    lines: list[Line] = []
    for number, of in enumerate(made[:cases]):
        broken = number < failing
        lines.append(judged(of, draw, broken))
        if broken:
            lines[-1]["record"] = _record(path, of, compared(draw))
    lines += [_pipeline(path, number, draw) for number in range(pipelines)]
    for of in made[cases:]:
        reason = "no time in a budget of 3 minutes"
        lines.append({"kind": "left out", "id": of.id, "case": of.to_dict(), "reason": reason})
    lines += [_fault(number, number >= survivors) for number in range(kills)]
    lines += [timed(number, draw) for number in range(benches)]
    if scalings:
        lines += scaling_lines()
    return write(path, lines, exit_code=int(failing > 0))


def _cases() -> Iterator[Case]:
    """Endless, all different: implementation, backend, world, lane, traits, clipping."""
    for seed in itertools.count():
        for world, lane, clip, traits in itertools.product(
            (2, 3, 4), LANES, (None, 0.5), ((), TRAITS[:3], TRAITS[3:])
        ):
            for name, backend in itertools.product(IMPLEMENTATIONS, BACKENDS):
                label = "" if seed % 2 == 0 else "small_buckets"
                shown = name + (f"+{label}" if label else "")
                clipping = "noclip" if clip is None else "clip"
                yield case(
                    0,
                    world,
                    id=f"made[{seed}-{len(traits)}]::{shown}::{backend}::shard{world}::sgd"
                    f"::{clipping}::{lane}::quick",
                    scenario="made",
                    implementation=name,
                    backend=backend,
                    workload=WorkloadSpec("charnames_gpt", traits=traits, seed=seed),
                    optimizer=OptimizerSpec(clip_norm=clip),
                    lane=lane,
                    checks=CHECKS,
                    label=label,
                    source="",
                    dtype="float32" if lane in ("working_precision", "bitwise") else "float64",
                )


def judged(of: Case, draw: random.Random, broken: bool = False) -> Line:
    """A line as a judged case leaves it."""
    world = of.world
    sent = Fraction(185_920 * (world - 1) * (3 if of.workload.traits else 2))
    found = sent + 4096 if broken else sent
    error = 0.7 if broken else draw.uniform(1e-17, 4e-16)
    exact = of.lane in ("bitwise", "dyadic")
    verdict, reason = (
        "pass (working precision only)" if of.lane == "working_precision" else "pass",
        "",
    )
    if broken:
        verdict = "fail"
        reason = (
            "equivalence: differs from the oracle: 'blocks.2.mlp.up.weight' at step 1, "
            f"gradients_final, rank 1: error {error} against bound 1e-12\n"
            f"traffic: step 1, axis shard, all_gather: {found} bytes in 12 calls over all ranks, "
            f"{sent} promised"
        )
    elif of.implementation.startswith("deepspeed") and of.backend == "in_memory":
        verdict, reason = "skip", "runs on gloo, nccl only"
    elif of.lane == "bitwise" and world == 3 and of.workload.seed:
        verdict, reason = "undecidable", "equivalence: nothing could be compared at steps [2]"
    checks = [] if verdict == "skip" else _checks(of, verdict, reason, found, sent)
    return case_line(of, verdict, reason, checks) | {
        "seconds": round(draw.uniform(0.2, 4.0), 3),
        "worst_error": 0.0 if exact and not broken else error,
        "bound": 0.0 if exact else 1e-12,
        "bytes_sent": None if verdict == "skip" else str(found),
        "bytes_expected": None if verdict == "skip" else str(sent),
        "rerun": f"shardproof run made --tier quick -k '{of.id}'",
    }


def _checks(of: Case, verdict: str, reason: str, found: Fraction, sent: Fraction) -> list[Line]:
    checks = []
    for name in of.checks:
        status, message, figures = "pass", "", {}
        if name == "norm" and of.optimizer.clip_norm is None:
            status, message = "skip", "clipping is off"
        if verdict == "fail" and name in ("equivalence", "traffic"):
            status, message = "fail", reason
        if verdict == "undecidable" and name == "equivalence":
            status, message = "undecidable", reason
        if name == "equivalence":
            figures = {"compared": 380, "not_tested": ["initial parameters: final.scalar.factor"]}
        if name == "traffic":
            parts = (("all_gather", 2), ("reduce_scatter", 1))
            rows = [
                {"axis": "shard", "operation": op, "calls": 6 * n, "bytes": str(sent * n / 3)}
                for op, n in parts
            ]
            figures = {"formula": "zero3.payload_bytes", "flows": rows, "sent": rows}
            figures |= {"bytes_sent": str(found), "bytes_expected": str(sent)}
        if name == "memory":
            figures = _memory(of.world)
        checks.append(check_line(name, status, message, figures))
    return checks


def _memory(world: int) -> Line:
    whole = 1_487_360
    held = {"parameters": whole // 4, "gradients": whole // 4 // world}
    held["optimizer_state"] = whole // 2 // world
    total = sum(held.values())
    ranks = {str(rank): {"device": held} for rank in range(world)}
    return {
        "strategy": "zero2",
        "accounting": "A32",
        "bytes_held": total,
        "bytes_promised": total,
        "bytes_whole": whole,
        "not_judged": {},
        "ratio_measured": str(Fraction(whole, total)),
        "ratio_promised": str(Fraction(whole, total)),
        "ratio_theory": str(Fraction(4 * world, world + 3)),
        "ratio_limit": "4",
        "promised": ranks,
        "resident": ranks,
        "peaks": {},
    }


def compared(draw: random.Random) -> list[Line]:
    """Comparisons up to the first that is beyond its bound."""
    rows = []
    for step, name in itertools.product((-1, 0, 1), TENSORS):
        at = {"step": step, "name": name, "owner": "rank 1", "bound": 1e-12}
        phase = "initial parameters" if step < 0 else "gradients_final"
        bad = step == 1 and name.startswith("blocks.2")
        rows.append(at | {"phase": phase, "error": 0.7 if bad else draw.uniform(1e-17, 4e-16)})
        if bad and name.endswith("mlp.up.weight"):
            break
    return [*rows, {"step": 1, "name": "norm.bias", "phase": "gradients_final", "tested": False}]


def _record(
    folder: Path,
    case: Case,
    rows: list[Line],
    ranks: list[Line] | None = None,
) -> str:
    account = {
        "case": case.to_dict(),
        "timings": {"all": 1.0},
        "whole": [],
        "figures": {"tensors": [], "compared": {"equivalence": rows}, "records": ranks or []},
    }
    return records.write(folder, account)[0]


# ------------------------------------------------------------------------------------ pipelines


def one_forward_one_backward(ranks: int, micro_batches: int) -> Schedule:
    """1F1B, one stage a rank."""
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        order = [Action("F", rank, micro) for micro in range(ahead)]
        for micro in range(micro_batches - ahead):
            order += [Action("F", rank, ahead + micro), Action("BW", rank, micro)]
        left = range(micro_batches - ahead, micro_batches)
        orders.append((*order, *(Action("BW", rank, micro) for micro in left)))
    return with_messages(Schedule("1f1b", micro_batches, tuple(range(ranks)), tuple(orders)))


def _pipeline(path: Path, number: int, draw: random.Random) -> Line:
    name = PIPELINES[number % 2]
    ranks, micro_batches = 2 + number % 3, 4 + 2 * (number // 3)
    of = case(
        0,
        id=f"pipes::{name}+1f1b::gloo::pipe{ranks}::m{micro_batches}::{number}",
        scenario="pipes",
        implementation=name,
        backend="gloo",
        mesh={"pipe": ranks},
        workload=WorkloadSpec("charnames_gpt", micro_batches=micro_batches),
        checks=("equivalence", "schedule", "traffic"),
        label="1f1b",
        source="",
    )
    schedule = one_forward_one_backward(ranks, micro_batches)
    return judged(of, draw) | {"record": _record(path, of, [], _logs(schedule))}


def _logs(schedule: Schedule) -> list[Line]:
    """What ranks would have logged of one step of ``schedule``."""
    played = simulate(schedule, 0.002, 0.002, 0.002)
    logs = []
    for rank, order in enumerate(schedule.orders):
        number, actions, calls = 0, [], []
        for action in order:
            if action in played.begins:
                times = 5.0 + played.begins[action], 5.0 + played.ends[action]
                row = dict(zip(("op", "stage", "micro"), action, strict=True))
                row |= {"step": 0, "window": 0, "begin": number, "end": number + 2}
                row |= {"began": times[0], "ended": times[1], "cpu": times[1] - times[0]}
                actions.append(row)
                number += 3
            elif action.op in ("SF", "SB"):
                calls.append(_call(number, len(calls)))
                number += 2
        logs.append(
            {
                "rank": rank,
                "steps": [{"step": 0, "loss": 1.0, "norm": None}],
                "memory": [],
                "traffic": calls,
                "actions": actions,
                "events": [],
            }
        )
    return logs


def _call(issued: int, sequence: int) -> Line:
    return {
        "sequence": sequence,
        "operation": "send",
        "group": [0, 1],
        "axis": "pipe",
        "dtype": "float64",
        "payload_bytes": 4096,
        "logical_bytes": "4096/1",
        "phase": "forward",
        "inside_backward": False,
        "units_before": 0,
        "issued": issued,
        "waited": issued + 1,
        "floating": True,
    }


def _fault(number: int, killed: bool) -> Line:
    """Faults of three strategies, each named for one of five checks."""
    checks = ("equivalence", "replicas", "traffic", "memory", "overlap")
    also = ["active"] if number % 3 == 0 else []
    name = f"zero{1 + number % 3}_fault_{number:03}"
    return kill(name, killed, checks[number % len(checks)], *also)


def timed(number: int, draw: random.Random) -> Line:
    """A comparison of times: faster, the same, slower, not decided, in turns."""
    mean = (-0.2, 0.01, 0.3, 0.08)[number % 4]
    half = (0.02, 0.015, 0.04, 0.15)[number % 4] * draw.uniform(0.8, 1.2)
    verdict = ("faster", "same", "slower", "inconclusive")[number % 4]
    return bench(f"pair{number}", mean, half, 16, verdict=verdict, memory=None, p=0.01)


def scaling_lines() -> list[Line]:
    """Strong and weak scaling of two systems: measured at 2 ranks, modelled up to 1,024."""
    lines = []
    for mode, name in itertools.product(("strong", "weak"), ("reference/ddp", "pytorch/fsdp2")):
        for world in (2, 4, 8, 64, 1024):
            measured = world <= 4
            loss = (0.03 if mode == "weak" else 0.06) * world.bit_length()
            at = 1 - loss
            near = interval(at, at - 0.03, at + 0.03)
            far = interval(at + 0.04, at + 0.02, at + 0.06)
            verdict = "oversubscribed"
            if measured:
                verdict = "holds" if at - 0.03 >= 0.8 else "below"
            line = scaling(name.split("/")[1], world=world, mode=mode, implementation=name)
            score = {"achieved_over_predicted": 0.96, "exposed_share": 0.12}
            lines.append(
                line
                | {
                    "id": f"scaling::{mode}::{name}::gloo::{world}",
                    "verdict": verdict,
                    "reason": "" if measured else f"{world} ranks, 4 physical cores",
                    "efficiency": {"plain": near, "wrapped": far} if measured else None,
                    "modelled": {"world": world, "efficiency": max(0.05, at + 0.01)},
                    "scorecard": score | {"memory_over_formula": 1.0} if measured else None,
                    "wrapping": near,
                    "launches_differ_p": 0.001 if world == 4 else 0.5,
                }
            )
    return lines
