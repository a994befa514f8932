"""Tables of pipelines: what every schedule idles and holds, by numbers of ranks and micro-batches.

One row for an implementation, its options, ranks and micro-batches, from the figures of the check
``schedule``; cases on processes and on threads share a row.

    bubble    over a rank's work, span / makespan (:mod:`shardproof.costs.schedules`)
      closed form   published, T_F = T_B = T_W
      simulated     the schedule played at the same times
      at T          played at the mean times of this run, in seconds for which ranks had a core
      replayed      played with each computation's own time: stages that differ are in it
      measured      by the clocks of ranks that are processes, of the last step
    held      micro-batches in flight by rank, counted over chunks, beside the schedule's; bytes of
              activations at the peak, beside the least and the most that they may be

Times are taken from processes where there are any: threads of one process take turns in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Result = Mapping[str, Any]

BUBBLE_HEADINGS = (
    "schedule",
    "ranks x micro-batches",
    "T_F T_B T_W ms",
    "closed form",
    "simulated",
    "at T",
    "replayed",
    "measured",
)
HELD_HEADINGS = (
    "schedule",
    "ranks x micro-batches",
    "in flight",
    "of the schedule",
    "activation bytes",
    "least",
    "most",
)
BUBBLE_TITLE = "Bubbles over the work of a rank, m (T_F + T_B + T_W), span / makespan"
HELD_TITLE = "Micro-batches in flight by rank, and activations on the rank that holds most"
NOTE = (
    "Over total work and bubble: divide by 1 + makespan. Closed form and simulated: equal times. "
    "At T and replayed: as on a machine with a core for every rank."
)
#: Beside what was measured with fewer cores than ranks.
SHARED = "*"
SHARED_NOTE = (
    f"Where {SHARED} stands: {{ranks}} ranks, {{cores}} core(s); clocks run on while a rank waits "
    "for a core, so read the column before."
)


def rows(results: Iterable[Result]) -> list[tuple[tuple[Any, ...], list[Mapping[str, Any]]]]:
    """Figures of the cases of each row, those on processes first; rows in the table's order."""
    found: dict[tuple[Any, ...], list[tuple[bool, Mapping[str, Any]]]] = {}
    for result in results:
        case = result["case"]
        if not case["scenario"].startswith("bubble"):
            continue
        for check in result["checks"]:
            if check["check"] == "schedule" and "in_flight" in check["figures"]:
                name = case["implementation"] + (f"+{case['label']}" if case.get("label") else "")
                size = case["mesh"]["pipe"], case["workload"]["micro_batches"]
                place = size[0], size[1], case["implementation"], name
                told = case["backend"] == "in_memory", check["figures"]
                found.setdefault(place, []).append(told)
    return [
        (place, [figures for _, figures in sorted(told, key=lambda item: item[0])])
        for place, told in sorted(found.items(), key=lambda item: item[0])
    ]


def bubble_rows(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """Cells of :data:`BUBBLE_HEADINGS`."""
    cells: list[tuple[str, ...]] = []
    for (ranks, micro_batches, _, name), told in rows(results):
        timed = next((figures["measured"] for figures in told if figures.get("measured")), None)
        claimed = told[0].get(f"window of {micro_batches}")
        if timed is None or claimed is None:
            continue
        mark = SHARED if timed["cores"] < timed["ranks"] else ""
        cells.append(
            (
                name,
                f"{ranks} x {micro_batches}",
                _milliseconds(timed["cpu_seconds"]),
                _both(claimed["closed"]),
                _both(claimed),
                _both(timed["simulated"]),
                _both(timed["replayed"]),
                _both(timed) + mark,
            )
        )
    return cells


def held_rows(results: Iterable[Result]) -> list[tuple[str, ...]]:
    """Cells of :data:`HELD_HEADINGS`."""
    cells: list[tuple[str, ...]] = []
    for (ranks, micro_batches, _, name), told in rows(results):
        claimed = told[0].get(f"window of {micro_batches}")
        weighed = [f["activations"] for f in told if isinstance(f.get("activations"), Mapping)]
        worst = max(weighed[0].values(), key=lambda row: int(row["peak"])) if weighed else None
        counted = told[-1]["in_flight"]
        cells.append(
            (
                name,
                f"{ranks} x {micro_batches}",
                " ".join(str(counted[rank]) for rank in sorted(counted, key=int)),
                "-" if claimed is None else " ".join(map(str, claimed["in_flight"])),
                *("-" if worst is None else f"{worst[k]:,}" for k in ("peak", "least", "most")),
            )
        )
    return cells


def notes(results: Iterable[Result]) -> list[str]:
    """What belongs below the table of bubbles."""
    shared = {
        (figures["measured"]["ranks"], figures["measured"]["cores"])
        for _, told in rows(results)
        for figures in told[:1]
        if figures.get("measured")
    }
    few = [(ranks, cores) for ranks, cores in sorted(shared) if cores < ranks]
    return [NOTE, *(SHARED_NOTE.format(ranks=ranks, cores=cores) for ranks, cores in few)]


def tables(
    results: Sequence[Result],
) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]], list[str]]]:
    """Title, headings, rows and notes of each table that has rows."""
    found = [
        (BUBBLE_TITLE, BUBBLE_HEADINGS, bubble_rows(results), notes(results)),
        (HELD_TITLE, HELD_HEADINGS, held_rows(results), []),
    ]
    return [table for table in found if table[2]]


def _both(told: Mapping[str, Any]) -> str:
    cells = (told[f"{kind}_bubble_over_ideal"] for kind in ("span", "makespan"))
    return " / ".join("-" if value is None else f"{value:.3f}" for value in cells)


def _milliseconds(seconds: Mapping[str, float]) -> str:
    """T_F and the sum of the others where they are one action."""
    times = [f"{1e3 * seconds[op]:.1f}" for op in ("F", "B", "W") if op in seconds]
    if "BW" in seconds:
        times.append(f"{1e3 * seconds['BW']:.1f}" + (" (B+W)" if len(times) == 1 else " (BW)"))
    return " ".join(times)
