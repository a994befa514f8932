"""Bytes sent and kept by a compressed reduction: closed formulas of the option ``compress``.

Each parameter is compressed by itself, so no formula depends on buckets but in the number of calls.
Over N ranks, of a parameter of n elements, b bytes each (b' in the option's dtype):

    method     all-reduce sends, all ranks                      keeps on each rank
    cast       2 (N-1) b' n                                     n with feedback
    topk       (N-1) N k (b' + 4), 4 for an index               n with feedback
    randomk    2 (N-1) b' k                                     n with feedback
    powersgd   2 (N-1) b r (n1 + n2), the rest dense            n with feedback, and r n2
    sign       2 (N-1) B + (N-1) N b                            nothing
    onebit     2 (N-1) B + 2 (N-1) N b                          n, and of the server n/N
    *_hook     2 (N-1) 2 n, or as powersgd of what is halved    a secret of torch

k = ceil(density n), B = ceil(n/8); sources: the heads of ``impls/reference/parts/compressors/``.
A reduce-scatter sends the same, for every rank puts the whole sum together; but cast: (N-1) b' n,
padded to whole shards.  Indices and bits are integers, and count like all else.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from fractions import Fraction
from typing import Any, Literal

from shardproof.costs import collectives
from shardproof.costs.layout import Flat, layouts
from shardproof.costs.model import Flow, Operation, grouped_flow
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, TensorFacts, used_by

#: Why ``overlap`` has nothing to count.
BY_OTHER_CALLS = (
    "compressed gradients travel by several calls, some of which are made in waits: the log of "
    "calls does not tell which one starts a reduction"
)
_FED_BACK = ("topk", "powersgd", "onebit")
_INDEX = 4
#: Operation and payload in bytes of a call, and whether it is integers.
_Call = tuple[Operation, int, bool]
#: torch's own, in DDP.
_HOOKS = ("fp16_hook", "bf16_hook", "powersgd_hook", "batched_hook")


def chosen(facts: ModelFacts) -> Mapping[str, Any]:
    """The option; empty: nothing is compressed."""
    return facts.option("compress", {})


def flows(
    facts: ModelFacts,
    axis: str,
    operation: Literal["all_reduce", "reduce_scatter"],
    flats: Iterable[Flat],
    times: int = 1,
) -> list[Flow]:
    """The calls that reduce each of ``flats``, ``times`` a rank, compressed or not."""
    flats = [flat for flat in flats if flat.numel]
    payloads = [flat.payload(facts.reduction(flat.dtype)) for flat in flats]
    if not chosen(facts):
        return collectives.flow(facts, axis, operation, payloads, times)
    size = facts.size(axis)
    times *= facts.world // size
    calls = defaultdict[tuple[int, Operation, bool], list[int]](list)
    for flat in flats:
        made = _calls(facts, flat, size, operation == "reduce_scatter")
        for number, (kind, payload, integers) in enumerate(made):
            calls[number, kind, integers].append(payload)
    return [
        one
        for (_, kind, integers), sizes in calls.items()
        for one in grouped_flow(axis, kind, sizes, size, times, integers)
    ]


def _calls(facts: ModelFacts, flat: Flat, ranks: int, scattered: bool) -> list[_Call]:
    """The calls that reduce ``flat``."""
    option, built = chosen(facts), facts.reduction(flat.dtype)
    method, wide = option["method"], ITEMSIZE[built]
    item = ITEMSIZE[option.get("dtype") or built]
    is_narrow = (option.get("dtype") or built) != built
    members = [t for t in flat.members if t.numel]
    if method == "cast" and scattered:
        # A narrow sum would round at every addition: values travel, each rank adds its part wide.
        kind: Operation = "all_to_all" if is_narrow else "reduce_scatter"
        return [(kind, flat.padded * item, False)]
    if method in ("cast", "randomk"):
        values = _chosen_elements(option, members) if method == "randomk" else flat.numel
        kind = "all_to_all" if is_narrow else "all_reduce"
        return [(kind, values * item, False)] * (2 if is_narrow else 1)
    if method == "topk":
        # Every rank chooses other elements, so nothing can be summed on the way: all are gathered.
        values = ranks * _chosen_elements(option, members)
        return [("all_gather", values * item, False), ("all_gather", values * _INDEX, True)]
    if method in _HOOKS:
        return [("all_reduce", payload, False) for payload in _by_hook(facts, flat)]
    if method == "powersgd":
        # Tensors that are not worth it go with the left factors; then there may be no right ones.
        shapes = [(t, *_matrix(option, t)) for t in members]
        lefts = sum(n1 * r or t.numel for t, n1, _, r in shapes)
        rights = sum(n2 * r for _, _, n2, r in shapes)
        return [("all_reduce", n * wide, False) for n in ([lefts, rights] if rights else [lefts])]
    # Bits travel as whole bytes per tensor, and each rank adds a magnitude per tensor.
    bits, magnitudes = sum(-(-t.numel // 8) for t in members), ranks * len(members) * wide
    up: list[_Call] = [("all_gather", magnitudes, False), ("all_to_all", bits, True)]
    return [*up, *up] if method == "onebit" else [*up, up[1]]


def _by_hook(facts: ModelFacts, flat: Flat) -> list[int]:
    """Bytes of the all-reduces of torch's hooks (default_hooks.py, powerSGD_hook.py)."""
    option, item = chosen(facts), ITEMSIZE[facts.reduction(flat.dtype)]
    if option["method"] in ("fp16_hook", "bf16_hook"):
        # Two bytes an element in either 16-bit dtype.
        return [2 * flat.numel]
    if facts.step < option.get("start", 2):
        return [item * flat.numel]
    if option["method"] == "batched_hook":
        # The bucket becomes one square matrix: both factors have as many rows as it has.
        return [item * option.get("rank", 1) * math.ceil(math.sqrt(flat.numel))] * 2
    rest, lefts, rights = 0, 0, 0
    for tensor in flat.members:
        # torch's min_compression_rate is 2: a smaller gain is not worth the products.
        n1, n2, r = _matrix({"rank": option.get("rank", 1)}, tensor, worth=2)
        rest, lefts, rights = rest + (not r) * tensor.numel, lefts + n1 * r, rights + n2 * r
    return [item * elements for elements in (rest, lefts, rights)]


