"""Generates the tables of docs/estimate.md: sizes, the memory ledger, and other estimators.

    python docs/make_estimates.py                # trains the cases (a minute), writes all tables
    python docs/make_estimates.py --estimators   # trains nothing

The table of estimators needs `deepspeed` and `accelerate`; without them the rows stay.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardproof import estimate, workloads
from shardproof.case import Case
from shardproof.cases.runner import run_cases
from shardproof.checks.results import CaseResult
from shardproof.contract import MicroBatch
from shardproof.costs import shapes
from shardproof.costs.model import JUDGED
from shardproof.estimate.figures import Estimate
from shardproof.scenarios.load import load_text
from shardproof.scenarios.matrix import expand
from shardproof.scenarios.vocabulary import installed

PAGE = Path(__file__).parent / "estimate.md"
#: The cases that are estimated and trained.
CASES = """\
name: estimates
about: estimates against the memory ledger
sees: [a formula of an estimate that is wrong]
workload:
  name: charnames_gpt
  global_batch: 48
  micro_batches: 2
  params: {width: 64, seq: 32, layers: 4}
matrix:
  implementation: [reference/ddp]
  backend: in_memory
  mesh: {replicate: [2, 4]}
  optimizer: adamw
  lane: working_precision
  precision: [{label: fp32, built: float32}, {label: bf16, built: bfloat16}]
include:
  - reason: plain
    implementation: reference/naive_ddp
    mesh: {replicate: 3}
    optimizer: sgd
    precision: {label: fp32, built: float32}
  - reason: shards of the state
    implementation: [reference/zero1, reference/zero2, reference/zero3]
    mesh: {shard: 2}
    precision:
      - {label: A16, parameters: bfloat16}
      - {label: M18, parameters: bfloat16, reduce: float32}
  - reason: uneven shards
    implementation: [reference/zero1, reference/zero2, reference/zero3]
    mesh: {shard: 3}
    precision: {label: fp32, built: float32}
  - reason: choices of FSDP
    implementation:
      - {name: reference/fsdp, label: full, options: {sharding_strategy: FULL_SHARD}}
      - {name: reference/fsdp, label: grad_op, options: {sharding_strategy: SHARD_GRAD_OP}}
    mesh: {shard: 4}
    precision: {label: A16, parameters: bfloat16}
  - reason: shards and copies of them
    implementation:
      - {name: reference/fsdp, label: hybrid, options: {sharding_strategy: HYBRID_SHARD}}
    mesh: {replicate: 2, shard: 2}
    precision: {label: fp32, built: float32}
  - reason: parts of layers
    implementation:
      - name: reference/tensor
        label: split
        options: {loss_parallel: true}
      - name: reference/tensor
        label: sequence
        options: {loss_parallel: true, sequence_parallel: true}
    mesh: {tensor: [2, 4]}
    precision: {label: fp32, built: float32}
  - reason: stages
    implementation:
      - {name: reference/pipeline, label: 1f1b, options: {schedule: 1f1b}}
      - {name: reference/pipeline, label: gpipe, options: {schedule: gpipe}}
      - {name: reference/pipeline, label: interleaved, options: {schedule: interleaved}}
    mesh: {pipe: 2}
    precision: {label: fp32, built: float32}
  - reason: three axes
    implementation:
      name: reference/hybrid
      label: zero1
      options: {data: zero1, loss_parallel: true}
    mesh: {pipe: 2, shard: 2, tensor: 2}
    precision: {label: fp32, built: float32}
  - reason: computed again
    implementation:
      - {name: reference/zero3, label: every1, options: {recompute_every: 1}}
      - {name: reference/fsdp, label: every2, options: {recompute_every: 2}}
    mesh: {shard: 2}
    precision: {label: fp32, built: float32}
  - reason: on the host
    implementation:
      - {name: reference/zero2, label: optimizer, options: {offload: optimizer}}
      - {name: reference/zero3, label: parameters, options: {offload: parameters}}
    mesh: {shard: 2}
    precision: {label: fp32, built: float32}
