"""DeepSpeed's own JSON form as options; every key that DeepSpeed would ignore is refused.

A scenario gives what would stand in ``ds_config.json``::

    options: {zero_optimization: {stage: 2, offload_optimizer: {device: cpu}}}

DeepSpeed takes any key and drops those that it does not know, or that its stage does not use; here
both are ``contract.Refused``.  What the case decides (optimizer, clipping, batch sizes) cannot be
given a second time, and no precision but fp32 is allowed.  Names and defaults: ``config.py`` and
``offload_config.py`` under ``deepspeed/runtime/zero`` in 0.19.8.  This module needs no DeepSpeed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from shardproof.contract import Refused
from shardproof.impls.deepspeed.checkpoint import Checkpoints, Saved
from shardproof.impls.reference.engine.options import at_least, parse_options, unknown

#: Sections of the JSON form that the case itself decides, and by what.
DECIDED: dict[str, str] = {
    "optimizer": "the scenario's optimizer",
    "scheduler": "the scenario's optimizer",
    "gradient_clipping": "the scenario's clip",
    "train_batch_size": "the scenario's workload",
    "train_micro_batch_size_per_gpu": "the scenario's workload",
    "gradient_accumulation_steps": "the scenario's workload",
}

#: Where DeepSpeed, or a scenario, asks for another precision.
PRECISION = ("fp16", "bf16", "precision")

#: Which stages use a key of ``zero_optimization``; a key that is not here is used by all of them.
STAGES: dict[str, tuple[int, ...]] = {
    "contiguous_gradients": (1, 2, 3),
    "reduce_scatter": (1, 2, 3),
    "reduce_bucket_size": (1, 2, 3),
    "overlap_comm": (1, 2, 3),
    "offload_optimizer": (1, 2, 3),
    "use_multi_rank_bucket_allreduce": (1, 2),
    "compute_grad_norm": (1, 2),
    "offload_param": (3,),
    "sub_group_size": (3,),
    "stage3_prefetch_bucket_size": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_model_persistence_threshold": (3,),
    "stage3_max_live_parameters": (3,),
    "stage3_max_reuse_distance": (3,),
    "memory_efficient_linear": (3,),
}


@dataclass(frozen=True)
class Offload:
    """``offload_optimizer`` or ``offload_param``: state that rests in host memory."""

    device: Literal["none", "cpu"] = "none"
    pin_memory: bool = True


@dataclass(frozen=True)
class ZeroOptimization:
    """The section ``zero_optimization``; sizes are elements, not bytes.

    ``overlap_comm``: ``None`` is on in stage 3 only.  ``use_multi_rank_bucket_allreduce``: a bucket
    whose parts belong to several ranks is summed by one all-reduce instead of one reduce an owner.
    ``stage3_param_persistence_threshold``: parameters of at most so many elements are never freed.
    """

    stage: int = 0
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: float = 5e8
    overlap_comm: bool | None = None
    use_multi_rank_bucket_allreduce: bool = True
    compute_grad_norm: bool = True
    offload_optimizer: Offload | None = None
    offload_param: Offload | None = None
    sub_group_size: float = 1e9
    stage3_prefetch_bucket_size: float = 5e7
    stage3_param_persistence_threshold: float = 1e5
    stage3_model_persistence_threshold: float = 2**63 - 1
    stage3_max_live_parameters: float = 1e9
    stage3_max_reuse_distance: float = 1e9
    memory_efficient_linear: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "float":
                least = 1 if field.name == "reduce_bucket_size" else 0
                at_least(f"zero_optimization.{field.name}", value, least)
                if value != int(value):
                    name = f"zero_optimization.{field.name}"
                    raise Refused(f"option {name!r} must be a whole number, not {value!r}")

    @property
    def offloads_optimizer(self) -> bool:
        """Whether gradients and optimizer state rest in host memory."""
        return self.offload_optimizer is not None and self.offload_optimizer.device == "cpu"


#: Every key of the section.
KEYS = tuple(field.name for field in fields(ZeroOptimization))


@dataclass(frozen=True)
class Options(Saved):
    """The part of the JSON form that a scenario may give."""

    zero_optimization: ZeroOptimization


def parse(options: Mapping[str, Any], stage: int) -> ZeroOptimization:
    """The ZeRO section of ``options`` for the implementation of ``stage``, defaults filled in.

    Raises :class:`Refused` for keys that DeepSpeed has not, that its stage does not use or that the
    case decides, and for another stage than the implementation's.
    """
    for key in options:
        if key in DECIDED:
            raise Refused(f"option {key!r}: {DECIDED[key]} sets this value; leave the option out")
        if key in PRECISION:
            raise Refused(f"option {key!r}: DeepSpeed is tested in fp32 only; leave the option out")
    given = options.get("zero_optimization", {})
    if not isinstance(given, Mapping):
        raise Refused(f"option 'zero_optimization' must be of type mapping, not {given!r}")
    for key in given:
        if key not in KEYS:
            within, own = "zero_optimization.", [k for k in KEYS if stage in _users(k)]
            raise Refused(unknown(str(key), within, own))
    chosen = parse_options(
        Options, {**options, "zero_optimization": {"stage": stage, **given}}
    ).zero_optimization
    if chosen.stage != stage:
        raise Refused(
            f"option 'zero_optimization.stage' = {chosen.stage} contradicts "
            f"deepspeed/zero{stage}; use deepspeed/zero{chosen.stage}, or leave 'stage' out"
            if chosen.stage in (0, 1, 2, 3)
            else f"option 'zero_optimization.stage' must be 0, 1, 2 or 3, not {chosen.stage}"
        )
    for key in given:
        if stage not in _users(key):
            stages = ", ".join(map(str, _users(key)))
            raise Refused(
                f"option 'zero_optimization.{key}' has no effect in stage {stage} (only in "
                f"stages: {stages}); leave the option out"
            )
    if chosen.offloads_optimizer and not chosen.compute_grad_norm:
        raise Refused(
            "option 'zero_optimization.compute_grad_norm' = False: DeepSpeed always computes "
            "the norm when the optimizer is offloaded; set offload_optimizer.device to 'none'"
        )
    return chosen


def checkpoints(options: Mapping[str, Any]) -> Checkpoints:
    """The option ``checkpoint`` in this suite's form of the section of that name."""
    given = {key: value for key, value in options.items() if key == "checkpoint"}
    return parse_options(Saved, given).checkpoint


def _users(key: str) -> tuple[int, ...]:
    return STAGES.get(key, (0, 1, 2, 3))


def section(options: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """``zero_optimization`` for DeepSpeed: the given keys, and the stage.

    Sizes become integers: DeepSpeed takes ``5e8`` there as well.
    """
    given = dict(options.get("zero_optimization", {}))
    sizes = {field.name for field in fields(ZeroOptimization) if field.type == "float"}
    whole = {key: int(value) if key in sizes else value for key, value in given.items()}
    return {**whole, "stage": stage}
