"""Generate the tables of docs/published-measurements.md: published and simulated figures.

    python docs/make_published.py                    # simulates all rows (minutes), writes the page
    python docs/make_published.py --kept FILE.json   # resumes: does not simulate runs in FILE again

If a row deviates by more than 5 % (memory) or 25 % (time) and gives no reason, nothing is written.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shardproof.contract import OptimizerSpec
from shardproof.costs import shapes
from shardproof.costs.shapes import BatchSize, Shape
from shardproof.simulate import figures, machines
from shardproof.simulate.rank import simulate
from shardproof.simulate.seconds import KERNELS, step_seconds
from shardproof.simulate.sources import ShapeSource

PAGE = Path(__file__).parent / "published-measurements.md"
GIB = 2**30
#: Deviations beyond which a row must give a reason.
MEMORY, TIME = 0.05, 0.25

_MPT = Shape("MPT", layers=32, hidden=4096, heads=32, vocab=50368, seq=2048, positions=2048,
             bias="all", tied=True)  # fmt: skip
SHAPES = {
    "Llama-3 8B": replace(shapes.model("llama3-8b"), parameters=0),
    "Llama-3 70B, 12 layers": replace(shapes.model("llama3-70b"), layers=12, parameters=0),
    "Llama-3.2 3B": Shape("Llama-3.2 3B", layers=28, hidden=3072, heads=24, kv_heads=8, ffn=8192,
                          vocab=128256, seq=8192, mlp="swiglu", norm="rms", tied=True),
    "Megatron test": Shape("Megatron test", layers=12, hidden=512, heads=8, vocab=50304, seq=1024,
                           positions=1024, bias="all", tied=True, attention="math"),
    # scripts/train/benchmarking/README.md counts their parameters: tests hold the shapes to it.
    "MPT-7B": _MPT,
    "MPT-70B": replace(_MPT, layers=80, hidden=8192, heads=64),
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A training, simulated as each of ``ranks``; its time is that of the slowest one."""

    shape: str
    implementation: str
    mesh: Mapping[str, int]
    machine: str
    seq: int
    batch: int = 1
    micro_batches: int = 1
    accounting: str = "M18"
    options: Mapping[str, Any] = field(default_factory=dict)
    ranks: Sequence[int] = (0,)

    @property
    def words(self) -> str:
        """The configuration for a cell of the table."""
        mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        chosen = ", ".join(f"{k} {v}" for k, v in self.options.items() if v is not True)
        chosen += "".join(f", {k}" for k, v in self.options.items() if v is True)
        work = f"batch {self.batch} x {self.seq:,}"
        work += f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        told = (self.implementation, mesh, self.accounting, work, chosen.strip(", "))
        return ", ".join(part for part in told if part)

    def source(self) -> ShapeSource:
        """The training that is simulated."""
        about, options = shapes.accountings()[self.accounting], dict(self.options)
        if policy := {key: about[key] for key in ("parameters", "reduce") if key in about}:
            options["precision"] = policy
        return ShapeSource(
            SHAPES[self.shape],
            self.implementation,
            self.mesh,
            OptimizerSpec(about.get("optimizer", "adamw"), momentum=0.0),
            options,
            BatchSize(self.batch, self.seq, self.micro_batches),
            getattr(torch, about["built"]),
        )

    def found(self) -> dict[str, Any]:
        """Peak bytes of each rank, and seconds and tokens/s of a GPU by kernels."""
        source, machine = self.source(), machines.machine(self.machine)
        made = simulate(source, self.ranks)
        times = {kernels: step_seconds(made, machine, self.mesh, kernels) for kernels in KERNELS}
        counted = [figures.figures(one, self.mesh) for one in made]
        return {
            "bytes": [one.peak for one in counted],
            # The largest storages at the peak, from which a reason is derived.
            "held": [list(map(str, each)) for each in counted[0].held[:12]],
            "ms": [1e3 * one.seconds for one in times.values()],
            "tokens": [one.tokens_per_second / one.world for one in times.values()],
        }


_TENSOR = {"data": "zero1", "sequence_parallel": True, "loss_parallel": True}


def _megatron(mesh: Mapping[str, int], micro_batches: int = 4, **more: Any) -> Run:
    options = more.pop("options", _TENSOR)
    return Run("Llama-3 70B, 12 layers", "reference/hybrid", mesh, "b200", 4096, 1, micro_batches,
               options=options, **more)  # fmt: skip


def _titan(ranks: int, **options: Any) -> Run:
    return Run("Llama-3 8B", "pytorch/fsdp2", {"shard": ranks}, "h100", 8192, 2, options=options)


def _golden(**options: Any) -> Run:
    return Run("Megatron test", "reference/zero1", {"shard": 8}, "h100", 1024, 4, options=options)


def _foundry(shape: str, ranks: int, batch: int, **options: Any) -> Run:
    return Run(shape, "pytorch/fsdp2", {"shard": ranks}, "h100", 2048, batch, options=options)


