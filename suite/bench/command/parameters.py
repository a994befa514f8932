"""``shardproof bench checkpoint --parameters 200M``: the size of the model that is saved."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from shardproof.bench.subjects import Pair
from shardproof.errors import Problem, SelectionError

#: The workload whose knobs are known here, its layers as far as they can be chosen, and what the
#: width is a multiple of: that of a head.
WORKLOAD, LAYERS, HEAD = "charnames_gpt", 16, 64
#: Parameters of a block over the square of its width: attention has 4, the MLP 8.
_SQUARES = 12
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
_MOST = 10**11


def parse_parameters(text: str) -> int:
    """``200M``, ``1.5B``, ``300000``.

    :raises SelectionError: none of these.
    """
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([KMB]?)", text)
    count = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    least = _SQUARES * HEAD**2
    if not least <= count <= _MOST:
        remedy = f"write e.g. 20M, 200M or 1.5B: at least {least:,}"
        raise SelectionError(Problem("--parameters takes a number", remedy, text))
    return count


def sized(pairs: Sequence[Pair], text: str) -> list[Pair]:
    """Pairs of checkpoints of a model of about so many parameters.

    :raises SelectionError: no number, or pairs of which it is no option.
    """
    count = parse_parameters(text)
    width = max(HEAD, HEAD * round(math.sqrt(count / (_SQUARES * LAYERS)) / HEAD))
    layers = max(1, round(count / (_SQUARES * width**2)))
    changed = []
    for pair in pairs:
        if pair.action == "step" or pair.workload.name != WORKLOAD:
            what = f"--parameters belongs to checkpoints of {WORKLOAD}"
            raise SelectionError(Problem(what, "write `bench checkpoint`", pair.name))
        knobs = {**pair.workload.params, "width": width, "heads": width // HEAD, "layers": layers}
        workload = replace(pair.workload, params=knobs)
        changed.append(replace(pair, workload=workload, size=text))
    return changed
