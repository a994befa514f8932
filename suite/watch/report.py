"""A watched run, shown: on a terminal, as Markdown, as one page, and as JSON.

All forms are made of the same tables (:mod:`shardproof.table`) and sentences.
"""

from __future__ import annotations

import io
import itertools
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from shardproof.errors import printable
from shardproof.files import fast_json, write_whole
from shardproof.report.looks import look
from shardproof.report.section import rendered
from shardproof.table import Table, markdown_text, number, some
from shardproof.watch.calls import Total
from shardproof.watch.judge import Judged
from shardproof.watch.record import Watched

#: Prints one renderable or text; rich's ``Console.print``.
Print = Callable[..., None]
#: What no watched run shows, whatever the script is.
CANNOT_SEE = (
    "whether numbers that are equal on all ranks are right: `shardproof run` has an oracle",
    "steps between two compared ones: the first step at which ranks differ is known as an interval",
    "activations and temporary memory",
    "what kernels send without torch.distributed, and on groups of other backends than gloo, nccl",
    "gradients that are freed before the optimizer's step, or used by a custom step",
    "which samples a rank reads",
)
_NAMES = 6
_TEMPLATE = Path(__file__).parent / "templates" / "watched.html"


@dataclass(frozen=True)
class Report:
    """The content of all forms of a report."""

    judged: Judged

    @property
    def headline(self) -> str:
        """The verdict and its reason in one line."""
        return f"{self.judged.verdict}: {self.judged.reason}"

    @property
    def state(self) -> str:
        """``held``, ``open`` or ``broke``."""
        return {"pass": "held", "open": "open"}.get(look(self.judged.verdict), "broke")

    @property
    def script(self) -> str:
        """The subject that was watched."""
        for one in self.judged.records.values():
            return f"{Path(one.script).name} on {number(one.world, 'rank')}"
        return "dumps of the Flight Recorder"

    def origin(self) -> list[tuple[str, str]]:
        """Where the report comes from: a label and its text, those that are known."""
        if not self.judged.records:
            return []
        records = self.judged.records.values()
        one = next(iter(records))
        machines = dict.fromkeys(
            f"{r.host} ({r.machine})" if r.machine else r.host for r in records
        )
        rows = {
            "script": shlex.join([one.script, *one.arguments]),
            "command": one.command,
            "started": one.began,
            "machine": some([*machines], _NAMES),
            "torch": one.torch,
        }
        return [(label, text) for label, text in rows.items() if text]

    def others(self) -> list[str]:
        """The findings in addition to the headline."""
        sentences = [finding.sentence for finding in self.judged.findings]
        return [sentence for sentence in sentences if sentence != self.judged.reason]

    def tables(self) -> list[Table]:
        """Those that have rows."""
        made = (_optimizers(self.judged), _traffic(self.judged), _memory(self.judged))
        return [table for table in made if table.rows]

    def unseen(self) -> list[str]:
        """The things that this run did not show, the particular first."""
        return [*self._particular(), *CANNOT_SEE]

    def _particular(self) -> Iterator[str]:
        records = self.judged.records.values()
        if starts := max((one.restarts for one in records), default=0):
            times = "once" if starts == 1 else f"{starts} times"
            yield f"what ranks did before they were restarted ({times}): this is the last attempt"
        optimizers = [seen for one in records for seen in one.optimizers]
        told = {(why, name) for seen in optimizers for name, why in seen.not_compared.items()}
        outside = {("no optimizer was given them", n) for seen in optimizers for n in seen.outside}
        for pairs in (told, outside):
            for why, names in itertools.groupby(sorted(pairs), key=lambda pair: pair[0]):
                listed = some([name for _, name in names], _NAMES)
                yield f"not compared: {listed} ({why})"
        for text in sorted({text for one in records for text in one.unseen}):
            yield f"the calls of {text}"

    def compared(self) -> str:
        """The closing line."""
        held = ", ".join(self.judged.held)
        return f"compared and equal: {held}" if held else "nothing was compared"


def show(report: Report, write: Print) -> None:
    """On a terminal."""
    from rich.text import Text

    color = {"held": "green", "open": "yellow"}.get(report.state, "red")
    # Whole lines: whoever looks for a sentence finds it.
    write(Text(printable(report.headline), style=f"bold {color}"), soft_wrap=True)
    for sentence in report.others():
        write(Text(printable(f"  also: {sentence}")), soft_wrap=True)
    for table in report.tables():
        write()
        write(table)
    write()
    write(Text("cannot see", style="bold"))
    for sentence in report.unseen():
        write(Text(printable(f"  {sentence}")), soft_wrap=True)
    write(Text(printable(report.compared())), soft_wrap=True)
    for label, said in report.origin():
        write(Text(printable(f"{label}: {said}")), soft_wrap=True)
    if report.state != "held":
        # Once more: the first line has left the screen by now.
        write(Text(printable(report.headline), style=f"bold {color}"), soft_wrap=True)