checks: [memory]
steps: 2
"""


class WithLoss(nn.Module):
    """A model and its loss: all that a step computes forward."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        work = workloads.for_case(case)
        self.model = work.skeleton.to(getattr(torch, case.dtype))
        self.loss = work.build_for(0).loss

    def forward(self, inputs: Any, targets: Any, weights: Any) -> Any:
        """The loss of a micro-batch."""
        return self.loss(self.model(inputs), MicroBatch(inputs, targets, weights, targets))


def cases() -> list[Case]:
    """The cases of the first table."""
    return expand(load_text(CASES, "estimates.yaml"), installed())


def estimated(case: Case) -> Estimate:
    """The estimate of the case's model, as a user's module."""
    work = workloads.for_case(case)
    micro = work.batch(0, case.data_coordinates)[0].windows[0][0]
    return estimate(
        WithLoss(case),
        torch.optim.SGD([torch.zeros(1)], momentum=case.optimizer.momentum)
        if case.optimizer.name == "sgd"
        else "adamw",
        impl=case.implementation,
        mesh=case.mesh,
        inputs=(micro.inputs, micro.targets, micro.weights),
        units=tuple(f"model.{name}" for name in work.units),
        roles={f"model.{name}": role for name, role in work.roles.items()},
        micro_batches=2,
        **case.options,
    )


class Held(NamedTuple):
    """What the ledger counted on the rank that holds most."""

    state: Mapping[str, int]
    host: int
    activations: int


def measured(result: CaseResult) -> Held:
    """What the ledger counted in a case."""
    figures = result.checks[0].figures
    resident = [spaces for _, spaces in sorted(figures["resident"].items(), key=_rank)]
    device = [spaces.get("device", {}) for spaces in resident]
    state = [{kind: held.get(kind, 0) for kind in JUDGED} for held in device]
    peaks = [phase for rank in figures["peaks"].values() for phase in rank.values()]
    on_host = [spaces.get("host", {}) for spaces in resident]
    return Held(
        max(state, key=lambda held: sum(held.values())),
        max(sum(held.get(kind, 0) for kind in JUDGED) for held in on_host),
        max(peak.get("activations", 0) for peak in peaks),
    )


def _rank(item: tuple[str, Any]) -> int:
    return int(item[0])


