"""The bytes that a strategy holds and sends for each element of a model, asked from its cost model.

No strategy is named here: the cost model of each is asked about a small model on 2 and on 4 ranks,
for one and for two micro-batches, and the coefficients follow from its answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardproof import axes
from shardproof.contract import Options
from shardproof.costs import cost_model_of, shapes
from shardproof.costs.model import CostModel
from shardproof.costs.shapes import BatchSize, Shape

#: A model whose tensors divide by 2 and by 4, and whose counters and padding are a rounding error.
_SMALL = Shape("probe", layers=4, hidden=512, heads=4, vocab=512, seq=16)
#: Ranks along each data axis.
_FEW, _MORE = 2, 4


@dataclass(frozen=True)
class Sent:
    """Bytes that one group moves for each element of its stage: ``once`` a step, and for each
    micro-batch ``each``; times N - 1 they are those of all N ranks.
    """

    axis: str
    operation: str
    once: float
    each: float


@dataclass(frozen=True)
class Coefficients:
    """``whole`` and ``divided`` bytes an element on a rank: its state is whole + divided / shards.

    ``gathers``: how much of the model a rank has gathered at once: nothing, units, or all.
    """

    whole: float
    divided: float
    gathers: str
    sent: tuple[Sent, ...]


def coefficients(
    strategy: str, along: Mapping[str, int], options: Options, accounting: str
) -> Coefficients:
    """Those of ``strategy`` on a mesh with the axes ``along``.

    :raises NoCostModel: there is no formula for these options.
    """
    few, more = (_model(strategy, along, options, accounting, n, 1) for n in (_FEW, _MORE))
    again = _model(strategy, along, options, accounting, _MORE, 2)
    stages = more.facts.parts("layers")
    elements = sum(t.numel for t in more.facts.parameters) / stages
    held = [sum(one.resident(0, 0, 0).values()) / elements for one in (few, more)]
    divided = (held[0] - held[1]) / (1 / _FEW - 1 / _MORE)
    once, twice = _sent(more, elements), _sent(again, elements)
    peaks = [more.peaks(0, phase, 0) for phase in ("forward", "backward")]
    gathered = max((p["parameters"].high for p in peaks if "parameters" in p), default=0)
    share = (gathered - more.resident(0, 0, 0)["parameters"]) / elements
    value = shapes.itemsize(more.facts)
    return Coefficients(
        whole=held[1] - divided / _MORE,
        divided=divided,
        gathers="" if share <= 0 else "all" if share > 0.9 * value else "units",
        sent=tuple(
            Sent(*key, once=2 * once[key] - twice[key], each=twice[key] - once[key]) for key in once
        ),
    )


def _model(
    strategy: str,
    along: Mapping[str, int],
    options: Options,
    accounting: str,
    ranks: int,
    micro_batches: int,
) -> CostModel:
    data = axes.sharing(along)
    # Stages change what is gathered when; other axes only divide what a rank has.
    stages = {n: 2 for n, size in along.items() if n == axes.cutting("layers") and size > 1}
    mesh = {**stages, **{n: ranks if n == data[-1] else _MORE for n in data}}
    kept: dict[str, Any] = {k: v for k, v in options.items() if k in ("precision", *_NAMED)}
    facts = shapes.facts_of(_SMALL, mesh, kept, accounting, BatchSize(1, 16, micro_batches))
    found = cost_model_of(strategy, facts)
    assert found is not None, strategy
    return found


#: Options on which these figures depend.
_NAMED = ("data", "sharding_strategy")


def _sent(model: CostModel, elements: float) -> dict[tuple[str, str], float]:
    """Axis and operation -> bytes of a group for each element, over N - 1."""
    found, data = defaultdict[tuple[str, str], float](float), axes.summing(model.facts.axes)
    for flow in model.sent():
        size = model.facts.size(flow.axis)
        if not flow.integers and size > 1 and {*flow.axis.split("+")} <= {*data}:
            groups = model.facts.world // size
            found[flow.axis, flow.operation] += float(flow.bytes) / groups / (size - 1) / elements
    return found
