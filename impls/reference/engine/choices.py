"""Options that strategies share, and the declarations that belong to them.

collectives    whose sums and gathers: the backend's own, or those of collectives/
compress       what gradients lose on their way: parts/compressors/
precision      what is computed, reduced and kept in which dtype (precision.py)
checkpoint     what ``save`` writes: checkpoint/
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from typing import Any, Literal, NoReturn, get_args

import torch

from shardproof.contract import Capabilities, Refused, average
from shardproof.impls.reference.engine.options import as_yaml, at_least
from shardproof.impls.reference.engine.precision import Precision

#: What nearly every strategy can do.
USUAL = frozenset({"clipping", "accumulation", "initial_broadcast", "frozen_parameters"})


#: What ``save`` can write: impls/reference/checkpoint/.
Format = Literal["full", "sharded", "asynchronous"]
FORMATS: tuple[str, ...] = get_args(Format)


def declared(*features: str, **fields: Any) -> Capabilities:
    """The common declaration with ``features``; ``fields`` adds or replaces values.

    Any of three dtypes, buffers of each rank's own, and the features :data:`USUAL`.
    """
    usual = {"dtypes": ("float64", "float32", "bfloat16"), "buffers": "per_rank"}
    return Capabilities(features=USUAL | set(features), **(usual | fields))


@dataclass(frozen=True)
class Checkpoints:
    """``format``: the format that ``save`` writes. ``keep``: the number of a run's checkpoints to
    keep.

    ``reshape``: whether ``load`` takes what another strategy or mesh saved.
    """

    format: Format = "sharded"
    keep: int = 2
    reshape: bool = True

    def __post_init__(self) -> None:
        at_least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True)
class Saved:
    """The option of all reference strategies."""

    checkpoint: Checkpoints = field(default_factory=Checkpoints, kw_only=True)


@dataclass(frozen=True)
class Followed:
    """State that follows training, for strategies with one update for all.

    ``average``: decay of an average of the parameters that each rank updates (0: none).
    ``decay_rate``: by how much weight decay is multiplied from one step to the next.
    """

    average: float = field(default=0.0, kw_only=True)
    decay_rate: float = field(default=1.0, kw_only=True)

    @property
    def follows(self) -> dict[str, str]:
        """The rules of the further state."""
        if not 0 <= self.average < 1:
            raise Refused(f"option 'average' must be at least 0 and below 1, not {self.average:g}")
        if self.decay_rate <= 0:
            raise Refused(f"option 'decay_rate' must be above 0, not {self.decay_rate:g}")
        rules = {"average.*": average(self.average)} if self.average else {}
        if self.decay_rate != 1:
            rate = f"{Decimal(repr(float(self.decay_rate))):f}"  # all digits, and no exponent
            rules["optimizer.weight_decay"] = f"weight_decay * power({rate}, step)"
        return rules


@dataclass(frozen=True)
class Training:
    """Options that all sharded strategies share.

    ``recompute_every``: every group of so many units keeps its input only and is computed again in
    backward (0: never).  ``offload``: what rests in host memory between its uses.
    """

    precision: Precision = field(default_factory=Precision)
    recompute_every: int = 0
    offload: Literal["none", "optimizer", "parameters"] = "none"

    def __post_init__(self) -> None:
        at_least("recompute_every", self.recompute_every, 0)


@dataclass(frozen=True)
class WholeParameters(Training):
    """Options of strategies that keep whole parameters on every rank. These cannot rest in host
    memory, because every rank computes with them.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offload == "parameters":
            raise Refused(
                "option 'offload' = 'parameters': ZeRO-1 and ZeRO-2 compute with whole "
                "parameters on every rank; set offload to 'none' or 'optimizer'"
            )


@dataclass(frozen=True)
class Hierarchical:
    """Ranks ``q * ranks_per_node`` to ``(q + 1) * ranks_per_node - 1`` share node q."""

    algorithm: Literal["hierarchical"] = "hierarchical"
    ranks_per_node: int = 0

    def __post_init__(self) -> None:
        at_least("all_reduce.ranks_per_node", self.ranks_per_node, 1)


AllReduce = (
    Literal[
        "backend",
        "ring",
        "recursive_doubling",
        "rabenseifner",
        "binomial_tree",
        "double_binary_tree",
    ]
    | Hierarchical
)
Ring = Literal["backend", "ring"]


@dataclass(frozen=True)
class OfWholes:
    """``all_reduce``: the algorithm that sums gradients over replicas.

    ``hierarchical`` must know the nodes: ``{algorithm: hierarchical, ranks_per_node: 4}``.
    """

    all_reduce: AllReduce = "backend"


@dataclass(frozen=True)
class OfShards:
    """The algorithms that sum gradients into shards and gather shards of parameters."""

    reduce_scatter: Ring = "backend"
    all_gather: Ring = "backend"


@dataclass(frozen=True)
class OfBoth(OfShards, OfWholes):
    """All three algorithms."""


def collectives_of(options: object) -> OfBoth:
    """The collectives that the ``options`` of a strategy choose."""
    named = {f.name for f in fields(OfBoth)}
    return OfBoth(**{name: vars(options)[name] for name in named & vars(options).keys()})