def drawn_on_host(facts: ModelFacts, step: int) -> int:
    """Bytes of the first factors of torch's PowerSGD, which are drawn there and copied in the first
    step that sends factors (powerSGD_hook.py: ``torch.randn(..., device="cpu")``).
    """
    option = chosen(facts)
    if option.get("method") not in _HOOKS[2:] or step != option.get("start", 2):
        return 0
    facts = replace(facts, step=step)
    return sum(_by_hook(facts, flat)[-1] for flat in layouts(facts.trainable, 1))


def _chosen_elements(option: Mapping[str, Any], tensors: Iterable[TensorFacts]) -> int:
    """Elements that are sent of ``tensors``: the share of each, rounded up."""
    # By the digits of the option: the float 0.1 is a little more than 1/10, and ceil would add 1.
    density = Fraction(str(option["density"]))
    return sum(math.ceil(density * tensor.numel) for tensor in tensors)


def _matrix(option: Mapping[str, Any], tensor: TensorFacts, worth: int = 1) -> tuple[int, int, int]:
    """Rows, columns and rank; zeros: not ``worth`` times smaller, so it is sent as it is."""
    if len(tensor.shape) < 2:
        return 0, 0, 0
    n1, n2 = tensor.shape[0], math.prod(tensor.shape[1:])
    r = min(int(option["rank"]), n1, n2)
    return (n1, n2, r) if worth * r * (n1 + n2) < n1 * n2 else (0, 0, 0)


def state_bytes(
    facts: ModelFacts, tensors: Iterable[TensorFacts], rank: int, ranks: int, step: int
) -> int:
    """The residuals of rank ``rank`` of ``ranks`` for ``tensors``, which it reduces, after
    ``step``.
    """
    option = chosen(facts)
    if not option or ranks == 1:
        return 0
    method, given = option["method"], option.get("feedback")
    fed_back = method in _FED_BACK if given is None else given
    tensors, total = list(tensors), 0
    drawn = {t.name for t in used_by(tensors, step)}
    for tensor in tensors:
        item = ITEMSIZE[facts.reduction(tensor.dtype)]
        n1, n2, r = _matrix(option, tensor) if method == "powersgd" else (0, 0, 0)
        if fed_back and (method != "powersgd" or n1):
            total += tensor.numel * item
        if tensor.name in drawn:
            total += n2 * r * item  # where no rank had a gradient there is no factor yet
        if method == "onebit":
            total += _served(tensor.numel, rank, ranks) * item
    return total


def _served(numel: int, rank: int, ranks: int) -> int:
    """Elements that a rank answers for: whole bytes of signs, the first ranks one more."""
    begin = sum(8 * collectives.chunk(-(-numel // 8), ranks, place) for place in range(rank))
    length = 8 * collectives.chunk(-(-numel // 8), ranks, rank)
    return max(0, min(length, numel - begin))


def scratch(facts: ModelFacts, flat: Flat, ranks: int) -> int:
    """Most bytes of buffers that are handed to process groups while ``flat`` is reduced."""
    if not chosen(facts) or not flat.numel or ranks == 1:
        return 0
    item, total = ITEMSIZE[chosen(facts).get("dtype") or facts.reduction(flat.dtype)], 0
    for kind, payload, _ in _calls(facts, flat, ranks, scattered=True):
        # What is given, and what arrives; each at most the payload, and what padding adds.
        total += 2 * payload + 2 * ranks * item * (kind == "all_to_all")
    return total
