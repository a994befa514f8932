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

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardproof.axes import parts
from shardproof.backends import BACKENDS
from shardproof.checks.results import CaseResult
from shardproof.report.tables import Figures
from shardproof.table import Table

_ROW = ("schedule", "ranks x micro-batches")
BUBBLE_HEADINGS = (
    *(*_ROW, "T_F T_B T_W ms"),
    *("closed form", "simulated", "at T", "replayed", "measured"),
)
HELD_HEADINGS = (
    *(*_ROW, "in flight", "of the schedule"),
    *("activation bytes", "least", "most"),
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


@dataclass(frozen=True)
class PipelineFigures:
    """Figures of the check ``schedule`` in all cases of one row, those on processes first."""

    name: str
    ranks: int
    micro_batches: int
    figures: list[Figures]

    @property
    def size(self) -> str:
        return f"{self.ranks} x {self.micro_batches}"

    @property
    def window(self) -> Figures | None:
        window: Figures | None = self.figures[0].get(f"window of {self.micro_batches}")
        return window

    @property
    def measured(self) -> Figures | None:
        return next((f["measured"] for f in self.figures if f.get("measured")), None)


def pipelines(results: Iterable[CaseResult]) -> list[PipelineFigures]:
    groups: dict[tuple[int, int, str, str], list[tuple[bool, Figures]]] = defaultdict(list)
    for result in results:
        case, figures = result.case, result.figures("schedule")
        if case.scenario.startswith("bubble") and "in_flight" in figures:
            size = parts(case.mesh, "layers"), case.workload.micro_batches
            on_threads = BACKENDS.of_record(case.backend).threads
            groups[(*size, case.implementation, case.system)].append((on_threads, figures))
    ordered = {key: sorted(groups[key], key=lambda one: one[0]) for key in sorted(groups)}
    return [
        PipelineFigures(name, ranks, micro, [figures for _, figures in members])
        for (ranks, micro, _, name), members in ordered.items()
    ]


def _bubble_row(one: PipelineFigures) -> tuple[str, ...] | None:
    """Texts of :data:`BUBBLE_HEADINGS`; ``None``: it was not timed."""
    timed, window = one.measured, one.window
    if timed is None or window is None:
        return None
    mark = SHARED if timed["cores"] < timed["ranks"] else ""
    played = window["closed"], window, timed["simulated"], timed["replayed"]
    bubbles = *map(_both, played), _both(timed) + mark
    return one.name, one.size, _milliseconds(timed["cpu_seconds"]), *bubbles


def _held_row(one: PipelineFigures) -> tuple[str, ...]:
    window, counted = one.window, one.figures[-1]["in_flight"]
    measured = [f["activations"] for f in one.figures if isinstance(f.get("activations"), Mapping)]
    worst = max(measured[0].values(), key=lambda row: int(row["peak"])) if measured else None
    in_flight = " ".join(str(counted[rank]) for rank in sorted(counted, key=int))
    asked = "-" if window is None else " ".join(map(str, window["in_flight"]))
    held = ("-" if worst is None else f"{worst[k]:,}" for k in ("peak", "least", "most"))
    return one.name, one.size, in_flight, asked, *held


def _notes(timed: Iterable[PipelineFigures]) -> list[str]:
    shared = {(m["ranks"], m["cores"]) for one in timed if (m := one.measured) is not None}
    few = [(ranks, cores) for ranks, cores in sorted(shared) if cores < ranks]
    return [NOTE, *(SHARED_NOTE.format(ranks=ranks, cores=cores) for ranks, cores in few)]


def tables(results: Iterable[CaseResult]) -> list[Table]:
    rows = pipelines(results)
    timed = [row for one in rows if (row := _bubble_row(one)) is not None]
    held = [_held_row(one) for one in rows]
    bubbles = Table(BUBBLE_TITLE, BUBBLE_HEADINGS, timed, notes=_notes(rows), align="lrrrrrrr")
    both = bubbles, Table(HELD_TITLE, HELD_HEADINGS, held, align="lrrrrrr")
    return [table for table in both if table.rows]


def _both(bubble: Figures) -> str:
    cells = (bubble[f"{kind}_bubble_over_ideal"] for kind in ("span", "makespan"))
    return " / ".join("-" if value is None else f"{value:.3f}" for value in cells)


def _milliseconds(seconds: Mapping[str, float]) -> str:
    """T_F and the sum of the others where they are one action."""
    times = [f"{1e3 * seconds[op]:.1f}" for op in ("F", "B", "W") if op in seconds]
    if "BW" in seconds:
        times.append(f"{1e3 * seconds['BW']:.1f}" + (" (B+W)" if len(times) == 1 else " (BW)"))
    return " ".join(times)
