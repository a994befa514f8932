"""The workload ``calls``: no model, but calls of one collective operation, judged one by one.

A case is one operation; the calls of its *sub-matrix* run one after the other in the same ranks.
The sub-matrix covers every combination of ``strength`` factors' values:

    form        tensor, list, coalesced; uneven: parts of unequal size; of messages, tagged: two
                that are told apart by their tags; any: received from whoever sends
    dtype       that of all tensors
    layout      of every tensor that the program gives: see ``LAYOUTS``
    reduce      the reduce operation
    root        first, middle or last rank of the group
    place       apart, or inside: the rank's own part of the larger tensor is the smaller one
    completion  sync; async; reversed: three calls under way, waited for in reverse order;
                late: one rank calls only after the others have asked whether theirs is done
    group       world; part: all but rank 0; overlapping: two groups that share ranks, calls under
                way in both; single: this rank alone

Calls that must raise come after them, then the first call once more, which must still be right
(``wrong.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardproof.case import Case, WorkloadSpec
from shardproof.cases.kinds.calls import covering, wrong
from shardproof.workloads.knobs import Knob, Params, WorkloadError, untrained_values

NAME = "calls"
Cell = Mapping[str, str]

DENSE = ("contiguous", "offset", "one", "zero_dim", "empty", "long")
#: Elements that do not lie side by side in order.
SPREAD = ("strided", "transposed")
LAYOUTS = (*DENSE, *SPREAD)
#: Those of a scenario's choice.
CHOSEN_LAYOUTS: Mapping[str, Sequence[str]] = {
    "all": LAYOUTS,
    "dense": DENSE,
    "spread": SPREAD,
    "filled": tuple(layout for layout in DENSE if layout != "empty"),
    "empty": ("empty",),
}
#: More than 2 GiB; a case of its own.
LARGE = "large"
FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "uint8")
DTYPES = (*FLOATS, *INTEGERS, "bool", "complex64", "complex128")
REDUCTIONS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")
ROOTS = ("first", "middle", "last")
COMPLETIONS = ("sync", "async", "reversed", "late")
GROUPS = ("world", "part", "overlapping", "single")
PLACES = ("apart", "inside")

_MOVES: Mapping[str, Sequence[str]] = {
    "dtype": DTYPES,
    "layout": LAYOUTS,
    "completion": COMPLETIONS,
    "group": GROUPS,
}
#: Operation -> factor -> values.
OPERATIONS: Mapping[str, Mapping[str, Sequence[str]]] = {
    "all_reduce": {"form": ("tensor", "coalesced"), "reduce": REDUCTIONS, **_MOVES},
    "reduce": {"form": ("tensor",), "reduce": REDUCTIONS, "root": ROOTS, **_MOVES},
    "broadcast": {"form": ("tensor", "coalesced"), "root": ROOTS, **_MOVES},
    "all_gather": {"form": ("tensor", "list", "coalesced"), "place": PLACES, **_MOVES},
    "reduce_scatter": {
        "form": ("tensor", "list", "uneven", "coalesced"),
        "reduce": REDUCTIONS,
        "place": PLACES,
        **_MOVES,
    },
    "gather": {"form": ("list",), "root": ROOTS, **_MOVES},
    "scatter": {"form": ("list",), "root": ROOTS, **_MOVES},
    "all_to_all": {"form": ("tensor", "uneven", "list"), **_MOVES},
    "send_recv": {"form": ("tensor", "tagged", "any"), **_MOVES},
    "batch": {"form": ("tensor", "tagged"), **_MOVES},
    "barrier": {"form": ("none",), "completion": COMPLETIONS, "group": GROUPS},
}
#: Knob -> what it may be.
KNOBS: Mapping[str, Knob] = {
    "operation": Knob("all_reduce", choices=tuple(OPERATIONS)),
    "strength": Knob(2),
    "layouts": Knob("all", choices=tuple(CHOSEN_LAYOUTS)),
    # Messages from a rank that the receiver names, or from whoever sends (form ``any``).
    "source": Knob("named", choices=("named", "any")),
    # Whether a reduce must leave the tensors of all ranks but the root as they are.
    "others": Knob("kept", choices=("kept", "undefined")),
    # ``large``: one broadcast of more than 2 GiB, and nothing else.
    "size": Knob("usual", choices=("usual", LARGE)),
    "mistakes": Knob("all", choices=wrong.MISTAKES),
    "differs": Knob("one", choices=wrong.DIFFERS),
}
_CHUNKED = ("all_gather", "reduce_scatter", "all_to_all")


def resolve(spec: WorkloadSpec) -> Params:
    """All knobs.

    :raises WorkloadError: an unknown knob, or a value that does not fit.
    """
    params = untrained_values(spec, KNOBS)
    if params["size"] == LARGE and params["operation"] != "broadcast":
        raise WorkloadError(f"{NAME}: size = {LARGE!r} is allowed only with operation: broadcast")
    if params["source"] == "any" and params["operation"] != "send_recv":
        raise WorkloadError(f"{NAME}: source = 'any' is allowed only with operation: send_recv")
    return params


#: Operation -> factor -> values that are offered; of a factor that is not named, all.
Offered = Mapping[str, Mapping[str, Sequence[str]]]


def within(offered: Offered, takes: Mapping[str, Mapping[str, Sequence[str]] | None]) -> Offered:
    """The values ``offered`` among those that a backend ``takes`` (:attr:`Backend.takes`)."""
    both = {}
    for operation, factors in offered.items():
        if (limits := takes.get(operation, {})) is not None:
            own = {name: factors.get(name, values) for name, values in limits.items()}
            common = {name: [v for v in own[name] if v in limits[name]] for name in own}
            both[operation] = {**factors, **common}
    return both


def sub_matrix(case: Case, offered: Offered) -> list[Cell]:
    """The calls that ``case`` makes of what its system offers; empty: it offers none."""
    params = resolve(case.workload)
    operation = params["operation"]
    if operation not in offered:
        return []
    chosen = params["layouts"], offered[operation], params["source"]
    factors = factors_of(operation, case.world, *chosen)
    if not all(factors.values()):
        return []
    if params["size"] == LARGE:
        usual = {"form": "tensor", "dtype": "uint8", "layout": LARGE, "root": "last"}
        return [{"operation": operation, **usual, "completion": "sync", "group": "world"}]
    seed = f"{case.workload.seed}/{operation}"
    rows: list[Cell] = [
        {"operation": operation, **row}
        for row in covering.covering(factors, params["strength"], fits_for(operation), seed)
    ]
    taken = offered[operation]
    mistaken = list(wrong.mistakes(operation, params["mistakes"], taken))
    last = wrong.differing(operation, case.world, params["differs"], taken)
    return [*rows, *mistaken, *(rows[:1] if mistaken else []), *last]


def factors_of(
    operation: str,
    world: int,
    layouts: str,
    taken: Mapping[str, Sequence[str]],
    source: str = "named",
) -> dict[str, list[str]]:
    """Factor -> the values that a world has and the system takes."""
    has = {
        "layout": lambda value: value in CHOSEN_LAYOUTS[layouts],
        "group": lambda value: world > 1 or value not in ("part", "overlapping"),
        "form": lambda value: (value == "any") == (source == "any"),
    }
    return {
        name: [v for v in values if v in taken.get(name, values) and has.get(name, bool)(v)]
        for name, values in OPERATIONS[operation].items()
    }


def fits_for(operation: str) -> covering.Fits:
    """Which values may stand together in a call of ``operation``."""

    def fits(row: Mapping[str, str]) -> bool:
        dtype, reduce = row.get("dtype"), row.get("reduce")
        form, layout, completion = row.get("form"), row.get("layout"), row.get("completion")
        group, inside = row.get("group"), row.get("place") == "inside"
        parts = form in ("tensor", "uneven") or (operation, form) == ("reduce_scatter", "coalesced")
        if dtype and reduce and not reducible(dtype, reduce):
            return False
        starts = completion not in (None, "sync")
        return not any(
            (
                # Somebody must be late, and there must be something to wait for that can be asked.
                completion == "late" and (group == "single" or layout == "empty"),
                completion == "late" and form == "coalesced",
                # Blocking messages of two tags would wait for each other; batches do not block.
                completion == "sync" and (form == "tagged" or operation == "batch"),
                # A coalesced broadcast has no asynchronous form.
                operation == "broadcast" and form == "coalesced" and starts,
                operation in _CHUNKED and layout == "zero_dim" and parts,  # a number has no parts
                # Spread: a part of such a tensor is none of that layout.
                inside and (form in ("list", "uneven", "coalesced") or layout in SPREAD),
                layout == "transposed" and form == "uneven",
                operation in ("send_recv", "batch") and group == "single",  # nobody to send to
            )
        )

    return fits


def reducible(dtype: str, reduce: str) -> bool:
    """Whether ``reduce`` means something for ``dtype``, and has an exact answer in any order."""
    if reduce in ("band", "bor", "bxor"):
        return dtype in INTEGERS
    if reduce == "avg":
        return dtype in FLOATS
    if dtype == "bool":
        return reduce in ("min", "max")
    return not (dtype.startswith("complex") and reduce != "sum")


def described(cell: Cell) -> str:
    """``all_reduce (tensor), float32, strided, sum, async, group part``."""
    named = ("group", "root", "mistake", "differs")
    rest = [f"{k} {v}" if k in named else v for k, v in cell.items()]
    operation, form, *others = rest
    return ", ".join([f"{operation} ({form})", *others])


def is_wrong(cell: Cell) -> bool:
    """Whether a call must raise."""
    return "mistake" in cell or "differs" in cell
