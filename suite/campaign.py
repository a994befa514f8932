"""Randomized clean cases: the measure of false alarms.

A campaign draws cases of implementations that are believed right, over seeds, worlds, backends,
optimizers, clipping, lanes and combinations of traits, and expects every one to pass.  The draw
depends on the seed alone, so that a false alarm can be repeated.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from suite import workloads
from suite.case import Case, Lane, WorkloadSpec
from suite.contract import OptimizerSpec

#: What a campaign draws from; labels of options are those of the conformance scenarios.
IMPLEMENTATIONS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("plain", {}),
    ("reference/ddp", {}),
    ("reference/ddp", {"bucket_bytes": 4096}),
    ("reference/naive_ddp", {}),
    ("pytorch/ddp", {"find_unused_parameters": True}),
    ("pytorch/ddp", {"find_unused_parameters": True, "gradient_as_bucket_view": True}),
)
CHECKS = ("equivalence", "replicas", "norm", "traffic", "overlap", "engagement")
#: Lanes of the real workloads, the main bug finder twice as often; ``DYADIC`` has its own.
LANES: Sequence[Lane] = ("fp64", "fp64", "bitwise", "native")
DYADIC = "dyadic_mlp"
LARGEST_WORLD = 5
MOST_TRAITS = 3


def draw(count: int, seed: int, traits: Mapping[str, Sequence[str]]) -> list[Case]:
    """``count`` random clean cases.  ``traits`` maps each workload to the traits it can carry."""
    source = random.Random(seed)
    return [_case(source, number, seed, traits) for number in range(count)]


def _case(
    source: random.Random, number: int, seed: int, traits: Mapping[str, Sequence[str]]
) -> Case:
    name, options = source.choice(IMPLEMENTATIONS)
    world = 1 if name == "plain" else source.randint(1, LARGEST_WORLD)
    backend = source.choice(("in_memory", "gloo"))
    workload = source.choice(sorted(traits))
    lane, dtype = _lane(source, workload)
    optimizer = _optimizer(source, lane)
    spec = _workload(source, workload, sorted(traits[workload]))
    clipped = "noclip" if optimizer.clip_norm is None else "clip"
    return Case(
        id=f"campaign-{seed}::{number:04d}::{name}::{backend}::replicate{world}::{workload}"
        f"::{'+'.join(spec.traits) or 'bare'}::{optimizer.name}::{clipped}::{lane}-{dtype}",
        scenario="campaign",
        implementation=name,
        options=dict(options),
        backend=backend,
        mesh={"replicate": world},
        workload=spec,
        optimizer=optimizer,
        lane=lane,
        dtype=dtype,
        checks=CHECKS,
        steps=source.choice((3, 4)),
    )


def _lane(source: random.Random, workload: str) -> tuple[Lane, str]:
    """A lane that ``workload`` has a form for, and a dtype in which it is judged."""
    if workload == DYADIC:
        return "dyadic", source.choice(("float32", "float64"))
    lane: Lane = source.choice(LANES)
    if lane == "native":
        return lane, source.choice(("float32", "bfloat16"))
    return lane, "float32" if lane == "bitwise" else "float64"


def _optimizer(source: random.Random, lane: Lane) -> OptimizerSpec:
    """SGD or AdamW; equal bits need clipping off, exact sums need powers of two."""
    if lane == "dyadic":
        return OptimizerSpec(lr=0.125, momentum=0.0)
    name: Literal["sgd", "adamw"] = "sgd" if source.random() < 0.5 else "adamw"
    return OptimizerSpec(
        name=name,
        lr=0.1 if name == "sgd" else 1e-3,
        weight_decay=source.choice((0.0, 0.1)),
        warmup_steps=source.choice((0, 2)),
        clip_norm=None if lane == "bitwise" else source.choice((None, 0.05)),
    )


def _workload(source: random.Random, name: str, carried: Sequence[str]) -> WorkloadSpec:
    """A random workload that can be made: some traits ask for more than one micro-batch."""
    while True:
        spec = WorkloadSpec(
            name,
            traits=tuple(sorted(source.sample(carried, source.randint(0, MOST_TRAITS)))),
            seed=source.randrange(2**31),
            global_batch=source.choice((12, 15, 24)),
            micro_batches=source.choice((1, 2, 3)),
            windows=source.choice((1, 1, 2)),
        )
        try:
            workloads.check(spec)
        except workloads.WorkloadError:
            continue
        return spec
