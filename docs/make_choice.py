"""Generate the table of docs/choose-a-strategy.md: the fastest plan that fits, by model and GPUs.

    python docs/make_choice.py                    # simulates a plan for each row (minutes of CPU)
    python docs/make_choice.py --kept FILE.json   # resumes: does not plan rows in FILE again

Each row is what the command in it prints as plan 1.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shardproof.costs import shapes
from shardproof.simulate.machines import machine
from shardproof.simulate.plan.candidates import Job
from shardproof.simulate.plan.search import Found, Plan, search

PAGE = Path(__file__).parent / "choose-a-strategy.md"
#: What all rows have in common: those of the command's defaults.
MACHINE, ACCOUNTING, TOKENS = "h100", "M18", 4 * 2**20
HEADINGS = (
    *("model", "GPUs", "mesh", "strategy", "GB a GPU", "tokens/s", "bubble", "exposed", "command"),
)


@dataclass(frozen=True)
class Row:
    """A model on so many GPUs."""

    model: str
    gpus: int

    @property
    def command(self) -> str:
        """What prints this row."""
        return f"shardproof plan {self.model} --gpus {self.gpus} --show 1"

    def found(self) -> Found:
        """The result of the command."""
        shape, on = shapes.model(self.model), machine(MACHINE, 0)
        job = Job(shape, ACCOUNTING, self.gpus, on.node, TOKENS, shape.seq)
        return search(job, int(on.memory), on, 1)

    def cells(self, found: Found) -> list[str]:
        """The cells of the table."""
        parameters = sum(tensor.numel for tensor in shapes.tensors(shapes.model(self.model), ""))
        first = [f"{self.model} ({_round(parameters)})", f"{self.gpus:,}"]
        if found.plans:
            return [*first, *_of_plan(found, found.plans[0]), f"`{self.command}`"]
        return [*first, "none fits", "", "", "", "", "", f"`{self.command}`"]


#: From 1 to 1,024 GPUs, and from 1B to 1T parameters.
ROWS = [
    *(Row("1b", n) for n in (1, 8)),
    *(Row("llama3-8b", n) for n in (8, 64)),
    *(Row("llama3-70b", n) for n in (64, 256)),
    *(Row("llama3-405b", n) for n in (256, 1024)),
    *(Row("gpt-1t", n) for n in (512, 1024)),
]


def _round(count: int) -> str:
    return f"{count / 1e12:.1f}T" if count >= 1e12 else f"{count / 1e9:.0f}B"


def _of_plan(found: Found, plan: Plan) -> list[str]:
    one, times = plan.candidate, plan.estimated
    return [
        one.shown_mesh(),
        f"{one.implementation} {one.how()}",
        f"{plan.bytes / 1e9:,.1f}",
        f"{found.job.tokens / times.seconds:,.0f}",
        f"{times.bubble / times.seconds:.1%}",
        f"{times.exposed / times.seconds:.1%}",
    ]


def table(rows: Sequence[Sequence[str]]) -> str:
    """The rows in Markdown."""
    lines = [HEADINGS, ["---"] * len(HEADINGS), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def put(text: str, made: str) -> str:
    """``text`` of the page with the table ``made``."""
    return re.sub(
        r"(<!-- choice:begin -->\n).*?(<!-- choice:end -->)",
        lambda match: f"{match[1]}\n{made}\n\n{match[2]}",
        text,
        flags=re.DOTALL,
    )


def kept(file: Path | None) -> dict[str, list[str]]:
    """The rows in ``file``, by command."""
    if file is None or not file.exists():
        return {}
    found: Mapping[str, list[str]] = json.loads(file.read_text(encoding="utf-8"))
    known = {row.command for row in ROWS}
    return {command: cells for command, cells in found.items() if command in known}


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept", type=Path, help="keep rows in this file, and read it first")
    file: Path | None = parser.parse_args().kept
    cells = kept(file)
    for row in ROWS:
        if row.command not in cells:
            print(row.command, flush=True)
            cells[row.command] = row.cells(row.found())
            if file is not None:
                file.write_text(json.dumps(cells, indent=1), encoding="utf-8")
    made = table([cells[row.command] for row in ROWS])
    PAGE.write_text(put(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")


if __name__ == "__main__":
    main()
