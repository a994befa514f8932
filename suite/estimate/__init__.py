"""The needs of training before it runs: bytes on every rank, bytes sent, by closed formulas.

The formulas are those of the checks (``suite/costs/``), evaluated at any size.  The package itself
can be called::

    from shardproof import estimate
    print(estimate(model, "adamw", impl="reference/zero3", gpus=8))

``costs/shapes/`` has the published models and makes facts of one, ``activations`` has Korthikanti's
formulas, ``figures`` adds up.  ``claims`` tests popular sentences with these figures.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A module that is also the function of its name: one word for people who import it."""

    def __call__(self, model: Any, *given: Any, **named: Any) -> Any:
        from shardproof.estimate.own import estimate

        return estimate(model, *given, **named)


sys.modules[__name__].__class__ = _Callable
