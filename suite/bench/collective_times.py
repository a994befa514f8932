"""Times of collectives as they are stored, what is fitted to them, and their tables.

Bandwidths are those of nccl-tests (doc/PERFORMANCE.md): with S bytes (the whole output of an
all-gather, the whole input of a reduce-scatter, else one rank's tensor) and t seconds

    algorithm bandwidth  S / t
    bus bandwidth        S / t times 2(N-1)/N (all-reduce), (N-1)/N (reduce-scatter, all-gather),
                         1 (broadcast)

Alpha and beta are fitted over all sizes to t = rounds alpha + bytes beta, where rounds and the
bytes that the busiest rank sends are those of the algorithm's closed formula
(``costs/collectives.py``); of the backend's own, those of the algorithm that it is known for
(``model/alpha_beta.py``).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardproof.bench.model import alpha_beta
from shardproof.costs import collectives as costs
from shardproof.costs.collectives import BACKEND
from shardproof.errors import Problem, SelectionError
from shardproof.files import DAMAGE, Stored
from shardproof.runs.run_folder import Run
from shardproof.table import Table

#: ``kind`` of the lines.
KIND = "collective"


@dataclass(frozen=True)
class Timed(Stored):
    """One system: seconds of a call by bytes, one figure a round, of the slowest rank."""

    id: str
    operation: str
    algorithm: str
    backend: str
    world: int
    ranks_per_node: int
    seconds: Mapping[str, Sequence[float]]
    verdict: str = "measured"

    @property
    def medians(self) -> dict[int, float]:
        """Bytes -> seconds."""
        return {int(size): statistics.median(each) for size, each in self.seconds.items()}

    def factor(self) -> float:
        """Bus bandwidth over algorithm bandwidth."""
        if self.operation == "broadcast":
            return 1.0
        return (2 if self.operation == "all_reduce" else 1) * (self.world - 1) / self.world

    def fit(self) -> tuple[float, float]:
        """Alpha in seconds a round, beta in seconds a byte that the busiest rank sends."""
        rows = []
        for size, seconds in self.medians.items():
            rounds, sent = self.cost(size)
            rows.append((rounds / seconds, sent / seconds))
        return alpha_beta.least_squares(rows)

    def cost(self, size: int) -> tuple[float, float]:
        """Rounds, and bytes that the busiest rank sends."""
        if self.algorithm == BACKEND:
            known = alpha_beta.algorithms_of(self.backend).get(self.operation, ("ring",))
            steps, volume = alpha_beta.cost(self.operation, known[0], self.world)
            return float(steps), float(volume) * size
        each = costs.sent(
            self.operation, self.algorithm, self.world, size // 4, self.ranks_per_node
        )
        return float(each[0].rounds), 4.0 * max(one.elements for one in each)


def of(run: Run) -> list[Timed]:
    """The collectives that ``run`` timed.

    :raises SelectionError: a line that cannot be read.
    """
    lines = []
    for line in run.others.get(KIND, ()):
        try:
            lines.append(Timed.from_dict({k: v for k, v in line.items() if k != "kind"}))
            if not all(each > 0 for each in lines[-1].medians.values()):
                raise ValueError("a time is 0 or negative")
        except DAMAGE as error:
            what = f"a line about collectives cannot be read: {error}"
            remedy = "run `shardproof verify` to see whether the run was changed"
            file = str(run.path / "cases.jsonl")
            raise SelectionError(Problem(what, remedy, str(line["id"]), file)) from None
    return lines


def _over_backend(line: Timed, lines: Iterable[Timed], size: int) -> str:
    ratio = None if line.algorithm == BACKEND else over_backend(line, lines, size)
    return "-" if ratio is None else f"{ratio:.2f}"


def over_backend(line: Timed, lines: Iterable[Timed], size: int) -> float | None:
    """Seconds over the backend's own, round by round, the median; ``None``: that was not timed."""
    place = line.operation, line.backend, line.world
    for base in lines:
        its = base.operation, base.backend, base.world
        if base.algorithm == BACKEND and its == place and str(size) in base.seconds:
            pairs = zip(line.seconds[str(size)], base.seconds[str(size)], strict=True)
            return statistics.median(mine / theirs for mine, theirs in pairs)
    return None


def summary(lines: Sequence[Timed]) -> Table:
    """A row for each system: latency, bandwidth, the fit, and seconds over the backend's own."""
    rows = []
    for line in lines:
        medians, (alpha, beta) = line.medians, line.fit()
        small, large = min(medians), max(medians)
        busiest = max(size * line.factor() / seconds for size, seconds in medians.items())
        near = min(medians, key=lambda size: abs(size - 16 * 2**20))
        rows.append(
            (
                *(line.operation, line.algorithm, f"{line.backend} x {line.world}"),
                *(f"{medians[small] * 1e6:,.0f}", f"{medians[large] * 1e3:,.1f}"),
                *(f"{busiest / 1e9:.2f}", f"{alpha * 1e6:,.1f}"),
                *(f"{1 / beta / 1e9:.2f}" if beta else "-", _over_backend(line, lines, near)),
            )
        )
    sizes = sorted({size for line in lines for size in line.medians})
    near = min(sizes, key=lambda size: abs(size - 16 * 2**20))
    headings = (
        *("operation", "algorithm", "ranks", f"{text(sizes[0])} us", f"{text(sizes[-1])} ms"),
        *("best bus GB/s", "alpha us", "1/beta GB/s", f"x backend, {text(near)}"),
    )
    return Table("Collectives", headings, rows, align="lllrrrrrr", row_header=1)


def by_size(lines: Sequence[Timed]) -> Table:
    """A row for each system and size."""
    rows = [
        (
            *(line.operation, line.algorithm, f"{line.backend} x {line.world}"),
            *(f"{size:,}", f"{seconds * 1e6:,.1f}", f"{size / seconds / 1e9:.4f}"),
            *(f"{size * line.factor() / seconds / 1e9:.4f}", _over_backend(line, lines, size)),
        )
        for line in lines
        for size, seconds in line.medians.items()
    ]
    headings = (
        *("operation", "algorithm", "ranks", "bytes", "us", "algorithm GB/s", "bus GB/s"),
        "x backend",
    )
    return Table("Collectives by size", headings, rows, align="lllrrrrr", row_header=1)


def text(size: int) -> str:
    """4 B, 16 KiB, 64 MiB."""
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size} B"