def text(report: Report) -> str:
    """As :func:`show`, for a stream that is no terminal."""
    from rich.console import Console

    stream = io.StringIO()
    show(report, Console(file=stream, width=240, highlight=False).print)
    return stream.getvalue()


def write(report: Report, folder: Path) -> None:
    """``report.json``, ``report.md`` and ``report.html`` in ``folder``."""
    judged = report.judged
    whole = {
        "verdict": judged.verdict,
        "reason": judged.reason,
        "findings": [finding.to_dict() for finding in judged.findings],
        "held": list(judged.held),
        "cannot_see": report.unseen(),
        "ranks": {str(rank): one.to_dict() for rank, one in judged.records.items()},
    }
    write_whole(folder / "report.json", fast_json(whole) + b"\n")
    write_whole(folder / "report.md", document(report))
    write_whole(folder / "report.html", html(report))


def document(report: Report) -> str:
    """As Markdown."""
    lines = [f"# Watched: {report.script}", "", f"**{markdown_text(report.headline)}**", ""]
    lines += [f"- {markdown_text(sentence)}" for sentence in report.others()]
    lines += ["", *(table.section(2) for table in report.tables())]
    lines += ["## Cannot see", "", *(f"- {markdown_text(said)}" for said in report.unseen())]
    lines += ["", f"{markdown_text(report.compared())}.", "", "## Origin", ""]
    lines += [f"- {label}: {markdown_text(said)}" for label, said in report.origin()]
    return printable("\n".join(lines) + "\n")


def html(report: Report) -> str:
    """As one page that opens offline, in the style of ``report.html`` of a run."""
    return printable(rendered(_TEMPLATE, report=report, script_digest=""))


def _optimizers(judged: Judged) -> Table:
    """The comparisons of each optimizer, and their cost."""
    first = next(iter(judged.records.values()), None)
    rows = [
        (
            f"{place}: {seen.name}" + (f" ({seen.made:,} made)" if seen.made > 1 else ""),
            *(f"{seen.steps:,}", _compared(seen), f"{seen.tracked:,}", f"{seen.tracked_bytes:,}"),
            *(f"{1e3 * seen.cost_seconds:.1f}", f"{1e3 * seen.step_seconds:.1f}", f"{seen.every}"),
        )
        for place, seen in enumerate(first.optimizers if first else ())
    ]
    headings = ("optimizer", "steps", "compared at", "parameters", "bytes")
    times = ("ms per comparison", "ms per step", "steps between comparisons")
    note = f"as rank {first.rank if first else 0} saw it; `steps between` is the latest choice"
    return Table("Replicas", (*headings, *times), rows, notes=[note], align="lrlrrrrr")


def _compared(seen: Watched) -> str:
    shown = ", ".join(map(str, dict.fromkeys(seen.compared[:4])))
    if len(seen.compared) <= 4:
        return shown
    return f"{shown} ... {seen.compared[-1]} ({len(seen.compared):,} times)"


def _traffic(judged: Judged) -> Table:
    """Bytes by operation over all ranks."""
    sums: dict[tuple[str, str, str], Total] = {}
    for one in judged.records.values():
        for total in one.totals:
            key = (total.operation, total.dtype, total.group)
            into = sums.setdefault(key, Total(*key))
            into.calls = max(into.calls, total.calls)
            into.payload_bytes = max(into.payload_bytes, total.payload_bytes)
            into.logical_bytes += total.logical_bytes
    rows = [
        (
            *(t.operation, t.group, t.dtype, f"{t.calls:,}", f"{t.payload_bytes:,}"),
            _whole(t.logical_bytes),
        )
        for _, t in sorted(sums.items(), key=lambda item: (-item[1].logical_bytes, item[0]))
    ]
    headings = ("operation", "group", "dtype", "calls of a rank", "bytes of a rank")
    note = "sent: in the model of an optimal algorithm (docs/architecture.md), not on the wire"
    return Table("Traffic", (*headings, "bytes sent by all"), rows, notes=[note], align="lllrrr")


def _whole(value: Fraction) -> str:
    return f"{value.numerator:,}" if value.denominator == 1 else f"{float(value):,.2f}"


def _memory(judged: Judged) -> Table:
    """Largest bytes of each class."""
    records = judged.records
    names = dict.fromkeys(name for one in records.values() for name in one.memory)
    rows = []
    for name in names:
        sizes = {rank: one.memory.get(name, 0) for rank, one in records.items()}
        most = max(sizes, key=lambda rank: sizes[rank])
        rows.append((name, f"{sizes[most]:,}", str(most), f"{min(sizes.values()):,}"))
    headings = ("class", "most bytes", "on rank", "least")
    note = "of tensors at the first steps and at the end; peaks are the process's own"
    return Table("Memory", headings, rows, notes=[note], align="lrrr")