Method = Literal["cast", "topk", "randomk", "powersgd", "sign", "onebit"]
#: What a method of compression must be told, and what it may be told besides.
NEEDS = {"cast": ("dtype",), "topk": ("density",), "randomk": ("density",), "powersgd": ("rank",)}
EXAMPLES = {"dtype": "bfloat16", "density": 0.01, "rank": 2}
MAY = {
    "cast": ("feedback",),
    "topk": ("dtype", "feedback"),
    "randomk": ("dtype", "feedback", "seed"),
    "powersgd": ("feedback", "seed"),
}
#: Methods whose sums are made of nothing but additions in the order of ranks.
ADDED = ("cast", "topk", "randomk")
#: Methods that were published with error feedback: they have it unless told otherwise.
FED_BACK = ("topk", "powersgd", "onebit")


@dataclass(frozen=True)
class Compress:
    """``method``, and its settings.

    ``density``: the share of elements that is sent.  ``rank``: columns of a factor.  ``dtype``:
    what values are sent in (``None``: as they are).  ``feedback``: whether what was not sent is
    added to the next gradient (``None``: as published).  ``seed``: of all that is drawn.
    """

    method: Method
    density: float | None = None
    rank: int | None = None
    dtype: torch.dtype | None = None
    feedback: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        needed, more = NEEDS.get(self.method, ()), MAY.get(self.method, ())
        usual = {"density": None, "rank": None, "dtype": None, "feedback": None, "seed": 0}
        for name, none in usual.items():
            value = getattr(self, name)
            if name in needed and value is None:
                example = f"write e.g. {name}: {EXAMPLES[name]}"
                raise Refused(
                    f"option 'compress.{name}' is missing, but {self.method} needs it; {example}"
                )
            if name not in needed and name not in more and value != none:
                takes = ", ".join((*needed, *more)) or "no other option"
                self._refuse(name, f"{self.method} uses {takes}; leave this option out")
        if self.density is not None and not 0 < self.density <= 1:
            self._refuse("density", "the share of elements to send must be above 0 and at most 1")
        if self.rank is not None:
            at_least("compress.rank", self.rank, 1)
        at_least("compress.seed", self.seed, 0)

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise Refused(f"option 'compress.{name}' = {as_yaml(getattr(self, name))}: {why}")

    @property
    def feeds_back(self) -> bool:
        """Whether unsent parts are added to the next gradient."""
        return self.method in FED_BACK if self.feedback is None else self.feedback


@dataclass(frozen=True)
class Reduction:
    """The way a strategy reduces: ``scattered`` over shards, or whole; in ``each_round``, or once
    per step.
    """

    scattered: bool = False
    each_round: bool = False


@dataclass(frozen=True)
class Compressing:
    """The option of all strategies that reduce gradients."""

    compress: Compress | None = field(default=None, kw_only=True)

    @property
    def reduction(self) -> Reduction:
        """The way this strategy reduces: whole, once per step."""
        return Reduction()


#: Why units by size are declined where a module is used for a while.
IDLE = "the residual of a unit that is no longer called is kept, but the reference run sends it"


def lossy(exact: Capabilities, options: Any) -> Capabilities:
    """The declaration of a strategy with ``options``: ``exact`` unless it compresses, with the
    rules of further state and the loss terms that the engine adds.

    Then it is compared with an emulation, whose bits it has where nothing is rounded but in it.

    :raises Refused: options that do not go together with ``compress``.
    """
    if isinstance(options, Followed):
        exact = replace(exact, follows=options.follows, scopes=("rank", "global"))
    if options.compress is None:
        return exact
    for name in ("all_reduce", "reduce_scatter"):
        if (algorithm := getattr(options, name, "backend")) != "backend":
            raise Refused(
                f"option 'compress' with {name} = {algorithm!r}: only the backend's own "
                f"collectives can send compressed gradients; leave 'compress' or {name!r} out"
            )
    precision = getattr(options, "precision", Precision())
    if precision.parameters or precision.reduce:
        raise Refused(
            "option 'compress' with 'precision': gradients would be rounded before they are "
            "compressed; leave 'compress' or 'precision' out (to sum in another dtype, set "
            "compress.method to 'cast')"
        )
    if getattr(options, "sharding_strategy", "") == "HYBRID_SHARD":
        raise Refused(
            "option 'compress' with sharding_strategy 'HYBRID_SHARD': gradients are summed in "
            "two stages, over shards and then over replicas, which 'compress' does not support; "
            "use FULL_SHARD, SHARD_GRAD_OP or NO_SHARD"
        )
    emulates: Literal["step", "round"] = "round" if options.reduction.each_round else "step"
    exactness: Literal["bitwise", "lossy"] = (
        "bitwise" if options.compress.method in ADDED else "lossy"
    )
    wrap = getattr(options, "wrap", None)
    by_size = wrap is not None and wrap.minimum_parameters is not None
    idle = {"conditional_early_step": IDLE} if options.compress.feeds_back and by_size else {}
    declines = {**exact.declines, **idle}
    return replace(
        exact, declines=declines, exactness=exactness, oracle="emulated", emulates=emulates
    )
