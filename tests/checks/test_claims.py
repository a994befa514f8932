"""What sentences claim, and how planted faults are told: no sentence names another cause."""

from __future__ import annotations

import pytest

from shardproof.checks.results import claim_of, told

END = "differs from the oracle: 'w' at step 0, gradients_final, rank 0: error 1 against bound 0"


@pytest.mark.parametrize(
    ("line", "claim"),
    [
        (f"equivalence: {END}", None),
        (f"equivalence: every gradient is 2 times too large (2 = ranks): {END}", "factor"),
        (f"equivalence: the share of data coordinate 1 is missing: {END}", "operation"),
        (f"equivalence: only the part of 'w' on rank 1 is wrong: {END}", "place"),
        (f"equivalence: the buffer 'b' on rank 1 is not the initial value: {END}", "place"),
        ("equivalence: summed loss 1.0 against 2.0: 'loss' at step 0", None),
        ("equivalence: only the last micro-batch is in the loss: summed loss 1.0", "operation"),
        ("norm: norms were added over 'pipe': pre-clip global norm is wrong: ...", "operation"),
        ("norm: pre-clip global norm is wrong: 'gradient norm' at step 0", None),
        ("traffic: step 0: as many calls, 2 times wider, as another dtype would be", "operation"),
        ("memory: rank 0, step 0: 2 times", None),
    ],
)
def test_a_claim_stands_before_the_numbers(line: str, claim: str | None) -> None:
    assert claim_of(line) == claim


@pytest.mark.parametrize(
    ("reason", "how"),
    [
        (f"equivalence: every gradient is 3 times too small (3 = ranks): {END}", "exact"),
        (f"equivalence: every gradient is 2 times too small: {END}", "wrong"),
        (
            f"equivalence: the gradient contains only the last micro-batch: {END}\nnorm: is wrong",
            "wrong",
        ),
        (f"equivalence: only the part of 'w' on rank 1 is wrong: {END}", "vague"),
        (f"equivalence: {END}", "vague"),
    ],
)
def test_how_near_a_sentence_is_to_a_fault(reason: str, how: str) -> None:
    assert told("3 times too small", reason) == how
