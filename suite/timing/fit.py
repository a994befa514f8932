"""Does the alpha-beta model hold on this machine?  ``python -m suite.timing.fit``.

Models of three sizes train side by side on the same ranks; no message of theirs has a size at which
alpha and beta are probed, and no step of theirs is used in a fit.  A round is, for each model,

    alone  together  together  alone     steps without traffic, and the steps that are predicted
    probes                               all-reduces of the ladder, matrix products, copies

and the figure of a round is ln(measured / predicted): predicted from the compute of this round and
the alpha and beta of the whole run.  Written: a table, as Markdown.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from suite.launch.pool import Pool
from suite.runner import Workspace
from suite.timing import costs, model, plan, stats

#: Sizes that are predicted: parameters of charnames_gpt, none of them a preset's.
SIZES: dict[str, dict[str, Any]] = {
    "1.3m": {"width": 160, "heads": 5, "layers": 4, "seq": 32},
    "5m": {"width": 288, "heads": 9, "layers": 5, "seq": 32},
    "16m": {"width": 512, "heads": 8, "layers": 5, "seq": 32},
}
#: Payload bytes of the probes.
LADDER = (2**8, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**25)
ROUNDS = 10
#: Relative disagreement that the measure allows.
LIMIT = 0.15
STEPS = 2
WARM = 4


def pairs(implementation: str, backend: str, world: int) -> list[plan.Pair]:
    """One for each size; side B is not used."""
    side = plan.Side(implementation)
    return [
        plan.Pair(
            name=name,
            a=side,
            b=side,
            backend=backend,
            world=world,
            workload=plan.spec_of("charnames_gpt", "", params, 16, 1, 0),
            optimizer=plan.default_optimizer("adamw"),
            size=name,
        )
        for name, params in SIZES.items()
    ]


# --------------------------------------------------------------------------------- in the leader


def lead(payload: dict[str, Any]) -> None:
    """Watch a step of every size, then measure; what was found goes to ``told.json``."""
    from suite import registry
    from suite.launch import pack
    from suite.launch.ranks import root_cause, run_ranks
    from suite.timing import probes

    sides = [plan.Pair.from_dict(each) for each in payload["pairs"]]
    first, workdir = sides[0], Path(payload["workdir"])
    claims = registry.load(first.a.implementation).capabilities({})
    axes = plan.natural_mesh(claims.axes, first.world)

    def watched(rank: int, world: int) -> dict[str, Any]:
        return {"sides": [probes.watch(pair, "a", axes, rank) for pair in sides]}

    def measured(rank: int, world: int) -> dict[str, Any]:
        return measure(sides, axes, payload["rounds"], told["watched"][0]["sides"], rank)

    told: dict[str, Any] = {"axes": axes}
    for name, program, ledgers in (("watched", watched, True), ("measured", measured, False)):
        folder = workdir / name
        folder.mkdir(parents=True)
        outcomes = run_ranks(first.backend, first.world, program, folder, 600.0, ledgers=ledgers)
        cause = root_cause(outcomes)
        if cause is not None:
            told["problem"] = " ".join([cause.sentence(), *cause.traceback.splitlines()[-3:]])
            break
        told[name] = [pack.load(o.record) for o in outcomes if o.record is not None]
    (workdir / "told.json").write_text(json.dumps(told))


def measure(
    sides: Sequence[plan.Pair],
    axes: Mapping[str, int],
    rounds: int,
    watched: Sequence[Mapping[str, Any]],
    rank: int,
) -> dict[str, Any]:
    """The rank program: seconds of steps by side and round, and what the probes found."""
    from suite.backends import BACKENDS
    from suite.timing import blocks, pinning, probes

    backend, world = sides[0].backend, sides[0].world
    blocks.assert_nothing_is_recorded(backend)
    cores = pinning.pin(rank, world, BACKENDS[backend].threads)
    control = blocks.mesh_of({"replicate": world}, BACKENDS[backend].device).comm("replicate")
    alone = [probes.Alone(pair, "a", axes, rank) for pair in sides]
    together = [blocks.Arm(pair, "a", axes, rank) for pair in sides]
    for arm in together:
        arm.set_up()
    operations = {op for told in watched for op in model.sizes(model.seen(told["calls"]))}
    sizes = dict.fromkeys(sorted(operations), LADDER)
    products = watched[-1]["products"]
    prober = probes.Probes(control, sizes, products)
    for single, arm in zip(alone, together, strict=True):
        single.segment(WARM)
        for _ in range(WARM):
            arm.step()
    prober.sweep()
    prober = probes.Probes(control, sizes, products)
    found: list[list[list[float]]] = [[] for _ in sides]
    for single in alone:
        single.steps.clear()
        single.gradients.clear()
    for _ in range(rounds):
        for number, (single, arm) in enumerate(zip(alone, together, strict=True)):
            control.barrier()
            single.segment(STEPS)
            control.barrier()
            found[number].append(_steps(arm, 2 * STEPS))
            control.barrier()
            single.segment(STEPS)
        prober.sweep()
    for each in (*alone, *together):
        each.close()
    blocks.assert_nothing_is_recorded(backend)
    return {
        "rank": rank,
        "cores": cores,
        "alone": [single.steps for single in alone],
        "gradients": [single.gradients for single in alone],
        "together": found,
        "probes": prober.record(),
    }


def _steps(arm: Any, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        arm.step()
        times.append(time.perf_counter() - began)
    return times


# ---------------------------------------------------------------------------- what it comes to


@dataclasses.dataclass(frozen=True)
class Row:
    """One size.  ``error`` is measured over predicted less 1, with the interval over rounds."""

    size: str
    calls: int
    payload: int
    measured: float
    prediction: model.Prediction
    error: float
    low: float
    high: float
    card: model.Scorecard

    @property
    def held(self) -> bool:
        """Whether the prediction is within the limit."""
        return abs(self.error) <= LIMIT


def judge(sides: Sequence[plan.Pair], told: Mapping[str, Any]) -> tuple[list[Row], costs.Machine]:
    """Pure: the rows and the machine that records give."""
    records = told["measured"]
    backend = sides[0].backend
    found = costs.machine(backend, [record["probes"] for record in records])
    rows = []
    for number, pair in enumerate(sides):
        watched = told["watched"][0]["sides"][number]
        calls = model.seen(watched["calls"])
        for operation, payloads in model.sizes(calls).items():
            if shared := set(payloads) & set(found.times.get(operation, ())):
                raise ValueError(f"{pair.name}: probed at its own sizes {sorted(shared)}")
        together = model.slowest([r["together"][number] for r in records])
        alone = model.slowest([r["alone"][number] for r in records])
        rounds = [[*first, *second] for first, second in zip(alone[::2], alone[1::2], strict=True)]
        compute, measured = _median(rounds), _median(together)
        cores = len(records[0]["cores"]) or None
        made = [
            model.predict(calls, statistics.median(each), found.fits, backend, cores_per_rank=cores)
            for each in rounds
        ]
        prediction = model.predict(calls, compute, found.fits, backend, cores_per_rank=cores)
        logs = [
            math.log(statistics.median(seconds) / predicted.step_seconds)
            for seconds, predicted in zip(together, made, strict=True)
        ]
        estimate = stats.estimate(logs)
        probed = None
        if found.flop_rate:
            probed = model.probed_compute(
                watched["flops"],
                watched["elements"],
                pair.optimizer.name,
                found.flop_rate,
                found.byte_rate,
            )
        rows.append(
            Row(
                pair.name,
                int(sum(call.count for call in calls)),
                int(sum(call.bytes * call.count for call in calls)),
                measured,
                prediction,
                *(math.expm1(value) for value in (estimate.mean, estimate.low, estimate.high)),
                model.scorecard(measured, prediction, probed_seconds=probed),
            )
        )
    return rows, found


def _median(segments: Sequence[Sequence[float]]) -> float:
    return statistics.median(value for segment in segments for value in segment)


def markdown(rows: Sequence[Row], found: costs.Machine, about: str) -> str:
    """The table of the evidence."""
    lines = [
        about,
        "",
        "| model | calls, bytes a step | compute ms | communication ms (alpha + beta) | "
        "predicted ms (bounds) | measured ms | measured / predicted - 1 [95 %] | within 15 % |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        made = row.prediction
        lines.append(
            f"| {row.size} | {row.calls}, {row.payload:,} | {1e3 * made.compute_seconds:.1f} | "
            f"{1e3 * made.communication_seconds:.1f} ({1e3 * made.alpha_seconds:.2f} + "
            f"{1e3 * made.beta_seconds:.1f}) | {1e3 * made.step_seconds:.1f} "
            f"({1e3 * made.low_seconds:.1f} to {1e3 * made.high_seconds:.1f}) | "
            f"{1e3 * row.measured:.1f} | {row.error:+.1%} [{row.low:+.1%}, {row.high:+.1%}] | "
            f"{'yes' if row.held else 'NO'} |"
        )
    lines += [
        "",
        "| model | achieved / predicted | exposed communication | achieved / probed rates |",
        "| --- | --- | --- | --- |",
    ]
    for row in rows:
        card = row.card
        rate = "-" if card.achieved_over_probed is None else f"{card.achieved_over_probed:.2f}"
        lines.append(
            f"| {row.size} | {card.achieved_over_predicted:.3f} | {card.exposed_share:.1%} | "
            f"{rate} |"
        )
    lines += [
        "",
        "| operation | alpha us | beta ns/byte | RMS residual | worst | cores busy a rank | "
        "us at each payload (bytes) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for operation, each in found.fits.items():
        times = ", ".join(f"{n}: {1e6 * t:.0f}" for n, t in found.times[operation].items())
        lines.append(
            f"| {operation} | {1e6 * each.alpha:.1f} | {1e9 * each.beta:.3f} | "
            f"{each.residual:.1%} | {each.worst:+.1%} | {each.busy:.2f} | {times} |"
        )
    rate = "-" if found.flop_rate is None else f"{found.flop_rate / 1e9:.1f} GFLOP/s"
    lines += ["", f"Rates a rank, all ranks at once: {rate}, {found.byte_rate / 1e9:.1f} GB/s."]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 every size is predicted within the limit, 1 one is not, or the ranks broke."""
    parser = argparse.ArgumentParser(
        prog="python -m suite.timing.fit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--implementation", default="reference/ddp", help="family/name")
    parser.add_argument("--backend", default="gloo", choices=sorted(costs.ALGORITHMS))
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at least 2")
    parser.add_argument("--out", type=Path, help="write the Markdown here, too")
    parser.add_argument("--records", type=Path, help="keep what the ranks measured (JSON)")
    chosen = parser.parse_args(arguments)
    if chosen.world < 2 or chosen.rounds < 2:
        parser.error(f"at least 2 ranks and 2 rounds, not {chosen.world} and {chosen.rounds}")
    sides = pairs(chosen.implementation, chosen.backend, chosen.world)
    for pair in sides:
        plan.check(pair)
    began = time.monotonic()
    with Workspace() as space, Pool(1, preload=("suite.timing.fit",)) as pool:
        workdir = space / "fit"
        workdir.mkdir()
        payload = {
            "pairs": [pair.to_dict() for pair in sides],
            "rounds": chosen.rounds,
            "workdir": str(workdir),
        }
        with closing(pool.run("suite.timing.fit:lead", iter([("fit", payload, 1300.0)]))) as ends:
            (ended,) = list(ends)
        path = workdir / "told.json"
        told = json.loads(path.read_text()) if path.exists() else {"problem": ended.output}
    if chosen.records:
        chosen.records.write_text(json.dumps(told))
    if "problem" in told:
        print(f"the ranks broke: {told['problem']}", file=sys.stderr)
        return 1
    rows, found = judge(sides, told)
    about = (
        f"{chosen.implementation} on {chosen.world} {chosen.backend} ranks, adamw, 16 samples of "
        f"32 tokens, {chosen.rounds} rounds in {time.monotonic() - began:.0f} s; "
        f"{platform.machine()}, {os.cpu_count()} cores, load average at the end "
        f"{os.getloadavg()[0]:.1f}."
    )
    text = markdown(rows, found, about)
    print(text, end="")
    if chosen.out:
        chosen.out.write_text(text)
    return 0 if all(row.held for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
