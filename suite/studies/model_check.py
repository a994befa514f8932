"""Does the alpha-beta model hold on this machine?  ``python -m shardproof.studies.model_check``.

Models of three sizes train side by side on the same ranks.  None of their messages has a size at
which alpha and beta are probed (else this tool refuses), and no step of theirs is used in a fit.
Written: tables, as Markdown.  How rounds are made and figures come about:
suite/bench/model/measurement.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from shardproof import registry
from shardproof.bench import sides
from shardproof.bench.model import alpha_beta, measurement, step_time
from shardproof.errors import InputError

#: What is trained: parameters of charnames_gpt by size, none of them a preset's.
SIZES: dict[str, dict[str, Any]] = {
    "1.3m": {"width": 160, "heads": 5, "layers": 4, "seq": 32},
    "5.1m": {"width": 288, "heads": 9, "layers": 5, "seq": 32},
    "16m": {"width": 512, "heads": 8, "layers": 5, "seq": 32},
}
#: Samples of a step, few: communication has a share of it that shows.
BATCH = 4
#: Payload bytes of the probes.
LADDER = (2**8, 2**12, 2**16, 2**18, 2**20, 2**22, 2**24, 2**25)
ROUNDS = 10
#: Relative disagreement that the measure allows.
LIMIT = 0.15


def runs_of(implementation: str, backend: str, world: int) -> list[SideRun]:
    """A run for each size.

    :raises InputError: an unknown implementation, or one that has no data axis.
    """
    registry.check(implementation)
    axes = sides.natural_mesh(registry.load(implementation).capabilities({}).axes, world)
    return [
        SideRun(
            name=name,
            side=sides.Side(implementation),
            axes=axes,
            backend=backend,
            world=world,
            workload=sides.spec_of("charnames_gpt", "", params, BATCH, 1, 0),
            optimizer=sides.default_optimizer("adamw"),
            dtype="float32",
            deadline=DEADLINE,
        )
        for name, params in SIZES.items()
    ]


def judge(
    runs: Sequence[SideRun], found: Rounds
) -> tuple[list[measurement.Score], alpha_beta.Machine]:
    """As :func:`shardproof.bench.model.measurement.judge`.

    :raises ValueError: a model sends a message of a size that alpha and beta come from.
    """
    scores, machine = measurement.judge(runs, found)
    for run, score in zip(runs, scores, strict=True):
        for operation, payloads in step_time.sizes(score.calls).items():
            if shared := set(payloads) & set(machine.times.get(operation, ())):
                raise ValueError(f"{run.name}: probed at its own sizes {sorted(shared)}")
    return scores, machine


def verdict(each: measurement.Score) -> str:
    """`yes`: the whole interval is within the limit; `NO`: the whole of it is not; else `open`."""
    if each.low >= -LIMIT and each.high <= LIMIT:
        return "yes"
    return "NO" if each.low > LIMIT or each.high < -LIMIT else "open"


def markdown(
    given: Sequence[measurement.Subject],
    scores: Sequence[measurement.Score],
    found: alpha_beta.Machine,
    about: str = "",
) -> str:
    """The tables of the evidence."""
    lines = [
        "# Does the alpha-beta prediction hold?",
        "",
        "Written by `python -m shardproof.studies.model_check`;",
        "how: [docs/model.md](../../docs/model.md).",
        "Models of three sizes train side by side; none of their messages has a probed size (the",
        "tool refuses), none of their steps is in the fit. Limit: 15 %, for the whole interval;",
        "`open`: the machine was too restless to tell.",
        "",
        *([about, ""] if about else []),
        "| model | calls, bytes a step | compute ms | communication ms (alpha + beta) | "
        "predicted ms (bounds) | measured ms | measured / predicted - 1 [95 %] | within 15 % |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for subject, each in zip(given, scores, strict=True):
        made = each.prediction
        count = sum(call.count for call in each.calls)
        payload = sum(call.bytes * call.count for call in each.calls)
        lines.append(
            f"| {subject.pair.name} | {count:.0f}, {payload:,.0f} | "
            f"{1e3 * made.compute_seconds:.1f} | {1e3 * made.communication_seconds:.1f} "
            f"({1e3 * made.alpha_seconds:.2f} + {1e3 * made.beta_seconds:.1f}) | "
            f"{1e3 * made.step_seconds:.1f} ({1e3 * made.low_seconds:.1f} to "
            f"{1e3 * made.high_seconds:.1f}) | {1e3 * each.measured_seconds:.1f} | "
            f"{each.error:+.1%} [{each.low:+.1%}, {each.high:+.1%}] | "
            f"{verdict(each)} |"
        )
    lines += [
        "",
        "| model | achieved / predicted | exposed communication | achieved / probed rates |",
        "| --- | --- | --- | --- |",
    ]
    for subject, each in zip(given, scores, strict=True):
        card = each.card
        rate = "-" if card.achieved_over_probed is None else f"{card.achieved_over_probed:.2f}"
        lines.append(
            f"| {subject.pair.name} | {card.achieved_over_predicted:.3f} | "
            f"{card.exposed_share:.1%} | {rate} |"
        )
    lines += [
        "",
        "| operation | alpha us | beta ns/byte | RMS residual | worst | cores busy a rank | "
        "us at each payload (bytes) |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for operation, fit in found.fits.items():
        times = ", ".join(f"{n}: {1e6 * t:.0f}" for n, t in found.times[operation].items())
        lines.append(
            f"| {operation} | {1e6 * fit.alpha:.1f} | {1e9 * fit.beta:.3f} | "
            f"{fit.residual:.1%} | {fit.worst:+.1%} | {fit.busy:.2f} | {times} |"
        )
    rate = "-" if found.flop_rate is None else f"{found.flop_rate / 1e9:.1f} GFLOP/s"
    lines += ["", f"Rates of a rank, all at once: {rate}, {found.byte_rate / 1e9:.1f} GB/s."]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 every size is predicted within the limit, 1 one is not, or the ranks broke, 2 bad input,
    3 the machine was too restless to tell.
    """
    parser = argparse.ArgumentParser(
        prog="python -m shardproof.studies.model_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--implementation", default="reference/ddp", help="family/name")
    parser.add_argument("--backend", default="gloo", choices=sorted(alpha_beta.ALGORITHMS))
    parser.add_argument("--world", type=int, default=2, help="ranks")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="at least 2")
    parser.add_argument("--out", type=Path, help="write the Markdown here, too")
    parser.add_argument("--records", type=Path, help="keep what the ranks measured (JSON)")
    chosen = parser.parse_args(arguments)
    if chosen.world < 2 or chosen.rounds < 2:
        parser.error(f"at least 2 ranks and 2 rounds, not {chosen.world} and {chosen.rounds}")
    try:
        given = subjects(chosen.implementation, chosen.backend, chosen.world)
    except (InputError, registry.BrokenImplementation) as error:
        print(error, file=sys.stderr)
        return 2
    began, load = time.monotonic(), os.getloadavg()[0]
    told = measurement.launch(
        given, chosen.rounds, dict.fromkeys(alpha_beta.ALGORITHMS[chosen.backend], LADDER)
    )
    if chosen.records:
        chosen.records.write_text(json.dumps(told))
    if "problem" in told:
        print(f"the ranks broke: {told['problem']}", file=sys.stderr)
        return 1
    try:
        scores, found = judge(given, told)
    except ValueError as error:  # a message of a probed size, or a call without a formula
        print(f"no prediction to hold: {error}", file=sys.stderr)
        return 2
    about = (
        f"{chosen.implementation} on {chosen.world} {chosen.backend} ranks, adamw, "
        f"{BATCH} samples of 32 tokens, {chosen.rounds} rounds, "
        f"{time.monotonic() - began:.0f} s; "
        f"torch {version('torch')}, {platform.machine()}, {os.cpu_count()} cores, "
        f"load average before {load:.1f}."
    )
    text = markdown(given, scores, found, about)
    print(text, end="")
    if chosen.out:
        chosen.out.write_text(text)
    verdicts = {verdict(each) for each in scores}
    return 1 if "NO" in verdicts else 3 if "open" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
