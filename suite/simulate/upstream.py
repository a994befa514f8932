"""The places where torch reads values of tensors in C++, which fakes do not have.

Each is left out while a rank is simulated; none of them holds or sends anything in a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch.nn.parallel import distributed


class _Reducer:
    """DDP's reducer without the second order of its buckets, which it reads from a tensor."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


@contextmanager
def without_values() -> Iterator[None]:
    """DDP neither compares shapes over ranks nor sends the initial values."""
    original = distributed.DistributedDataParallel._ddp_init_helper

    def made(self: Any, *given: Any, **named: Any) -> None:
        original(self, *given, **named)
        self.reducer = _Reducer(self.reducer)

    def nothing(*given: Any, **named: Any) -> None:
        """Ranks are alike."""

    with ExitStack() as stack:
        for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
            stack.enter_context(patch.object(distributed, name, nothing))
        owner = distributed.DistributedDataParallel
        stack.enter_context(patch.object(owner, "_ddp_init_helper", made))
        yield
