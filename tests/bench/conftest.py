"""Fixtures of the tests of timing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kept_fork_server import KeptForkServer


@pytest.fixture(scope="module")
def brief_sessions() -> Iterator[None]:
    """Leaders of bench sessions warm up, time and probe for a moment: no test asserts seconds."""
    changed = {"sides:WARM_SECONDS": 0.3, "sides:SEGMENT_SECONDS": 0.02}
    probes = {"RATE_SECONDS": 0.002, "CALLS": 2, "POOL_BYTES": 1 << 20}
    changed |= {f"model.probes:{name}": value for name, value in probes.items()}
    with pytest.MonkeyPatch.context() as patch:
        named = {f"shardproof.bench.{name}": value for name, value in changed.items()}
        patch.setattr(KeptForkServer, "changed", named)
        yield
