"""Bytes sent equal the closed formula: exact rationals, summed over ranks, tolerance 0, every step.

Counted is the floating-point payload of calls issued inside ``step`` (forward, backward, update;
not at observation points), by the collective model of ground truth (logical bytes, not bytes on the
wire).  Set-up and control traffic (integers, objects, barriers) stand in rows of their own; for
data parallelism a step's control traffic is bounded: gradients can travel disguised as integers.

*Cannot see* wire bytes, latency, or traffic that bypasses process groups.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from suite.checks import Outcome, Worst
from suite.evidence import Figures
from suite.formulas import evaluate

#: Control traffic of a step of data parallelism, per rank: at most this, and this for every name.
CONTROL_BYTES = 4096
CONTROL_BYTES_A_NAME = 64


def decide(evidence: Figures) -> Outcome:
    """Compare each step's floating-point payload with the formula named by the scenario."""
    case = evidence.case
    if not case.ledgers:
        return Outcome("traffic", "skip", "ledgers are off")
    formula = case.expect.get("traffic") or f"{evidence.capabilities['strategy']}.payload_bytes"
    expected = evaluate(formula, evidence.facts)
    sent = [_payload(evidence, step) for step in evidence.steps]
    figures = {
        "formula": formula,
        "bytes_expected": str(expected),
        "bytes_sent": str(sent[-1]),
        "calls_per_step": len(step_calls(evidence, evidence.steps[-1], 0)),
        "setup_bytes": str(_setup_bytes(evidence)),
        "control_bytes": str(_control_bytes(evidence)),
    }
    for step, value in enumerate(sent):
        if value != expected:
            worst = Worst(
                "payload bytes", step, "step", "all ranks", float(abs(value - expected)), 0.0
            )
            message = (
                f"step {step} sends {_text(value)} bytes of floating-point payload over all ranks, "
                f"{formula} promises {_text(expected)}"
            )
            figures["bytes_sent"] = str(value)
            return Outcome("traffic", "fail", message, worst, figures)
    problem = _too_much_control(evidence)
    if problem:
        return Outcome("traffic", "fail", problem, None, figures)
    return Outcome("traffic", "pass", "", None, figures)


def step_calls(evidence: Figures, step: int, index: int) -> list[dict[str, Any]]:
    """Counted floating-point calls of record ``index`` in ``step``, observation points left out."""
    record = evidence.records[index]
    start, stop = record["steps"][step]["calls"]
    return [
        call
        for call in record["traffic"][start:stop]
        if call["floating"] and call["phase"] in ("forward", "backward", "update")
    ]


def _payload(evidence: Figures, step: int) -> Fraction:
    return sum(
        (
            Fraction(call["logical_bytes"])
            for index in range(len(evidence.records))
            for call in step_calls(evidence, step, index)
        ),
        Fraction(0),
    )


def _too_much_control(evidence: Figures) -> str:
    """Data parallelism agrees on a few integers per parameter, buffer and rank, not per element."""
    if evidence.capabilities["strategy"] not in ("ddp", "naive_ddp"):
        return ""
    names = {row["name"] for row in evidence.tensors if row["kind"] in ("parameters", "buffers")}
    limit = evidence.case.world * (CONTROL_BYTES + CONTROL_BYTES_A_NAME * len(names))
    for step in evidence.steps:
        spent = Fraction(0)
        for record in evidence.records:
            start, stop = record["steps"][step]["calls"]
            for call in record["traffic"][start:stop]:
                if not call["floating"] and call["phase"] in ("forward", "backward", "update"):
                    spent += Fraction(call["logical_bytes"])
        if spent > limit:
            return f"step {step} sends {_text(spent)} bytes that are no floats, at most {limit:,}"
    return ""


def _setup_bytes(evidence: Figures) -> Fraction:
    return _sum(evidence, lambda call: call["phase"] == "setup")


def _control_bytes(evidence: Figures) -> Fraction:
    return _sum(evidence, lambda call: call["phase"] != "setup" and not call["floating"])


def _sum(evidence: Figures, wanted: Any) -> Fraction:
    return sum(
        (
            Fraction(call["logical_bytes"])
            for record in evidence.records
            for call in record["traffic"]
            if wanted(call)
        ),
        Fraction(0),
    )


def _text(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.3f} ({value})"
