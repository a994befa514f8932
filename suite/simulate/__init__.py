"""Simulation of one rank of a large world: its real code, on tensors without values.

``group`` is a process group that moves nothing, ``rank`` drives an implementation on it with both
ledgers, ``sources`` says what is trained (``model``: published shapes; ``own``: a user's model),
``figures`` adds up, ``compared`` holds simulated ranks against those of a stored run.  The package
itself can be called::

    from shardproof import simulate
    print(simulate("mypackage.model:build", impl="pytorch/fsdp2", mesh={"shard": 64}))
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module that is also the function of its name: one word for people who import it."""

    def __call__(self, model: Any, **named: Any) -> Any:
        from shardproof.simulate.calls import simulate

        return simulate(model, **named)


sys.modules[__name__].__class__ = _Callable