def ledger_table(results: Iterable[CaseResult]) -> str:
    """Estimates next to what was counted."""
    lines = [
        "| implementation | mesh | model | state | counted | activations | counted | off by |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        case, held = result.case, measured(result)
        found = estimated(case)
        kept = found.kept or 0
        off = 100 * (kept / held.activations - 1)
        mesh = " x ".join(f"{name} {size}" for name, size in case.mesh.items())
        state, counted = f"{found.state:,}", f"{sum(held.state.values()):,}"
        if held.host:
            state, counted = f"{state} + {found.host:,}", f"{counted} + {held.host:,}"
        precision = re.search(r"(fp32|bf16|A16|M18)", case.id)
        lines.append(
            f"| {case.id.split('::')[1]} | {mesh} | {precision[1] if precision else ''} | {state} "
            f"| {counted} | {kept:,} | {held.activations:,} | {off:+.1f} % |"
        )
    return "\n".join(lines)


# ------------------------------------------------------------------------------------- sizes

#: A size, and the words of a command that fits 80 GB.
SIZES = (
    ("below 1B", "gpt2-large --impl ddp --gpus 8 --batch 4"),
    ("1B to 10B", "7b --impl zero1 --gpus 8"),
    ("7B and more", "llama2-70b --impl fsdp --gpus 64 --recompute 1"),
    (
        "10B to 175B",
        "gpt3-175b --impl hybrid --mesh tensor=8,pipe=16 --gpus 1024 --micro-batches 16 "
        "--recompute selective --option sequence_parallel=true --option data=zero1",
    ),
    (
        "100B to 1T",
        "gpt-1t --impl hybrid --mesh tensor=8,pipe=64 --gpus 3072 --micro-batches 64 "
        "--recompute selective --option sequence_parallel=true --option data=zero1",
    ),
)


def sizes_table() -> str:
    """What each size of model takes on 80 GB, with its command."""
    lines = [
        "| model | state | activations | in all, GB a GPU | command |",
        "|---|---|---|---|---|",
    ]
    for size, words in SIZES:
        model, *rest = words.split()
        pairs = list(zip(rest[::2], rest[1::2], strict=True))
        given: dict[str, Any] = {}
        for key, value in pairs:
            if key == "--mesh":
                axes = (part.split("=") for part in value.split(","))
                given["mesh"] = {name: int(ranks) for name, ranks in axes}
                continue
            name, _, text = value.partition("=") if key == "--option" else (key, "", value)
            name = name.removeprefix("--").replace("-", "_")
            given["samples" if name == "batch" else name] = _value(text)
        one = estimate(model, **given)
        assert one.total <= 80e9, words
        sums = (one.state, one.activations or 0, one.total)
        cells = " | ".join(f"{number / 1e9:,.1f}" for number in sums)
        lines.append(f"| {size} | {cells} | `shardproof estimate {words}` |")
    return "\n".join(lines)


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


# ------------------------------------------------------------------------------ other estimators


class Row(NamedTuple):
    """One configuration: its words, our arguments, DeepSpeed's, accelerate's precision."""

    model: str
    what: str
    ours: Mapping[str, Any]
    stage: int
    given: Mapping[str, Any]
    dtype: str
    why: str


ROWS = [
    Row(
        "gpt2-xl", "one GPU, fp32", {"impl": "ddp", "accounting": "A32"}, 0, {}, "float32",
        "the same 16 bytes; accelerate adds no step counters (4 bytes a tensor)",
    ),
    Row(
        "pythia-1b", "one GPU, bf16 autocast", {"impl": "ddp", "accounting": "A16"}, 0, {},
        "bfloat16",
        "accelerate names the largest of its phases, 2 x 4 bytes a parameter of moments, "
        "and adds nothing up",
    ),
    Row(
        "llama-7b", "ZeRO-2, 8 GPUs", {"impl": "zero2", "gpus": 8}, 2, {"num_gpus_per_node": 8},
        "bfloat16",
        "DeepSpeed counts gradients twice, 2 + 4 bytes: 2 + 18/8 bytes a parameter, here 2 + 14/8; "
        "accelerate knows one GPU only",
    ),
    Row(
        "llama3-8b", "ZeRO-3, 8 GPUs", {"impl": "zero3", "gpus": 8}, 3, {"num_gpus_per_node": 8},
        "bfloat16",
        "DeepSpeed: 18/8 bytes and one largest layer; here 16/8 (the shard is its own master), and "
        "gathered units and buffers on top",
    ),
    Row(
        "llama-13b", "ZeRO-2, optimizer on the host, 8 GPUs",
        {"impl": "zero2", "gpus": 8, "offload": "optimizer"}, 2,
        {"num_gpus_per_node": 8, "cpu_offload": True}, "bfloat16",
        "DeepSpeed leaves the shard of gradients out (2/8 bytes); its host figure is 4 bytes a "
        "parameter and GPU x 1.5 for loading, here the state that rests there",
    ),
    Row(
        "llama2-70b", "ZeRO-3, all on the host, 2 x 8 GPUs",
        {"impl": "zero3", "gpus": 16, "offload": "parameters"}, 3,
        {"num_gpus_per_node": 8, "num_nodes": 2, "cpu_offload": True}, "bfloat16",
        "DeepSpeed: the largest layer, 4 bytes a parameter; here at most the root, two units, and "
        "shards of gradients on their way to the host",
    ),
]  # fmt: skip


def on_meta(shape: shapes.Shape) -> nn.Module:
    """A module with the parameters of a published shape, without values."""
    root = nn.Module()
    for one in shapes.tensors(shape, "float32"):
        if not one.numel:
            continue
        *path, leaf = one.name.split(".")
        module = root
        for name in path:
            if name not in module._modules:
                module.add_module(name, nn.Module())
            module = module.get_submodule(name)
        module.register_parameter(leaf, nn.Parameter(torch.empty(one.shape, device="meta")))
    return root


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What ``call`` gives, and its seconds: the fastest of three, after the imports."""
    seconds = []
    for _ in range(3):
        began = time.perf_counter()
        found = call()
        seconds.append(time.perf_counter() - began)
    return found, min(seconds)


def deepspeed(row: Row, model: nn.Module) -> tuple[str, str]:
    """DeepSpeed's GB on a GPU (and on the host of a node), and its seconds."""
    if not row.stage:
        return "no such estimator", ""
    if row.stage == 2:
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as of
    else:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as of

    def call() -> tuple[int, ...]:
        # Counted here: on the device meta DeepSpeed's own count takes all tensors for one.
        given = dict(row.given)
        sizes = [sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules()]
        if row.stage == 3:
            given["largest_layer_params"] = max(sizes)
        given.setdefault("cpu_offload", False)
        found: tuple[int, ...] = of(sum(sizes), **given)
        return found

    (host, device, *_), seconds = timed(call)
    on_host = f" + {host / 1e9:,.0f} host" if row.given.get("cpu_offload") else ""
    return f"{device / 1e9:,.2f}{on_host}", f"{seconds:.4f}"


def accelerate(row: Row, model: nn.Module) -> tuple[str, str]:
    """accelerate's peak of training with Adam in GB, and its seconds."""
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    def call() -> int:
        total, _ = calculate_maximum_sizes(model)
        return int(max(estimate_training_usage(total, row.dtype).values()))

    found, seconds = timed(call)
    return f"{found / 1e9:,.2f}", f"{seconds:.4f}"


def ours(row: Row) -> tuple[str, str]:
    """Our GB of states on a GPU, what moves, the host of a node, and the seconds."""
    found, seconds = timed(lambda: estimate(row.model, **row.ours))
    gpus = min(8, int(row.ours.get("gpus", 1)))
    on_host = f" + {gpus * found.host / 1e9:,.0f} host" if found.host else ""
    moving = f" + {found.communication / 1e9:,.2f}" if found.communication else ""
    return f"{found.state / 1e9:,.2f}{moving}{on_host}", f"{seconds:.3f}"


def estimators_table(rows: Sequence[Row] = ROWS) -> str:
    """Three estimators side by side."""
    lines = [
        "| model | configuration | DeepSpeed | s | accelerate | s | shardproof | s | difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        model = on_meta(shapes.model(row.model))
        cells = (*deepspeed(row, model), *accelerate(row, model), *ours(row))
        lines.append("| " + " | ".join((row.model, row.what, *cells, row.why)) + " |")
    return "\n".join(lines)


def replaced(text: str, name: str, table: str) -> str:
    """``text`` with the table between the two marks of ``name``."""
    begin, end = f"<!-- {name}: python docs/make_estimates.py -->", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.partition(end)[2]}"


def main() -> int:
    """Write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--estimators", action="store_true")
    only = parser.parse_args().estimators
    text = replaced(PAGE.read_text(encoding="utf-8"), "sizes", sizes_table())
    lacking = [n for n in ("deepspeed", "accelerate") if importlib.util.find_spec(n) is None]
    if lacking:
        print(f"the table of estimators stays: no package {', '.join(lacking)} here")
    else:
        text = replaced(text, "estimators", estimators_table())
    if not only:
        found = cases()
        results, _ = run_cases(found, 2, lambda result: None)
        order = {case.id: number for number, case in enumerate(found)}
        results = sorted(results, key=lambda result: order[result.case.id])
        if broken := [r for r in results if r.verdict != "pass"]:
            print(*(f"{r.case.id}: {r.reason}" for r in broken), sep="\n")
            return 1
        text = replaced(text, "ledger", ledger_table(results))
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
