"""What a campaign may give a system: meshes, options and workloads that go together."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardproof import workloads
from shardproof.case import DATA_AXES, Lane, WorkloadSpec, split

LARGEST_WORLD = 5
#: Of meshes of several axes; with more ranks than processes they are threads.
LARGEST_GRID, MOST_PROCESSES = 12, 8
#: Lanes of the real workloads, the main bug finder twice as often; ``DYADIC`` has its own.
LANES: Sequence[Lane] = ("fp64", "fp64", "bitwise", "working_precision")
DYADIC = "dyadic_mlp"
#: Has batch norms, which want weights and buffers of one dtype.
NORMED = "digits_cnn"
#: What every option is drawn from.
Choices = Mapping[str, Sequence[Any]]
#: Schedules of torch: a stage a rank, and those whose backwards come in two parts.
SINGLE, SPLIT = ("gpipe", "1f1b"), ("interleaved_zb", "zb_v", "dualpipe_v")
#: Where layers are split, of these there must be some.
LAYERED = ("charnames_gpt", "dyadic_mlp")


@dataclass(frozen=True)
class System:
    """An implementation, and what its meshes and options are drawn from.

    ``options`` are independent of each other but for ``only``: options, mesh and workload that it
    refuses are drawn again.  ``mixed``: knows mixed precision.  ``sums_ranks_first``: adds every
    micro-batch up over ranks before it adds it to the others, so that with several micro-batches
    two ranks are not promised equal bits.  ``flattens``: makes parameters contiguous, whose
    products may then be rounded otherwise.  ``takes``: whether options go with a policy of
    precision, for a model with batch norms or without; where not, nothing is cast.  ``stages``:
    units that a model must have at least (0: as many as it has by default); ``cuts``: whether
    options go with the micro-batches and traits.  ``sizes``: knobs of a workload that the mesh can
    share.  ``workloads``, ``backends``, ``dtypes`` (what a model is built in) and ``lanes`` (of the
    real workloads): what it can be given.  ``clips``: its clipping is believed right.  ``chance``:
    how often it is drawn beside the others.
    """

    name: str
    meshes: Sequence[Mapping[str, int]]
    options: Choices = field(default_factory=dict)
    mixed: bool = False
    sums_ranks_first: Callable[[Mapping[str, Any], Mapping[str, int]], bool] = (
        lambda options, mesh: False
    )
    flattens: Callable[[Mapping[str, Any], Mapping[str, int]], bool] = lambda options, mesh: False
    only: Callable[[Mapping[str, Any], Mapping[str, int], str], bool] = (
        lambda options, mesh, workload: True
    )
    takes: Callable[[Mapping[str, Any], Mapping[str, str], bool], bool] = (
        lambda options, policy, normed: True
    )
    stages: Callable[[Mapping[str, Any], Mapping[str, int]], int] = lambda options, mesh: 0
    cuts: Callable[[Mapping[str, Any], Mapping[str, int], WorkloadSpec], bool] = (
        lambda options, mesh, spec: True
    )
    most_micro_batches: int = 3
    sizes: Callable[[random.Random, str, Mapping[str, int], Mapping[str, Any]], dict[str, Any]] = (
        lambda source, workload, mesh, options: {}
    )
    workloads: tuple[str, ...] = ("charnames_gpt", "digits_cnn", "dyadic_mlp")
    backends: tuple[str, ...] = ("in_memory", "gloo")
    dtypes: tuple[str, ...] = ("float64", "float32", "bfloat16")
    lanes: Sequence[Lane] = LANES
    clips: bool = True
    chance: float = 1.0


def coordinates(mesh: Mapping[str, int]) -> int:
    """Shares that the batch is cut into."""
    return math.prod(size for axis, size in mesh.items() if axis in DATA_AXES)


def always(options: Mapping[str, Any], mesh: Mapping[str, int]) -> bool:
    return True


def communicates(options: Mapping[str, Any], mesh: Mapping[str, int]) -> bool:
    """Without ``accumulate_without_communication`` every micro-batch is reduced by itself."""
    return not options.get("accumulate_without_communication")


def reshards(options: Mapping[str, Any], mesh: Mapping[str, int], workload: str) -> bool:
    """Whether an integer ``reshard_after_forward`` divides the ranks that parameters lie on."""
    k = options.get("reshard_after_forward")
    return k is None or isinstance(k, bool) or mesh["shard"] % k == 0


def as_fsdp1(options: Mapping[str, Any], policy: Mapping[str, str], normed: bool) -> bool:
    """What FSDP1 insists on: no batch norms, and micro-batches are added up in no narrower dtype
    than ranks.
    """
    if normed:
        return not policy
    return communicates(options, {}) or "reduce" not in policy or "parameters" not in policy


def as_fsdp2(options: Mapping[str, Any], policy: Mapping[str, str], normed: bool) -> bool:
    """It does not cast buffers."""
    return "buffers" not in policy


def own_stages(options: Mapping[str, Any], mesh: Mapping[str, int]) -> int:
    chunks = 2 if options["schedule"] in ("zb_v", "interleaved") else 1
    return mesh.get("pipe", 1) * chunks


def upstream_stages(options: Mapping[str, Any], mesh: Mapping[str, int]) -> int:
    return mesh["pipe"] * (1 if options["schedule"] in SINGLE else 2)


def windows_of(mesh: Mapping[str, int], spec: WorkloadSpec) -> list[list[int]]:
    """Samples of every micro-batch of every window of every data coordinate."""
    return [window for share in spec.cut(coordinates(mesh)) for window in share]


def in_equal_parts(options: Mapping[str, Any], mesh: Mapping[str, int], spec: WorkloadSpec) -> bool:
    """torch cuts a window's inputs into equal parts.  Where B and W come apart, no stage may end in
    an operation that makes a view, as odd modules inside of units do.
    """
    if any(len(set(window)) > 1 for window in windows_of(mesh, spec)):
        return False
    inner = any(workloads.TRAITS[trait].place == "inner" for trait in spec.traits)
    if not inner or options["schedule"] not in SPLIT:
        return True
    ends = list(itertools.accumulate(split(spec.params["layers"], upstream_stages(options, mesh))))
    return spec.params["layers"] // 2 + 1 not in ends[:-1]


def in_one_window(options: Mapping[str, Any], mesh: Mapping[str, int], spec: WorkloadSpec) -> bool:
    """DeepSpeed's step has one; sizes may differ only where it tells them with every message."""
    windows = windows_of(mesh, spec)
    return len(windows) == 1 and (options["dynamic_shape"] or len(set(windows[0])) == 1)


