"""Simulation of one rank of a large world: its real code, on tensors without values.

``group`` is a process group that moves nothing, ``rank`` drives an implementation on it with both
ledgers, ``sources`` says what is trained (``model``: published shapes; ``own``: a user's model),
``figures`` adds up, ``promised`` compares ranks with the formulas of their strategy, ``compared``
with the ranks of a stored run.  ``seconds`` times a step on one of ``machines``, ``picture`` draws
its memory.  The package itself can be called::

    from shardproof import simulate
    print(simulate("mypackage.model:build", impl="pytorch/fsdp2", mesh={"shard": 64}))
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module that can be called as the function of the same name."""

    def __call__(self, model: Any, **named: Any) -> Any:
        from shardproof.simulate.calls import simulate

        return simulate(model, **named)


sys.modules[__name__].__class__ = _Callable
