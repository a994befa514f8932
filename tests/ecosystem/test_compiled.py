"""The option ``compile`` compiles, and the bucket that torch.compile cannot split by is refused."""

from __future__ import annotations

from typing import Any

import pytest

from shardproof import prove
from shardproof.case import WorkloadSpec
from shardproof.contract import Refused
from shardproof.impls.pytorch.ddp import PyTorchDDP

SMALL = WorkloadSpec("charnames_gpt", global_batch=4, micro_batches=1, params={"layers": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axis", "verdict", "options"),
    [
        ("CheckedDDP", "replicate", "pass", {"compile": "aot_eager"}),
        ("CheckedFSDP1", "shard", "pass", {"compile": "aot_eager"}),
        ("CheckedFSDP2", "shard", "pass", {"compile": "aot_eager"}),
        ("CheckedDDP", "replicate", "crash", {}),
    ],
)
def test_something_is_compiled(name: str, axis: str, verdict: str, options: dict[str, Any]) -> None:
    system = f"tests.support.compiled_systems:{name}"
    usual: dict[str, Any] = {"workload": SMALL, "backends": "gloo", "worlds": (2,), "steps": 3}
    (row,) = prove(system, axis=axis, options=options, **usual).itertuples()
    assert row.verdict == verdict, row.reason
    assert verdict == "pass" or "0 graphs" in row.reason


def test_buckets_below_the_first_ones_size_are_refused() -> None:
    with pytest.raises(Refused, match=r"'bucket_cap_mb' = 0\.5 with 'compile'"):
        PyTorchDDP.capabilities({"compile": "aot_eager", "bucket_cap_mb": 0.5})
    PyTorchDDP.capabilities({"compile": "aot_eager", "bucket_cap_mb": 1})
    with pytest.raises(Refused, match="is not valid; valid: "):
        PyTorchDDP.capabilities({"compile": "inductor"})
