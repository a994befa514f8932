"""The work of attention: floating-point operations of its forwards, where ranks share positions.

Two products of queries, keys and values count: 4 D operations for each score of a head of size D.
Hidden scores count as well if a rank computes them.  What backward computes again inside of one
operator does not count, but a forward that backward repeats does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop

from shardproof.contract import Role

_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
#: torch has no formula for its kernel on CPUs, which computes what the one on GPUs does.
_COUNTED = {getattr(torch.ops.aten, _KERNEL, None): sdpa_flop, **flop_registry}


class Attended(TorchDispatchMode):
    """``total``: operations since it was last set to 0; ``None``: some were not counted."""

    total: int | None = 0
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch compile what it would without this mode."""
        return True

    def __deepcopy__(self, memo: object) -> Attended:
        """Itself: hooks of a module's copy count into the same total."""
        return self

    def watch(self, module: nn.Module, roles: Mapping[str, Role]) -> None:
        """Count what the attention of ``module`` computes."""
        for core in (part for name, part in module.named_modules() if roles.get(name) == "core"):
            core.register_forward_pre_hook(self._begin)
            core.register_forward_hook(self._end, always_call=True)

    def _begin(self, *given: Any) -> None:
        self.__enter__()

    def _end(self, *given: Any) -> None:
        self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        counted = _COUNTED.get(getattr(func, "overloadpacket", func))
        if counted is not None and self.total is not None:
            try:
                self.total += int(counted(*args, **(kwargs or {}), out_val=out))
            except Exception:  # noqa: BLE001 - formulas refuse shapes that operators take
                self.total = None
        return out
