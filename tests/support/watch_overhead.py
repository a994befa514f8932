"""What ``watch`` costs a step of an unmodified DDP script: paired launches, in the order A B B A.

    python tests/support/watch_overhead.py --ranks 2 4 --pairs 6

Both sides are started by torchrun and run the same file; one of them by ``-m shardproof.watch``.
Each launch tells the wall clock and CPU seconds of rank 0's steps after the first ten, which hold
the search for names and three comparisons.  Ratios are watched over plain, of neighbours in time;
their median is told, the smallest and largest, and what two plain launches differ by (``--null``).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import json, os, sys, time
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

width, steps = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
layers = [layer for _ in range(4) for layer in (nn.Linear(width, width), nn.GELU())]
layers = [nn.Embedding(256, width), *layers, nn.Linear(width, 256)]
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
generator = torch.Generator().manual_seed(rank)
for step in range(steps + 10):
    if step == 10:
        dist.barrier()
        began, cpu = time.perf_counter(), time.process_time()
    tokens = torch.randint(256, (int(sys.argv[3]),), generator=generator)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(tokens), tokens).backward()
    optimizer.step()
seconds = time.perf_counter() - began, time.process_time() - cpu
if rank == 0:
    print("TIMES", json.dumps([value / steps for value in seconds]))
dist.destroy_process_group()
"""


def launch(
    folder: Path, ranks: int, watched: bool, words: list[str]
) -> tuple[float, float, dict[str, object]]:
    """Wall clock and CPU seconds of a step, and the report of a watched run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results = Path(tempfile.mkdtemp(dir=folder)) / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--master-port", str(port), *["-m", "shardproof.watch"] * watched]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "SHARDPROOF_WATCH_RESULTS": str(results),
    }
    done = subprocess.run(
        [*command, str(folder / "train.py"), *words],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("TIMES")]
    wall, cpu = json.loads(line.removeprefix("TIMES"))
    report = json.loads((results / "report.json").read_text()) if watched else {}
    return wall, cpu, report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--null", action="store_true", help="two plain launches in each pair")
    asked = parser.parse_args()
    words = [str(asked.width), str(asked.steps), str(asked.tokens)]
    print("| ranks | ms a step, plain | watched | wall clock | CPU | every | cost of one, ms |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for ranks in asked.ranks:
        walls, cpus, plain, watched = [], [], [], []
        seen = {"every": 0, "cost_seconds": 0.0}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "train.py").write_text(SCRIPT)
            for pair in range(asked.pairs):
                times = {}
                for side in (False, True) if pair % 2 == 0 else (True, False):
                    is_watched = side and not asked.null
                    wall, cpu, report = launch(folder, ranks, is_watched, words)
                    times[side] = (wall, cpu)
                    if is_watched:
                        assert report["verdict"] == "pass", report["reason"]
                        seen = report["ranks"]["0"]["optimizers"][0]
                walls.append(times[True][0] / times[False][0])
                cpus.append(times[True][1] / times[False][1])
                plain.append(1e3 * times[False][0])
                watched.append(1e3 * times[True][0])
                print(f"pair {pair}: wall {walls[-1]:.3f}, CPU {cpus[-1]:.3f}", file=sys.stderr)
        row = [
            str(ranks),
            f"{statistics.median(plain):.1f}",
            f"{statistics.median(watched):.1f}",
            _told(walls),
            _told(cpus),
            str(seen["every"]),
            f"{1e3 * seen['cost_seconds']:.1f}",
        ]
        print(f"| {' | '.join(row)} |", flush=True)


def _told(ratios: list[float]) -> str:
    """The median, and the smallest and largest."""
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


if __name__ == "__main__":
    main()
