"""What compressed reductions send and keep, against hand counts."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof.costs import ModelFacts, cost_model_class
from shardproof.costs.model_facts import TensorFacts

#: A matrix of 120 elements and a vector of 13, four bytes each.
MODEL = (
    TensorFacts("w", (12, 10), dtype="float32", owners=("",)),
    TensorFacts("v", (13,), dtype="float32", owners=("",)),
)
RANKS = 3


def facts(compress: dict[str, Any], **more: Any) -> ModelFacts:
    fields: dict[str, Any] = {
        "axes": {"replicate": RANKS},
        "options": {"compress": compress},
        "parameters": MODEL,
        "modules": {"": "M"},
        "units": (),
        "optimizer": "sgd",
    }
    return ModelFacts(**fields | more)


@pytest.mark.parametrize(
    ("compress", "step", "sent"),
    [
        ({"method": "cast", "dtype": "float16"}, 0, 2 * 2 * 2 * 133),
        ({"method": "cast", "dtype": "float32"}, 0, 2 * 2 * 4 * 133),
        # 12 of 120, and 2 of 13: rounded up; an index takes 4 bytes.
        ({"method": "topk", "density": 0.1}, 0, 2 * 3 * 14 * (4 + 4)),
        ({"method": "topk", "density": 0.1, "dtype": "float16"}, 0, 2 * 3 * 14 * (2 + 4)),
        ({"method": "randomk", "density": 0.1}, 0, 2 * 2 * 14 * 4),
        ({"method": "powersgd", "rank": 2}, 0, 2 * 2 * 4 * (2 * (12 + 10) + 13)),
        # Six columns would be more than the matrix.
        ({"method": "powersgd", "rank": 6}, 0, 2 * 2 * 4 * 133),
        # 15 and 2 bytes of signs, two magnitudes a rank.
        ({"method": "sign"}, 0, 2 * 2 * 17 + 2 * 3 * 2 * 4),
        ({"method": "onebit"}, 0, 2 * 2 * 17 + 2 * 2 * 3 * 2 * 4),
        ({"method": "fp16_hook"}, 0, 2 * 2 * 2 * 133),
        ({"method": "powersgd_hook", "rank": 2}, 1, 2 * 2 * 4 * 133),
        ({"method": "powersgd_hook", "rank": 2}, 2, 2 * 2 * 4 * (2 * (12 + 10) + 13)),
        # Three columns do not make half of the matrix.
        ({"method": "powersgd_hook", "rank": 3}, 2, 2 * 2 * 4 * 133),
    ],
    ids=str,
)
def test_bytes_that_all_ranks_send(compress: dict[str, Any], step: int, sent: int) -> None:
    flows = cost_model_class("naive_ddp")(facts(compress, step=step)).flows()
    assert sum(flow.bytes for flow in flows) == sent


@pytest.mark.parametrize(
    ("compress", "kept"),
    [
        ({"method": "cast", "dtype": "float16"}, [0, 0, 0]),
        ({"method": "cast", "dtype": "float16", "feedback": True}, [4 * 133] * 3),
        ({"method": "topk", "density": 0.1}, [4 * 133] * 3),
        ({"method": "topk", "density": 0.1, "feedback": False}, [0, 0, 0]),
        ({"method": "powersgd", "rank": 2}, [4 * (120 + 10 * 2)] * 3),
        ({"method": "sign"}, [0, 0, 0]),
        # Ranks serve 5 of 15 bytes of signs each; of 2 bytes, 8 and 5 elements, one, one and none.
        ({"method": "onebit"}, [4 * (133 + 40 + 8), 4 * (133 + 40 + 5), 4 * (133 + 40)]),
    ],
    ids=str,
)
def test_bytes_that_are_kept(compress: dict[str, Any], kept: list[int]) -> None:
    model, plain = (cost_model_class("naive_ddp")(facts(option)) for option in (compress, {}))
    for rank, own in enumerate(kept):
        more = model.resident(rank, 0, 0)["optimizer_state"]
        assert more - plain.resident(rank, 0, 0)["optimizer_state"] == own


@pytest.mark.parametrize(
    ("compress", "step", "drawn"),
    [
        ({"method": "powersgd_hook", "rank": 2}, 1, 0),
        ({"method": "powersgd_hook", "rank": 2}, 2, 4 * 2 * 10),  # of the matrix alone
        ({"method": "powersgd_hook", "rank": 2}, 3, 0),
        ({"method": "powersgd_hook", "rank": 2, "start": 3}, 3, 4 * 2 * 10),
        ({"method": "batched_hook", "rank": 2}, 2, 4 * 2 * 12),  # 133 elements make 12 rows
        ({"method": "fp16_hook"}, 2, 0),
        ({"method": "powersgd", "rank": 2}, 2, 0),
        ({}, 2, 0),
    ],
    ids=str,
)
def test_factors_that_torch_draws_beside_a_gpu(
    compress: dict[str, Any], step: int, drawn: int
) -> None:
    cost_model = cost_model_class("ddp")(facts(compress))
    assert cost_model.gpu_traffic(0, step, step) == {"down": 0, "up": drawn}
