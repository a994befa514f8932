"""Calls that must raise: what is wrong with them, by operation and form.

A *mistake* is one that a rank can see by itself; all members of the group make it alike.  A call
that *differs* is right on each rank and wrong together: the last rank gives another dtype, more
elements, fewer (``short``), another root or another reduce operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

Cell = Mapping[str, str]
Taken = Mapping[str, Sequence[str]]

_LISTS = ("count", "shape", "dtype")
#: Operation -> form -> mistakes, in the group of all ranks; ``group single`` where one rank alone
#: gives what is wrong, and the others would wait for it.
_MISTAKES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "all_reduce": {"tensor": ("reduce", "complex")},
    "reduce": {"tensor": ("root", "reduce", "complex")},
    "broadcast": {"tensor": ("root",)},
    "all_gather": {"tensor": ("shape", "dtype"), "list": _LISTS},
    "reduce_scatter": {"tensor": ("shape", "dtype", "reduce"), "list": _LISTS},
    "gather": {"list": ("root", *_LISTS)},
    "scatter": {"list": ("root", *_LISTS)},
    "all_to_all": {"tensor": ("shape", "dtype"), "uneven": ("splits",), "list": _LISTS},
    "send_recv": {"tensor": ("self", "peer", "source")},
    "batch": {"tensor": ("self", "peer", "source")},
    "barrier": {},
}
#: Operation -> what differs between ranks.
_DIFFERS: Mapping[str, Sequence[str]] = {
    "all_reduce": ("dtype", "shape", "reduce"),
    "reduce": ("root", "dtype", "shape", "reduce"),
    "broadcast": ("shape", "root", "dtype"),
    "all_gather": ("shape", "dtype"),
    "reduce_scatter": ("dtype", "reduce", "shape"),
    "gather": ("root", "dtype"),
    "scatter": ("dtype", "root"),
    "all_to_all": ("dtype",),
    "send_recv": ("short", "shape", "dtype"),
    "batch": ("short", "dtype", "shape"),
    "barrier": (),
}
#: What a scenario may choose: mistakes of messages by their own, as some backends live on none.
MISTAKES = ("all", "none", "self", "peer")
DIFFERS = ("one", "none")


def mistakes(operation: str, chosen: str, taken: Taken) -> Iterator[Cell]:
    """The mistaken calls of an operation of which a system takes ``taken``."""
    kept = {"all": None, "none": (), "self": ("self",), "peer": ("peer", "source")}[chosen]
    for form, names in _MISTAKES[operation].items():
        if form not in taken.get("form", (form,)):
            continue
        for name in names:
            if name not in taken.get("mistake", (name,)) or (kept is not None and name not in kept):
                continue
            alone = operation in ("gather", "scatter") and name != "root"
            group = "single" if alone else "world"
            yield {"operation": operation, "form": form, "mistake": name, "group": group}


def differing(operation: str, world: int, chosen: str, taken: Taken) -> Iterator[Cell]:
    """The one call in which the last rank differs, in another way at each world; or none.

    It comes last: no call of that group can match after it.
    """
    ways = [name for name in _DIFFERS[operation] if name in taken.get("differs", (name,))]
    if world == 1 or not ways or chosen == "none":
        return
    form = next(iter(_MISTAKES[operation]))
    way = ways[world % len(ways)]
    yield {"operation": operation, "form": form, "differs": way, "group": "world"}
