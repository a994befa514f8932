"""The parts that a user's model may not replace: those that judge its cases.

The process that judges a case imports a model of a user's own, for it is what is true (docs:
contract.md).  A module can replace whatever lives there; what it replaces of the suite, of
optimizers and of the standard library's numbers and texts would judge, and no model needs it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardproof.workloads.knobs import WorkloadError

#: Modules, with those below them; the first but for systems under test.
_JUDGING = ("shardproof", "torch.optim", "json", "hashlib", "math", "struct")
_NOT_JUDGING = "shardproof.impls"
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


@contextmanager
def standing(path: str) -> Iterator[None]:
    """The code inside is of the workload at ``path``, and replaces nothing that judges.

    torch may: by the first update, ``SGD.step`` becomes one that is profiled.

    :raises WorkloadError: it does.
    """
    before = dict(_parts())
    yield
    now = dict(_parts())
    others = (name for name, part in before.items() if now.get(name, part) is not part)
    if name := next((name for name in others if not _is_own(now[name])), ""):
        remedy = "do not replace it, or move the model to a module without the replacement"
        message = (
            f"workload {path!r} replaces {name}, which the suite needs to check results: {remedy}"
        )
        raise WorkloadError(message)


def _parts() -> Iterator[tuple[str, Any]]:
    for name, module in [*sys.modules.items()]:
        inside = any(name == top or name.startswith(f"{top}.") for top in _JUDGING)
        if not inside or name.startswith(_NOT_JUDGING) or module is None:
            continue
        for key, value in [*vars(module).items()]:
            if callable(value):
                yield f"{name}.{key}", value
            if isinstance(value, type) and value.__module__ == name:
                for part, method in [*vars(value).items()]:
                    if callable(method) or isinstance(
                        method, property | classmethod | staticmethod
                    ):
                        yield f"{name}.{key}.{part}", method


def _is_own(value: Any) -> bool:
    """Whether its code is torch's or the suite's, whatever it calls itself."""
    code = getattr(value, "__code__", None)
    return code is not None and code.co_filename.startswith(_OWN)
