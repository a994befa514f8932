"""``Training`` compared with the plain loop of the same strategy: ``shardproof study training``.

Both train the same model on the same batches, in the same ranks.  The data of ``Training`` is a
function that is called once a step; where a segment of ``Training`` ends it runs the plain loop::

    Training.run    k steps                        k steps      one block A B B A
    plain loop                k steps    k steps

So ``Training.run`` is timed as it is, from batch to batch: seconds, and CPU seconds, which other
work on the machine does not lengthen; of each step those of the rank that took longest.  The plain
loop of a strategy of the suite is ``shardproof.wrap`` and six lines; that of a system of PyTorch is
written in PyTorch alone.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shardproof
from shardproof.bench import stats
from shardproof.bench.session import read_times
from shardproof.bench.tables import interval
from shardproof.bench.timed_ranks import Writer
from shardproof.commands.console import echo
from shardproof.errors import Problem, SelectionError

#: Steps of either loop that do not count: memory is measured in the first ones, state is made.
WARM = 5
BATCHES, LR = 8, 1e-3
#: Relative difference of losses up to which both loops train the same.
SAME = 1e-3
SHAPE = {"layers": 7, "width": 512, "tokens": 8, "samples": 8}

CLOCKS: Mapping[str, Callable[[], float]] = {
    "wall": time.perf_counter,
    "cpu": time.process_time,
}
#: Seconds by clock.
Seconds = dict[str, float]

#: Takes inputs and targets of this rank and trains a step; returns the loss.
Plain = Callable[[Tensor, Tensor], Tensor]


def make_model(shape: Mapping[str, int]) -> nn.Module:
    """Encoder layers of a Transformer; 22 million parameters unless ``shape`` is another."""
    torch.manual_seed(0)
    width = shape["width"]
    where: dict[str, Any] = {"batch_first": True, "dropout": 0.0}
    layer = partial(nn.TransformerEncoderLayer, width, width // 64 or 1, 4 * width, **where)
    return nn.Sequential(*(layer() for _ in range(shape["layers"])), nn.Linear(width, width))


def in_pytorch(model: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> Plain:
    """The loop that PyTorch's own pages show."""
    wrapped = wrap(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=LR, foreach=False)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(wrapped(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def now() -> Seconds:
    """The time of every clock."""
    return {name: clock() for name, clock in CLOCKS.items()}


def since(began: Seconds) -> Seconds:
    """Seconds of every clock since ``began``."""
    return {name: at - began[name] for name, at in now().items()}


def _sharded(model: nn.Module) -> nn.Module:
    for layer in model.children():
        if isinstance(layer, nn.TransformerEncoderLayer):
            fully_shard(layer)
    fully_shard(model)
    return model


def in_own_loop(model: nn.Module, strategy: str) -> Plain:
    """The loop of docs/tutorial-train.md."""
    wrapped = shardproof.wrap(model, strategy, lr=LR)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(wrapped(inputs), targets)
        loss.backward()
        wrapped.step()
        wrapped.zero_grad()
        return loss.detach()

    return step


#: Strategy -> its plain loop around a model; others are those of the suite.
PLAIN: Mapping[str, Callable[[nn.Module], Plain]] = {
    "pytorch/ddp": partial(in_pytorch, wrap=DistributedDataParallel),
    "pytorch/fsdp2": partial(in_pytorch, wrap=_sharded),
    **{name: partial(in_own_loop, strategy=name) for name in ("ddp", "zero2", "zero3")},
}


class Turns:
    """The data of ``Training``, in every rank; times of all steps go to files in ``folder``."""

    def __init__(
        self, strategy: str, shape: Mapping[str, int], launch: int, blocks: int, steps: int
    ) -> None:
        self.strategy, self.shape, self.launch = strategy, shape, launch
        self.blocks, self.steps = blocks, steps
        self.last = WARM + 2 * steps * blocks
        self.folder = Path()
        generator = torch.Generator().manual_seed(1)
        size = shape["samples"], shape["tokens"], shape["width"]
        pairs = torch.randn(BATCHES, 2, *size, generator=generator)
        self.batches = [(inputs, targets) for inputs, targets in pairs]
        self.losses: list[Tensor] = []
        self.times: list[Seconds] = []
        self.began = now()

    def __call__(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of ``step`` of ``Training``, once all that comes before it has been timed."""
        ended = now()
        self.times.append(since(self.began))
        block, at = divmod(step - WARM, 2 * self.steps)
        if step == WARM:
            self.set_up()
        elif step > WARM and at % self.steps == 0:
            of = (block, 0) if at else (block - 1, 3)
            self.note(*of, "a", self.times[-self.steps :])
            if at:
                self.plain_segments(block)
        if step == self.last:
            for writer in self.writers.values():
                writer.flush()
            torch.save(self.losses, self.folder / f"losses{self.launch}-{dist.get_rank()}.pt")
        if step >= WARM and at % self.steps == 0:
            dist.barrier()
        self.began = ended if step > WARM and at % self.steps else now()
        return self.batches[step % BATCHES]

    def set_up(self) -> None:
        """Build the plain loop in this rank and warm it up."""
        self.plain = PLAIN[self.strategy](make_model(self.shape))
        rank, size = dist.get_rank(), dist.get_world_size()
        self.writers = {}
        for clock in CLOCKS:
            folder = self.folder / clock
            folder.mkdir(exist_ok=True)
            file = (folder / f"times{self.launch}-{rank}.jsonl").open("w", buffering=1)
            self.writers[clock] = Writer(file, self.launch, rank)
        own = self.shape["samples"] // size
        self.own = slice(rank * own, (rank + 1) * own)
        self.train(WARM)

    def plain_segments(self, block: int) -> None:
        """Time the two segments of the plain loop."""
        for segment in (1, 2):
            dist.barrier()
            self.note(block, segment, "b", self.train(self.steps))

    def note(self, block: int, segment: int, side: str, times: Sequence[Seconds]) -> None:
        """Keep the times of a segment."""
        for clock, writer in self.writers.items():
            writer.add("ab", block, segment, side, [seconds[clock] for seconds in times])

    def train(self, steps: int) -> list[Seconds]:
        """Seconds of so many steps of the plain loop, from batch to batch."""
        times = []
        for _ in range(steps):
            began = now()
            inputs, targets = self.batches[len(self.losses) % BATCHES]
            self.losses.append(self.plain(inputs[self.own], targets[self.own]))
            times.append(since(began))
        return times


def launch(turns: Turns, ranks: int, memory: bool) -> None:
    """Train by both loops in fresh ranks.

    :raises RuntimeError: their losses differ.
    """
    training = (
        shardproof.Training(make_model(turns.shape), nn.functional.mse_loss, turns)
        .optimizer("adamw", lr=LR)
        .strategy(turns.strategy)
    )
    result = training.run(steps=turns.last + 1, ranks=ranks, progress=0, memory=memory)
    files = turns.folder.glob(f"losses{turns.launch}-*.pt")
    of_ranks = [torch.stack(torch.load(file, weights_only=True)) for file in files]
    plain = torch.stack(of_ranks).mean(0)
    own = torch.tensor(result.losses[: len(plain)])
    if not torch.allclose(own[: len(plain)], plain[: len(own)], rtol=SAME):
        raise RuntimeError(f"the loops train differently: {own.tolist()}, {plain.tolist()}")


def measure(
    strategy: str, shape: Mapping[str, int], ranks: int, counts: tuple[int, int, int], memory: bool
) -> list[Any]:
    """By clock, the figures of ``Training`` over the plain loop.

    ``counts``: launches, blocks, steps.
    """
    launches, blocks, steps = counts
    with tempfile.TemporaryDirectory(prefix="training-study-") as name:
        for number in range(launches):
            turns = Turns(strategy, shape, number, blocks, steps)
            turns.folder = Path(name)
            launch(turns, ranks, memory)
        return [stats.judge(read_times(Path(name) / clock))[2] for clock in CLOCKS]


def run(
    strategies: Annotated[list[str] | None, typer.Argument(help="default: all")] = None,
    ranks: Annotated[int, typer.Option(min=1)] = 2,
    blocks: Annotated[int, typer.Option(min=2, help="in each launch")] = 60,
    launches: Annotated[int, typer.Option(min=1)] = 3,
    steps: Annotated[int, typer.Option(min=1, help="in a segment")] = 1,
    layers: Annotated[int, typer.Option(min=1)] = SHAPE["layers"],
    memory: Annotated[bool, typer.Option(help="measure the memory of the first steps")] = True,
    goal: Annotated[float, typer.Option(help="highest upper end of the interval")] = 1.03,
) -> int:
    """Time ``Training`` over the plain loop of the same strategy; exit code 1 above the goal."""
    if unknown := [name for name in strategies or () if name not in PLAIN]:
        remedy = f"write one of {', '.join(PLAIN)}"
        raise SelectionError(Problem("no plain loop for this strategy", remedy, unknown[0]))
    shape = {**SHAPE, "layers": layers}
    # The last layer returns a view, of which FSDP2 warns; neither loop writes to it.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    count = sum(parameter.numel() for parameter in make_model(shape).parameters())
    echo(f"{count:,} parameters, {ranks} gloo ranks, {launches} x {blocks} blocks, AdamW, float32")
    columns = "strategy", "Training / plain loop [95 %]", "CPU seconds", "ms", "plain ms", "load"
    echo(f"| {' | '.join(columns)} |")
    echo("| --- | --- | --- | ---: | ---: | --- |")
    missed = False
    for name in strategies or PLAIN:
        before = os.getloadavg()[0]
        wall, cpu = measure(name, shape, ranks, (launches, blocks, steps), memory)
        missed |= wall.high > goal
        seconds = " | ".join(f"{1e3 * wall.median_seconds[side]:.1f}" for side in ("a", "b"))
        load = f"{before:.1f} to {os.getloadavg()[0]:.1f}"
        echo(f"| {name} | {interval(wall)} | {interval(cpu)} | {seconds} | {load} |")
    return int(missed)
