"""The costs of every strategy, in closed form, from shapes, options, mesh, optimizer, precision.

A cost model never asks the implementation that is judged: it computes from
:class:`~shardproof.costs.model_facts.ModelFacts`.  Bytes that one step sends, summed over ranks
(N ranks of the axis, m rounds; P, G and O are total bytes of the model's parameters, gradients and
optimizer state; Psi, where a paper is cited, is the number of elements):

    strategy      file          class            bytes sent
    naive_ddp     ddp.py        NaiveDDP         2 (N-1) G
    ddp           ddp.py        DDP              2 (N-1) G + (N-1) buffers
    local_sgd     local.py      LocalSGD         2 (N-1) P in every H-th step, else nothing
    diloco        local.py      DiLoCo           the same
    parameter_server  local.py  ParameterServer  2 (N-k) P, with k servers, where nothing is late
    zero1         zero.py       Zero1            (N-1) (G + P)
    zero2         zero.py       Zero2            (N-1) (m G + P)
    zero3         zero.py       Zero3            (N-1) (m G + 2 m P)
    fsdp          fsdp.py       FSDP             zero3's, less what strategy and options keep whole
    expert        expert/       ExpertParallel   4 T d (T choices that leave their rank) + sums of G
    tensor        tensor.py     TensorParallel   2 all-reduces of activations a block and direction
    pipeline      pipeline.py   Pipeline         one activation and one gradient a boundary
    hybrid        hybrid.py     Hybrid           the sum over its axes

The record of a strategy (``shardproof.strategies``) names its class, which is imported when it is
first asked for.  Those of upstream systems lie beside their adapters (``impls/pytorch/costs/``,
``impls/deepspeed/costs.py``).  Helpers: ``model`` (what a cost model answers), ``layout`` (buckets,
units), ``stages`` and ``schedules`` (pipelines), ``offload``, ``accounting`` (A32, A16, ...),
``expression`` (formulas in scenario files), ``shapes`` (published models as facts).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache

from shardproof import axes, strategies
from shardproof.axes import Cut, replicas
from shardproof.by_path import CannotImport, at_path
from shardproof.costs.ddp import DDP
from shardproof.costs.expert import cannot_share_experts
from shardproof.costs.model import Bound as Bound
from shardproof.costs.model import CostModel
from shardproof.costs.model import Flow as Flow
from shardproof.costs.model import NoCostModel as NoCostModel
from shardproof.costs.model_facts import ModelFacts
from shardproof.costs.offload import asked
from shardproof.costs.tensor import cannot_share_layers


@cache
def cost_model_class(strategy: str) -> type[CostModel]:
    """The cost model of ``strategy``, before it is asked about a case.

    :raises LookupError: no record names one.
    :raises BrokenStrategy: the package that registers it gives no usable one.
    """
    record = strategies.of(strategy)
    if not record.is_known:
        raise LookupError(f"unknown strategy {strategy!r}")
    names = f"has the cost model {record.cost_model}, which"
    try:
        found = at_path(record.cost_model)
    except CannotImport as error:
        raise strategies.broken(strategy, f"{names} {error}") from error
    if not (isinstance(found, type) and issubclass(found, CostModel)):
        what = f"{names} is not a subclass of shardproof.costs.model.CostModel"
        raise strategies.broken(strategy, what)
    missing = sorted(found.__abstractmethods__)
    missing += [name for name in ("strategy", "source") if not hasattr(found, name)]
    if missing:
        what = f"{names} does not define: {', '.join(missing)}"
        raise strategies.broken(strategy, what)
    return found


#: What an axis cuts -> why its ranks cannot share the model of a case (empty: they can).
FITS: Mapping[Cut, Callable[[ModelFacts], str]] = {
    "widths": cannot_share_layers,
    "experts": cannot_share_experts,
}


def cannot_fit(facts: ModelFacts, strategy: str | None = None) -> str:
    """Why the ranks of an axis cannot share the model; empty: all of them can.

    A ``strategy`` without a record may share something else along an axis (a ring of positions).
    """
    along = axes.names() if strategy is None else strategies.of(strategy).axes
    cuts = [what for what in FITS if axes.cutting(what) in along]
    reasons = (FITS[what](facts) for what in cuts if facts.parts(what) > 1)
    return next(filter(None, reasons), "")


def cost_model_of(strategy: str, facts: ModelFacts | None) -> CostModel | None:
    """The cost model of ``strategy`` for ``facts``; ``None`` where there is none."""
    if facts is None or not strategies.of(strategy).is_known:
        return None
    return asked(cost_model_class(strategy), facts)


def memory_ratio(cost_model: CostModel) -> Fraction:
    """How many times less a rank holds than under full replication.

    Judged classes, once all state exists, on the rank that holds most.
    """
    return Fraction(whole_bytes(cost_model), cost_model.total() or 1)


def whole_bytes(cost_model: CostModel) -> int:
    """Bytes that each rank holds under full replication, with the same options."""
    return DDP(replace(cost_model.facts, axes=replicas(cost_model.facts.world))).total()
