"""Where a stack of units is cut into the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from suite.contract import Refused


def cut(units: int, stages: int, split: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """First unit and the one after the last of each stage; :class:`Refused` if it cannot be."""
    if stages > units:
        raise Refused(f"{stages} stages for {units} units: a stage has at least one")
    small, larger = divmod(units, stages)
    sizes = [small + 1] * larger + [small] * (stages - larger) if split is None else list(split)
    if len(sizes) != stages or sum(sizes) != units or min(sizes) < 1:
        raise Refused(
            f"option 'split' = {sizes}: needs {stages} numbers from 1 on, one for each "
            f"stage, that sum to the {units} units"
        )
    ends = [sum(sizes[: number + 1]) for number in range(stages)]
    return list(zip([0, *ends], ends, strict=False))