def recomputes(options: Mapping[str, Any], mesh: Mapping[str, int], workload: str) -> bool:
    """A backward in two parts cannot compute anything again."""
    return not options["recompute_every"] or not options["schedule"].startswith("zb_")


def goes_together(options: Mapping[str, Any], mesh: Mapping[str, int], workload: str) -> bool:
    """As pipelines; nothing but Transformers and the like can be split into layers."""
    if workload not in LAYERED and mesh.get("tensor", 1) > 1:
        return False
    return recomputes(options, mesh, workload)


def reduces_each(options: Mapping[str, Any], mesh: Mapping[str, int]) -> bool:
    """Hybrids without stages whose data axes reduce every micro-batch."""
    inner = options.get("data_options", {})
    return mesh.get("pipe", 1) == 1 and options["data"] != "ddp" and communicates(inner, mesh)


def upstream_splits(options: Mapping[str, Any], mesh: Mapping[str, int], workload: str) -> bool:
    """Torch's parallel loss is a cross-entropy; its biases are divided by the ranks, which is exact
    for powers of two; backwards that come in two parts want whole parameters.
    """
    if options.get("reshard_after_forward") and options["schedule"] in SPLIT:
        return False
    if workload != DYADIC:
        return True
    return not options["loss_parallel"] and mesh.get("tensor", 1) in (1, 2, 4)


def clean_shapes(options: Mapping[str, Any], mesh: Mapping[str, int], workload: str) -> bool:
    """To infer shapes torch feeds batch norms with memory that nobody has written."""
    return workload != NORMED or options["shapes"] == "given"


def shared_sizes(
    source: random.Random, workload: str, mesh: Mapping[str, int], options: Mapping[str, Any]
) -> dict[str, Any]:
    """Layers that the ranks of the tensor axis can share: whole heads, KV heads of one or several
    ranks, a vocabulary and a sequence of any size.
    """
    if workload == NORMED:
        return {}
    if workload == DYADIC:
        return {"width": 60}
    ranks = mesh.get("tensor", 1)
    heads = ranks * source.choice((2, 4))
    kv = [n for n in range(1, heads + 1) if heads % n == 0 and (n % ranks == 0 or ranks % n == 0)]
    return {
        "heads": heads,
        "kv_heads": source.choice(kv),
        "width": heads * (source.choice((4, 8)) if heads > 2 else 8),
        "vocab": source.choice((97, 128)),
        "seq": source.choice((11, 16)),
        "label_smoothing": source.choice((0.0, 0.1)),
    }


def upstream_sizes(
    source: random.Random, workload: str, mesh: Mapping[str, int], options: Mapping[str, Any]
) -> dict[str, Any]:
    """As torch wants it: KV heads and, where they are cut, positions that divide by the ranks."""
    if workload == DYADIC:
        return {"width": 60, "seq": 12}
    ranks, sizes = mesh.get("tensor", 1), shared_sizes(source, workload, mesh, options)
    if sizes["kv_heads"] % ranks:
        sizes["kv_heads"] = ranks
    if options["sequence_parallel"]:
        sizes["seq"] = 3 * ranks if ranks > 3 else 12
    if options["loss_parallel"]:
        sizes["label_smoothing"] = 0.0
    return sizes
