"""The faults that an earlier study left over, to be planted in other cases."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ValidationError

from shardproof.errors import Problem, SelectionError
from shardproof.files import read_input
from tools.studies.mutation import operators
from tools.studies.mutation.operators import Fault


class _Left(BaseModel):
    fault: str
    state: Literal["survived", "unreached", "endless", "not planted", "without effect", "explained"]
    diff: str


class Earlier(BaseModel):
    """The document of a study (``Study.document``), as far as a later one needs it."""

    seed: int
    counts: dict[str, int]
    before: int = 0
    left_out: int = 0
    left: list[_Left]

    @property
    def killed(self) -> int:
        """All faults killed before."""
        return self.counts.get("killed", 0) + self.before

    def states(self) -> dict[str, str]:
        """Fault -> its state."""
        return {one.fault: one.state for one in self.left}

    def faults(self) -> list[Fault]:
        """The remaining faults in order."""
        every = {fault.name: fault for fault in operators.faults()}
        return [every[one.fault] for one in self.left]


def read(path: Path) -> Earlier:
    """The study that ``--out`` wrote to ``path``.

    :raises SelectionError: there is none, or its faults are not those of this code.
    """
    try:
        found = Earlier.model_validate_json(read_input(path))
    except (OSError, ValidationError) as error:
        what = "holds no study of faults"
        if isinstance(error, ValidationError):
            (first, *_) = error.errors()
            what += f" ({'.'.join(map(str, first['loc'])) or 'its text'}: {first['msg']})"
        else:
            what = f"cannot be read ({error.strerror})"
        remedy = "give a file of `python -m tools.studies mutation N --out FILE`"
        raise SelectionError(Problem(what, remedy, file=str(path))) from None
    if not found.left:
        remedy = "draw a new sample with --seed"
        raise SelectionError(Problem("leaves no fault over", remedy, file=str(path)))
    known = {fault.name: fault.diff() for fault in operators.faults()}
    for one in found.left:
        if known.get(one.fault) != one.diff:
            what = f"{one.fault} is another fault in this code, or none"
            raise SelectionError(Problem(what, "draw a new sample", file=str(path)))
    return found
