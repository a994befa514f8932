"""The option ``compress``: its keys, what goes together, and what that declares."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

import torch

from shardproof.contract import Capabilities, Refused
from shardproof.impls.reference.engine.options import as_yaml, at_least
from shardproof.impls.reference.engine.precision import Precision

Method = Literal["cast", "topk", "randomk", "powersgd", "sign", "onebit"]
#: What a method must be told, and what it may be told besides.
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
    """``method``, and what it takes.

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
                example = f"write {name}: {EXAMPLES[name]}, for example"
                raise Refused(
                    f"option 'compress.{name}' is missing: {self.method} needs it; {example}"
                )
            if name not in needed and name not in more and value != none:
                takes = ", ".join((*needed, *more)) or "nothing else"
                self._refuse(name, f"{self.method} takes {takes}; leave it out")
        if self.density is not None and not 0 < self.density <= 1:
            self._refuse("density", "the share of elements to send lies above 0, and is at most 1")
        if self.rank is not None:
            at_least("compress.rank", self.rank, 1)
        at_least("compress.seed", self.seed, 0)

    def _refuse(self, name: str, why: str) -> NoReturn:
        raise Refused(f"option 'compress.{name}' = {as_yaml(getattr(self, name))}: {why}")

    @property
    def feeds_back(self) -> bool:
        """Whether what was not sent is added to the next gradient."""
        return self.method in FED_BACK if self.feedback is None else self.feedback


@dataclass(frozen=True)
class Reduction:
    """How a strategy reduces: ``scattered`` over shards, or whole; in ``each_round``, or once a
    step.
    """

    scattered: bool = False
    each_round: bool = False


@dataclass(frozen=True)
class Compressing:
    """The option of all strategies that reduce gradients."""

    compress: Compress | None = field(default=None, kw_only=True)

    @property
    def reduction(self) -> Reduction:
        """How the strategy reduces: whole, once a step."""
        return Reduction()


#: Why units by size are declined where a module is used for a while.
IDLE = (
    "a unit that no rank calls any more keeps what it owes; the emulator knows no units, sends it"
)


def lossy(exact: Capabilities, options: Any) -> Capabilities:
    """What a strategy with ``options`` declares, which is ``exact`` unless it compresses.

    Then it is compared with an emulation, whose bits it has where nothing is rounded but in it.

    :raises Refused: options that do not go together with ``compress``.
    """
    if options.compress is None:
        return exact
    for name in ("all_reduce", "reduce_scatter"):
        if (algorithm := getattr(options, name, "backend")) != "backend":
            raise Refused(
                f"option 'compress' with {name} = {algorithm!r}: what is compressed travels by "
                "the backend's own collectives; leave one of the two out"
            )
    precision = getattr(options, "precision", Precision())
    if precision.parameters or precision.reduce:
        raise Refused(
            "option 'compress' with 'precision': gradients would be rounded before they are "
            "compressed; leave one of the two out (method cast sums in another dtype)"
        )
    if getattr(options, "sharding_strategy", "") == "HYBRID_SHARD":
        raise Refused(
            "option 'compress' with sharding_strategy 'HYBRID_SHARD': gradients are summed twice, "
            "over shards and over replicas; take FULL_SHARD, SHARD_GRAD_OP or NO_SHARD"
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