RUNS: dict[str, Run] = {
    "tp8": _megatron({"shard": 1, "tensor": 8}),
    "tp4": _megatron({"shard": 2, "tensor": 4}),
    "tp2": _megatron({"shard": 4, "tensor": 2}),
    "golden": _golden(),
    "golden again": _golden(recompute_every=1),
    "titan 8": _titan(8),
    "titan 128": _titan(128),
    "mpt 7": _foundry("MPT-7B", 8, 6),
    "pp2": _megatron({"pipe": 2, "shard": 4}, options={"data": "zero1", "schedule": "1f1b"},
                     ranks=(0, 4)),
    "tune": Run("Llama-3.2 3B", "reference/naive_ddp", {"replicate": 1}, "a100", 4096, 2,
                accounting="B8"),
    "tp8 m8": _megatron({"shard": 1, "tensor": 8}, 8),
    "mpt 70": _foundry("MPT-70B", 32, 2, recompute_every=1),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A published figure of ``run``, minus that of ``less`` if it is a difference.

    ``unit``: GiB, ms, tokens/s, or fits (the run fitted into so many GB).  ``place``: the index of
    the simulated rank.
    """

    source: str
    what: str
    unit: str
    theirs: float
    run: str
    less: str = ""
    place: int = 0
    reason: str = ""

    def ours(self, found: Mapping[str, Any]) -> list[float]:
        """Our figures in the same unit; times have one for each way to make kernels."""
        if self.unit in ("GiB", "fits"):
            size = found[self.run]["bytes"][self.place]
            size -= found[self.less]["bytes"][self.place] if self.less else 0
            return [size / (1e9 if self.unit == "fits" else GIB)]
        return list(found[self.run]["ms" if self.unit == "ms" else "tokens"])

    def deviations(self, found: Mapping[str, Any]) -> list[float]:
        """Ours over theirs, minus 1; positive for a row of unit ``fits`` that does not fit."""
        return [one / self.theirs - 1 for one in self.ours(found)]

    def needs_reason(self, found: Mapping[str, Any]) -> bool:
        """Whether the row deviates by so much that it must give a reason."""
        off = self.deviations(found)
        if self.unit == "fits":
            return max(off) > 0
        return max(map(abs, off)) > (MEMORY if self.unit == "GiB" else TIME)


_KEEPS = (
    "ours keeps gathered sequences (Megatron-LM gathers again in backward), fp32 copies of the "
    "inputs of norms, and the output of SiLU (fused there): {} GiB; without these {}"
)
_STAGE = (
    "ours keeps fp32 copies of the inputs of norms, and the output of SiLU: 7.12 GiB on the first "
    "stage; without these -1.9 % there"
)
_SLOW = (
    "likely: real matrix products reach less of the peak than the best shape, from which our share "
    "comes, and we count no time of the host; no published profile separates the two"
)
_SIMUMAX = "SimuMax, Megatron-LM on 8 B200"
_RESERVED = (
    "likely: ours peaks where backward begins, before there are gradients: 12 bytes a parameter "
    "differ; theirs is reserved memory, which includes gradients: 16 bytes a parameter would give "
    "14.0"
)
_SELECTIVE = f"ours recomputes no operator (theirs recomputes chosen ones); {_SLOW}"
_TITAN = "torchtitan, Llama-3.1 8B, H100"
ROWS = [
    Row(_SIMUMAX, "tp8", "GiB", 28.286, "tp8", reason=_KEEPS.format("2.28", "-0.2 %")),
    Row(_SIMUMAX, "tp8, 8 micro-batches", "GiB", 28.286, "tp8 m8",
        reason=_KEEPS.format("2.28", "-0.2 %")),
    Row(_SIMUMAX, "tp4 dp2", "GiB", 39.072, "tp4", reason=_KEEPS.format("3.00", "+0.3 %")),
    Row(_SIMUMAX, "tp2 dp4", "GiB", 60.680, "tp2", reason=_KEEPS.format("4.44", "+0.7 %")),
    Row(_SIMUMAX, "tp1 pp2 dp4, first stage", "GiB", 66.55, "pp2",
        reason=_STAGE),
    Row(_SIMUMAX, "tp1 pp2 dp4, last stage", "GiB", 62.97, "pp2", place=1,
        reason=_STAGE),
    Row(_SIMUMAX, "tp4 dp2 minus tp8", "GiB", 39.072 - 28.286, "tp4", "tp8",
        reason="the same three kinds of tensors"),
    Row(_SIMUMAX, "tp2 dp4 minus tp4 dp2", "GiB", 60.680 - 39.072, "tp2", "tp4",
        reason="the same three kinds of tensors"),
    Row(_SIMUMAX, "tp8", "ms", 280.9, "tp8", reason=_SLOW),
    Row(_SIMUMAX, "tp8, 8 micro-batches", "ms", 556.7, "tp8 m8", reason=_SLOW),
    Row(_SIMUMAX, "tp4 dp2", "ms", 409.8, "tp4", reason=_SLOW),
    Row(_SIMUMAX, "tp2 dp4", "ms", 725.5, "tp2", reason=_SLOW),
    Row(_SIMUMAX, "tp1 pp2 dp4", "ms", 843.0, "pp2", reason=_SLOW),
    Row(_TITAN, "FSDP 8 minus FSDP 128, eager", "GiB", 15.4, "titan 8", "titan 128",
        reason=_RESERVED),
    Row(_TITAN, "FSDP 8 minus FSDP 128, compiled", "GiB", 15.0, "titan 8", "titan 128",
        reason=_RESERVED),
    Row(_TITAN, "FSDP 8, eager", "tokens/s", 5762.0, "titan 8",
        reason=_SELECTIVE),
    Row(_TITAN, "FSDP 128, eager", "tokens/s", 5605.0, "titan 128",
        reason=_SELECTIVE),
    Row("Megatron-LM golden values, A100", "tp1 pp1, minus full recomputation", "GiB",
        (4673069568 - 2534070272) / GIB, "golden", "golden again",
        reason="likely: ours has no dropout; Megatron-LM keeps its masks (1 byte a score: 0.4) and "
        "its outputs (2 bytes: 0.8)"),
    Row("torchtune, Llama-3.2 3B, one A100", "packed", "GiB", 60.0, "tune"),
    Row("llm-foundry", "70B on 32 H100, micro-batch 2, checkpointing", "fits", 80.0, "mpt 70"),
    Row("llm-foundry", "7B on 8 H100, micro-batch 6", "fits", 80.0, "mpt 7"),
]  # fmt: skip


def table(rows: Sequence[Row], found: Mapping[str, Any]) -> str:
    """The table of ``rows``.

    :raises ValueError: a row deviates and gives no reason.
    """
    lines = [
        "| source | configuration | theirs | ours | off by | reason |",
        "|---|---|--:|--:|--:|---|",
    ]
    for row in rows:
        if row.needs_reason(found) and not row.reason:
            raise ValueError(f"{row.source}, {row.what} ({row.unit}) deviates without a reason")
        digits = {"GiB": 2, "fits": 1, "ms": 0, "tokens/s": 0}[row.unit]
        ours = " to ".join(f"{one:,.{digits}f}" for one in sorted(row.ours(found)))
        if row.unit == "fits":
            off = "fits" if max(row.deviations(found)) <= 0 else "does not fit"
        else:
            off = " to ".join(f"{100 * one:+.1f} %" for one in sorted(row.deviations(found)))
        theirs = f"{row.theirs:,.{digits}f}"
        reason = row.reason if row.needs_reason(found) else ""
        lines.append(f"| {row.source} | {row.what} | {theirs} | {ours} | {off} | {reason} |")
    return "\n".join(lines)


def configurations() -> str:
    """The table of the simulated configurations, with the rows that each serves."""
    lines = ["| rows | model | simulated as |", "|---|---|---|"]
    for name, run in RUNS.items():
        rows = "; ".join(dict.fromkeys(row.what for row in ROWS if name in (row.run, row.less)))
        lines.append(f"| {rows} | {run.shape} on {run.machine} | {run.words} |")
    return "\n".join(lines)


def put(text: str, name: str, generated: str) -> str:
    """``text`` with ``generated`` between the two comments called ``name``."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.S)
    assert len(pattern.findall(text)) == 1, name
    return pattern.sub(lambda _: f"{begin}\n\n{generated}\n\n{end}", text)


def kept(file: Path | None) -> dict[str, Any]:
    """The runs in ``file`` that were simulated before, with the same configuration."""
    if file is None or not file.exists():
        return {}
    found: dict[str, Any] = json.loads(file.read_text())
    return {name: one for name, one in found.items() if one["words"] == RUNS[name].words}


def simulated(file: Path | None) -> dict[str, Any]:
    """The figures of every run; those in ``file`` are not simulated again."""
    found = kept(file)
    for name, run in RUNS.items():
        if name not in found:
            print(f"{name}: {run.shape}, {run.words}", flush=True)
            found[name] = {**run.found(), "words": run.words}
            if file is not None:
                file.write_text(json.dumps(found, indent=1))
    return found


def main() -> None:
    """Simulate the runs, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kept", type=Path, help="file with runs that were simulated before")
    warnings.simplefilter("ignore")
    found = simulated(parser.parse_args().kept)
    memory = [row for row in ROWS if row.unit in ("GiB", "fits")]
    times = [row for row in ROWS if row.unit not in ("GiB", "fits")]
    text = PAGE.read_text()
    for name, generated in (
        ("memory", table(memory, found)),
        ("time", table(times, found)),
        ("configurations", configurations()),
    ):
        text = put(text, name, generated)
    PAGE.write_text(text)


if __name__ == "__main__":
    main()
