"""Several axes at once: the sum of what each axis costs.

The strategy of the data axes sees each stage of each tensor rank as a model of its own, and each
tensor that is tied over stages as another; its cost model gets the facts of that model alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from shardproof import axes, strategies
from shardproof.axes import cutting
from shardproof.costs import cost_model_class
from shardproof.costs.context import Exchange
from shardproof.costs.ddp import Single
from shardproof.costs.expert import ExpertParallel, folded
from shardproof.costs.fsdp import FSDP
from shardproof.costs.model import Bound, CostModel, Flow, Local, NoCostModel, flow
from shardproof.costs.model_facts import ModelFacts, TensorFacts
from shardproof.costs.offload import asked
from shardproof.costs.pipeline import Pipeline, StageMessage, exchanged
from shardproof.costs.stages import Stages, stages_of
from shardproof.costs.tensor import TensorParallel
from shardproof.costs.zero import Zero3

#: Bytes of what a step adds up a micro-batch at a time: its loss, and what is agreed on.
_SCALARS = 64
#: Options of units that are gathered when a step begins and reduced when it ends, all in one.
_ONCE = {"accumulate_without_communication": True, "reshard_after_forward": False}


def _added(name: str) -> Callable[..., dict[str, int]]:
    """The method ``name`` of all models of a rank, added up key by key."""

    def added(self: Hybrid, rank: int, *given: Any) -> dict[str, int]:
        models, number = self.of(rank)
        total = Counter[str]()
        for model in models:
            total.update(getattr(model, name)(number, *given))
        return dict(total)

    return added


class Hybrid(CostModel):
    """The sum over stages and tensor ranks; under sequence parallelism stages hand on 1/T."""

    strategy = "hybrid"
    source = (
        "Narayanan et al. (arXiv 2104.04473) sections 3.1 to 3.3: the axes' costs add up, each on "
        "what the others leave; in a pipeline shards are gathered and reduced once per step"
    )

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        sent = tuple(replace(t, dtype=facts.compute(t.dtype)) for t in facts.parameters)
        options = {"sum_each_backward": True, **facts.options}
        #: What attention sends along the axis that cuts positions; its layers are split by heads.
        self.exchange = Exchange.of(facts)
        layers = replace(self.exchange.cut_facts(), options=options, parameters=sent, clipped=False)
        self.layers = TensorParallel(layers)
        # Without data axes no strategy is asked: what is unused has no gradient, as in one process.
        self.has_data = bool(facts.data_axes)
        self.data = str(facts.option("data", "ddp")) if self.has_data else Single.strategy
        self.is_cut = facts.parts("layers") > 1
        #: Experts, on the mesh of those that data ranks divide.
        self.dispatch = ExpertParallel(replace(facts, axes=folded(facts)))
        #                 tensor 0   tensor 1
        #   pipe rank 0      a          b       the data ranks of one cell share its list of models:
        #   pipe rank 1      c          d       one a stage, and one a tensor tied over stages
        self.models = lru_cache(maxsize=None)(self._models)
        self.frees_gradients = all(m.frees_gradients for m in self.of(0)[0])  # type: ignore[misc]

    @cached_property
    def stages(self) -> Stages:
        """How the units of the model lie on the stages."""
        return stages_of(self.facts)

    def _models(self, pipe: int, tensor: int) -> list[CostModel]:
        """The costs of each stage and each tied tensor that rank ``tensor`` has of rank
        ``pipe``.
        """
        if not self.is_cut:
            return self.both(self.facts.parameters, self.facts.buffers, tensor)
        held = [t for t in self.facts.parameters if pipe in self.stages.ranks(t)]
        tied = [t for t in held if self.has_tied([t])]
        models = []
        for stage in self.stages.of(pipe):
            own = [t for t in held if t not in tied and self.stages.homes(t) == [stage]]
            buffers = [b for b in self.facts.buffers if self.stages.homes(b) == [stage]]
            models += self.both(own, buffers, tensor)
        return models + [self.model([t], [], tensor) for t in tied]

    def has_tied(self, tensors: Iterable[TensorFacts]) -> bool:
        """Whether one of ``tensors`` has a home on more than one stage."""
        return self.is_cut and any(len(self.stages.homes(tensor)) > 1 for tensor in tensors)

    def both(
        self, parameters: Sequence[TensorFacts], buffers: Sequence[TensorFacts], tensor: int
    ) -> list[CostModel]:
        """The models of these tensors; that of experts which data ranks divide by itself."""
        is_folded = bool(self.facts.option("experts", None))
        stacks = [t for t in parameters if is_folded and self.dispatch.is_expert(t)]
        found = [self.model([t for t in parameters if t not in stacks], buffers, tensor)]
        if stacks:
            facts, mesh = self.model(stacks, [], tensor).facts, self.dispatch.facts.axes
            along = {n: mesh[n] for n in axes.summing(mesh, axes.EXPERT)}
            # Under another name: to their strategy the ranks that divide experts are no group.
            along["divided"] = self.dispatch.ranks
            own = tuple(replace(t, shape=(self.dispatch.elements(t),)) for t in stacks)
            facts = replace(facts, axes=along, options=_ONCE, units=(), modules={"": ""})
            strategy = cost_model_class(self.facts.option("experts", {}).get("data", "ddp"))
            found.append(strategy(replace(facts, parameters=own)))
        return found

    def model(
        self, parameters: Sequence[TensorFacts], buffers: Sequence[TensorFacts], tensor: int
    ) -> CostModel:
        """The strategy of the data axes on these tensors, as rank ``tensor`` has them."""
        facts, tied = self.facts, self.has_tied(parameters)
        local = tuple(self.local_part(t, tensor) for t in parameters)
        names = {t.name for t in local}
        groups = (tuple(n for n in group if n in names) for group in facts.groups)
        options = {
            **(facts.option("data_options", {}) if self.has_data else {}),
            **{n: facts.options[n] for n in ("precision", "offload") if n in facts.options},
            "recompute_every": facts.option("recompute_every", 0),
        }
        if not strategies.of(self.data).serves_data_axes:
            raise NoCostModel(f"strategy {self.data!r} (option data) cannot run on data axes")
        strategy = cost_model_class(self.data)
        if self.is_cut and issubclass(strategy, Zero3):
            strategy = FSDP  # gathered when a step begins, reduced when it ends, all in one
            facts = replace(facts, units=(), modules={"": ""}, calls={})
            options = {**options, **_ONCE}
        rounds = facts.micro_batches
        inner = replace(
            facts,
            axes=facts.data_axes,
            options=options,
            parameters=local,
            buffers=tuple(buffers),
            # Stages exchange a tied tensor's gradient once a step: it is reduced after that, once.
            micro_batches=tuple(min(n, 1) for n in rounds) if tied else rounds,
            groups=tuple(group for group in groups if group),
            # The norm is counted once, over all axes, in flows().
            clipped=False,
            inputs=(),
            hidden={},
        )
        return asked(strategy, inner)

    def local_part(self, tensor: TensorFacts, rank: int) -> TensorFacts:
        """``tensor`` as rank ``rank`` of the tensor axis has it."""
        elements = self.layers.elements(tensor, rank)
        return tensor if elements == tensor.numel else replace(tensor, shape=(elements,))

    def of(self, rank: int) -> tuple[list[CostModel], int]:
        """The models of global ``rank``, and its number on the data axes."""
        at = (self.facts.place(rank, cutting(what)) for what in ("layers", "widths"))
        return self.models(*at), self.facts.place(rank, self.facts.group())

    def flows(self) -> list[Flow]:
        """Calls and bytes of one step, summed over the axes."""
        facts = self.facts
        flows = [
            replace(one, by_rank=None)  # each model numbers its own ranks
            for pipe in range(facts.parts("layers"))
            for tensor in range(facts.parts("widths"))
            for model in self.models(pipe, tensor)
            for one in model.flows()
        ]
        # One fp64 scalar along each axis of the mesh, one axis after the other.
        norm = [8] if facts.clipped else []
        return [
            *flows,
            *self.layers.flows(),
            *self.exchange.flows(),
            *self.dispatched(),
            *(exchanged([*self.messages(), *self.tied_messages()]) if self.is_cut else ()),
            *(one for axis in facts.axes for one in flow(facts, axis, "all_reduce", norm)),
        ]

    def dispatched(self) -> list[Flow]:
        """Rows of tokens, each rank's own: of its stages' layers, and from every tensor rank."""
        facts, dispatch = self.facts, self.dispatch
        if dispatch.ranks == 1:
            return []

        def holds(rank: int, layer: str) -> bool:
            at = facts.place(rank, cutting("layers"))
            return not self.is_cut or at in self.stages.ranks(dispatch.layers[layer])

        divided = {name: n // dispatch.facts.axes[name] for name, n in facts.data_axes.items()}
        return [replace(dispatch.exchanged(holds), axis=axes.joined(divided, divided))]

    def metadata_bytes(self) -> int:
        """Choices of routers, and counts of rows of the layers, each of which has one stage."""
        counts = self.dispatch.metadata_bytes() // self.facts.parts("layers")
        return self.exchange.metadata_bytes() + counts

    def messages(self) -> Iterator[StageMessage]:
        """Every message between stages; of a split sequence each rank has a part."""
        facts, layers = self.exchange.cut_facts(), self.layers
        if layers.is_sequence:
            hidden = {}
            for key, sizes in facts.hidden.items():
                rows = int(key.split("x")[0]) * layers.table.shape[1]  # elements of one position
                hidden[key] = tuple(layers.padded(n // rows) * rows // layers.ranks for n in sizes)
            facts = replace(facts, hidden=hidden)
        return Pipeline(facts).messages()

    def tied_messages(self) -> Iterator[StageMessage]:
        """The gradients of tied tensors that ranks of the pipe axis send each other."""
        facts = self.facts.without("widths")
        for tensor in range(self.facts.parts("widths")):
            local = tuple(self.local_part(t, tensor) for t in facts.parameters)
            yield from Pipeline(replace(facts, parameters=local)).tied_messages()

    resident, at_point = _added("resident"), _added("at_point")
    host, host_traffic = _added("host"), _added("host_traffic")

    def communication_at_rest(self, rank: int, step: int) -> int:
        """The bytes that the models keep there; every message has been sent and used by then."""
        models, number = self.of(rank)
        return _SCALARS + sum(model.communication_at_rest(number, step) or 0 for model in models)

    def agreements(self, rank: int) -> tuple[int, int] | None:
        """Those of the models, where the data axes are DDP's."""
        models, number = self.of(rank)
        own = [found for model in models if (found := model.agreements(number)) is not None]
        if len(own) < len(models):
            return None
        return sum(once for once, _ in own), sum(most for _, most in own)

    def unclassified_limit(self, rank: int, step: int) -> int:
        """Losses of the micro-batches, norms and factors, and what the models leave; no part of a
        layer, of a stage or of a shard beyond those that are held.
        """
        models, number = self.of(rank)
        left = sum(model.unclassified_limit(number, step) or 0 for model in models)
        return _SCALARS + 8 * self.facts.rounds + left

    def peaks(self, rank: int, phase: str, step: int) -> dict[str, Bound]:
        """Whole parameters of all units of all stages at once; where there are no stages, those of
        the units that are gathered. A tied tensor that is whole counts as the result of its gather.
        Buffers of the other axes are not distinguished from the data axes'.
        """
        models, number = self.of(rank)
        low = high = 0
        for model in models:
            bound = model.peaks(number, phase, step).get("parameters")
            if bound is None:
                return {}
            rests = model.resident(number, step, step)["parameters"]
            low += rests if self.has_tied(model.facts.parameters) else bound.low
            high += bound.high
        return {"parameters": Bound(low, high)} if models else {}

    def by_layout(self, rank: int) -> Mapping[str, Mapping[str, int]]:
        """Elements of parameters of ``rank``: of layers that the tensor axis splits, and of those
        that each of its ranks has.
        """
        return self.layers.laid_out(self.local(rank).parameters)

    def why_not_measured(self) -> str:
        """Why peaks of this case cannot be compared; empty: they can."""
        every = range(self.facts.world)
        reasons = (model.why_not_measured() for rank in every for model in self.of(rank)[0])
        return next((text for text in reasons if text), "")

    def local(self, rank: int) -> Local:
        """Elements that ``rank`` holds of its stages (name -> count)."""
        models, number = self.of(rank)
        parts = [model.local(number) for model in models]
        return Local(
            *(
                {name: n for part in parts for name, n in getattr(part, kind).items()}
                for kind in ("parameters", "gradients", "optimizer")
            )
        )
