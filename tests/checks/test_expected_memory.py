"""A scenario's own expectations of memory: right ones pass, and a wrong one names both values."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof.cases.runner import run_cases
from shardproof.scenarios.load import load_text
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed

TEXT = """\
name: asked
about: expected memory
sees: [nothing]
workload: {{name: charnames_gpt, global_batch: 24, micro_batches: 2}}
matrix:
  implementation: {system}
  backend: in_memory
  mesh: {{{axis}: [1, 2, 3, 4, 5]}}
  optimizer: adamw
  lane: working_precision
  precision: {{label: A32, built: float32}}
checks: [memory]
expect: {{memory: {{{memory}}}}}
steps: 2
"""
SOUND = {
    "reference/zero1": "optimizer_state: zero1.optimizer_bytes, ratio: zero1.memory_ratio",
    "reference/zero2": "gradients: zero2.gradient_bytes, state: zero2.state_bytes",
    "reference/zero3": "parameters: zero3.parameter_bytes, ratio: shard, within: 0.05",
    "reference/ddp": "masters: 0, parameters: trainable_bytes, ratio: 1",
}


def results(system: str, memory: str) -> list[Any]:
    axis = "replicate" if system.endswith("ddp") else "shard"
    text = TEXT.format(system=system, axis=axis, memory=memory)
    cases = expand(load_text(text, "asked.yaml"), installed())
    done, _ = run_cases(cases, 2, lambda result: None)
    return done


@pytest.mark.parametrize("system", SOUND)
def test_sound_systems_pass_on_1_to_5_ranks(system: str) -> None:
    for result in results(system, SOUND[system]):
        assert result.verdict == "pass", (result.case.id, result.reason)


def test_a_wrong_expectation_fails_and_names_both_values() -> None:
    """The popular sentence: ZeRO-1 needs 4 times less."""
    for result in results("reference/zero1", "ratio: 4, within: 0.05"):
        assert result.verdict == "fail"
        assert "expect.memory.ratio: expected 4 (4), measured " in result.reason
        assert " in step 1; tolerance 0.05 of it" in result.reason
    wrong = "activations: 1, peak: 1"
    assert (
        "expect.memory.activations: expected 1 (1)" in results("reference/zero1", wrong)[0].reason
    )
