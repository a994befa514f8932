"""``shardproof watch`` on a script that knows nothing of it: sound ones pass, planted faults are
named with their step, rank and tensor.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import watched_script
from commands import ROOT
from watched_script import BY_HAND, CLEAN

from shardproof.launch import process_control

pytestmark = pytest.mark.launches

STEP = "        optimizer.step()\n"
BACKWARD = "        loss.backward()\n"


def watch(command: Any, script: Path, *options: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what was printed, and ``report.json``."""
    folder = script.parent / "run"
    code, out, err = command("watch", str(script), "--results", str(folder), *options)
    return code, out + err, json.loads((folder / "report.json").read_text())


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """No process that the test started is there any more, nor one that it had to adopt."""
    before = process_control.children()
    yield
    assert process_control.children() <= before


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("text", [CLEAN, BY_HAND], ids=["ddp", "by_hand"])
def test_a_sound_script_passes(command: Any, tmp_path: Path, text: str) -> None:
    script = watched_script.write(tmp_path, text=text)
    code, told, report = watch(command, script)
    assert (code, report["verdict"]) == (0, "pass"), told
    assert report["findings"] == []
    (seen,) = report["ranks"]["0"]["optimizers"]
    assert seen["compared"][:3] == [1, 2, 3] and seen["compared"][-1] == 12
    assert (seen["steps"], seen["tracked"]) == (12, 4)
    assert seen["tracked_bytes"] == 4 * (16 * 32 + 32 + 32 * 4 + 4)
    for what in ("initial parameters", "gradients", "optimizer state", "parameters"):
        assert any(held.startswith(what) for held in report["held"]), told
    assert "cannot see" in told
    assert f"command: shardproof watch {script} --nproc 2\n" in told
    assert "# Watched: train.py on 2 ranks\n" in (tmp_path / "run/report.md").read_text()


#: Name -> (changes, base, kind of the first finding, its sentence).
FAULTS: dict[str, tuple[list[tuple[str, str]], str, str, str]] = {
    "parts_when_one_rank_stops_reducing": (
        [
            (
                BACKWARD,
                "        with model.no_sync() if step >= 7 else contextlib.nullcontext():\n"
                "            loss.backward()\n",
            ),
            ("        loss = nn.functional.mse_loss(model(x), y)\n", ""),
            ("import os\n", "import contextlib\nimport os\n"),
            (
                "        optimizer.zero_grad()\n",
                "        optimizer.zero_grad()\n"
                "        with model.no_sync() if step >= 7 else contextlib.nullcontext():\n"
                "            loss = nn.functional.mse_loss(model(x), y)\n",
            ),
        ],
        CLEAN,
        "gradients",
        r"gradients differ at step 7, while parameters were still equal: rank 0 and rank 1",
    ),
    "another_seed_and_no_broadcast": (
        [
            ("torch.manual_seed(0)", "torch.manual_seed(rank)"),
            ("    for p in model.parameters():\n        dist.broadcast(p.data, 0)\n", ""),
        ],
        BY_HAND,
        "initial parameters",
        r"initial parameters differ before the first step: .*rank 0 and rank 1 "
        r"\(4 of 4 parameters: 0\.weight \[32x16\]",
    ),
    "one_rank_has_another_table": (
        [
            (
                "    model = DistributedDataParallel(model)\n",
                "    model.register_buffer('table', torch.full((8,), 1.0 + rank))\n"
                "    model = DistributedDataParallel(model, broadcast_buffers=False)\n",
            )
        ],
        CLEAN,
        "buffers",
        r"buffers differ that no step changes: .*rank 0 and rank 1 \(1 of 1 buffers: table \[8\]\)",
    ),
    "one_rank_changes_its_gradient": (
        [
            (
                STEP,
                "        if rank == 1 and step == 5:\n"
                "            model.module[2].bias.grad[1] += 1e-4\n" + STEP,
            )
        ],
        CLEAN,
        "gradients",
        r"gradients differ at step 5, while parameters were still equal: .*"
        r"1 of 4 gradients: 2\.bias \[4\]",
    ),
    "one_rank_loses_its_momentum": (
        [
            (
                STEP,
                "        if rank == 1 and step == 6:\n            optimizer.state.clear()\n" + STEP,
            )
        ],
        CLEAN,
        "optimizer state",
        r"optimizer state differs at step 6: rank 0 and rank 1 \(4 of 4 states",
    ),
    "one_rank_calls_another_collective": (
        [
            (
                BACKWARD,
                BACKWARD + "        if step == 4:\n"
                "            dist.all_reduce(torch.ones(3 + rank))  # here\n",
            )
        ],
        CLEAN,
        "collectives",
        r"call \d+ on ranks 0-1 differs: rank 0 made all_reduce\(sum, float32\[3\]\) at "
        r".*train\.py:LINE, rank 1 made all_reduce\(sum, float32\[4\]\) at .*train\.py:LINE",
    ),
    "one_rank_calls_in_another_order": (
        [
            (
                BACKWARD,
                BACKWARD + "        if step == 4:\n"
                "            todo = [lambda: dist.barrier(), lambda: dist.broadcast(total, 0)]\n"
                "            for call in reversed(todo) if rank else todo:\n"
                "                call()\n",
            ),
            (
                "    torch.manual_seed(0)\n",
                "    torch.manual_seed(0)\n    total = torch.zeros(2)\n",
            ),
        ],
        CLEAN,
        "collectives",
        r"call \d+ on ranks 0-1 differs: rank 0 made barrier\(\) at .*train\.py:\d+, "
        r"rank 1 made broadcast\(root 0, float32\[2\]\) at .*train\.py:\d+",
    ),
    "one_rank_changes_a_parameter": (
        [
            (
                STEP,
                STEP + "        if rank == 1 and step == 5:\n"
                "            model.module[2].bias.data[1] += 1e-4\n",
            )
        ],
        CLEAN,
        "parameters",
        r"parameters start to differ at step 6: rank 0 and rank 1 "
        r"\(1 of 4 parameters: 2\.bias \[4\]\)",
    ),
    "one_rank_is_stopped": (
        [
            (
                STEP,
                STEP + "        if rank == 1 and step == 5:\n"
                "            os.kill(os.getpid(), 19)\n",
            )
        ],
        CLEAN,
        "rank",
        r"the ranks stand still: dead peer: rank 0 waits in all_reduce.*, call \d+ of group 0-1 "
        r"in main \(.*train\.py:\d+\); rank 1 never came: its process was stopped.*last call: ",
    ),
    "a_gradient_is_not_finite": (
        [
            (
                STEP,
                "        if step == 3:\n"
                "            model.module[0].weight.grad[2, 5] = float('nan')\n" + STEP,
            )
        ],
        CLEAN,
        "non-finite",
        r"a value of the gradient of 0\.weight is not finite on ranks 0-1 at step 3",
    ),
    "one_rank_waits_for_ever": (
        [
            (
                BACKWARD,
                "        if rank == 1 and step == 4:\n            time.sleep(1000)  # here\n"
                + BACKWARD,
            )
        ],
        CLEAN,
        "rank",
        r"the ranks stand still: desync: rank 0 waits in all_reduce.*, call \d+ of group 0-1 .*; "
        r"rank 1 never came: it stands in main \(.*train\.py:LINE\), its last call: ",
    ),
    "ranks_wait_in_backward": (
        [
            (
                BACKWARD,
                "        if rank == 1 and step == 4:\n"
                "            dist.recv(torch.ones(1), 0)  # here\n" + BACKWARD,
            )
        ],
        CLEAN,
        "rank",
        r"the ranks stand still: desync: rank 0 waits in all_reduce.*, call \d+ of group 0-1 "
        r"in main \(.*train\.py:\d+\); rank 1 never came: it waits in recv\(from 0, float32\[1\]"
        r"\), group 0-1 in main \(.*train\.py:LINE\)",
    ),
    "one_rank_has_another_learning_rate": (
        [("lr=0.05", "lr=0.05 * (1 + rank)")],
        CLEAN,
        "hyperparameters",
        r"hyperparameters differ at step 1: lr of group 0 is 0\.05 on rank 0, 0\.1 on rank 1",
    ),
    "one_rank_is_killed": (
        [
            (
                STEP,
                STEP + "        if rank == 1 and step == 5:\n            os.kill(os.getpid(), 9)\n",
            )
        ],
        CLEAN,
        "rank",
        r"rank 1 was killed: SIGKILL; its last call: all_reduce.*; rank 0 could not continue",
    ),
    "one_rank_raises": (
        [
            (
                STEP,
                STEP + "        if rank == 1 and step == 5:\n"
                "            raise ValueError('bad')  # here\n",
            )
        ],
        CLEAN,
        "rank",
        r"rank 1 raised ValueError: bad in main \(.*train\.py:LINE\); rank 0 could not continue",
    ),
    "one_rank_makes_fewer_steps": (
        [
            ("range(1, steps + 1)", "range(1, steps + 1 - rank)"),
            (
                "    total = loss.detach().clone()\n"
                "    dist.all_reduce(total)\n"
                "    dist.barrier()\n",
                "",
            ),
            (
                "            dist.all_reduce(p.grad)\n"
                "            p.grad /= dist.get_world_size()\n",
                "            p.grad = torch.ones_like(p)\n",
            ),
        ],
        BY_HAND,
        "steps",
        r"rank 1 made one step fewer: rank 0 made 12; rank 1 made 11$",
    ),
    "one_rank_leaves_a_step_out": (
        [(STEP, "        if (rank, step) != (1, 5):\n            optimizer.step()\n")],
        CLEAN,
        "steps",
        r"rank 1 made one step fewer: rank 0 made 12; rank 1 made 11 \(first seen at step 5\)$",
    ),
}


#: Those that are ended after 4 s: what is told of a hang does not rest on the default.
SOON = ("one_rank_waits_for_ever", "ranks_wait_in_backward")
#: What docs/watch.md says that it finds, and the faults here that are such.
PLANTED = {
    "initial parameters differ": {"another_seed_and_no_broadcast"},
    "a constant table below `DistributedDataParallel` differs, "
    "also with `broadcast_buffers=False`": {"one_rank_has_another_table"},
    "gradients differ (a rank was not averaged)": {
        *("parts_when_one_rank_stops_reducing", "one_rank_changes_its_gradient")
    },
    "optimizer state differs (momentum lost on a rank)": {"one_rank_loses_its_momentum"},
    "parameters start to differ": {"one_rank_changes_a_parameter"},
    "learning rates and other hyperparameters differ": {"one_rank_has_another_learning_rate"},
    "values that are not finite": {"a_gradient_is_not_finite"},
    "collectives whose order or shape differs between ranks": {
        *("one_rank_calls_another_collective", "one_rank_calls_in_another_order")
    },
    "a rank dies, raises, stops or waits for ever": {
        *("one_rank_is_killed", "one_rank_raises", "one_rank_is_stopped"),
        *("one_rank_waits_for_ever", "ranks_wait_in_backward"),
    },
    "ranks make different numbers of steps": {
        *("one_rank_makes_fewer_steps", "one_rank_leaves_a_step_out")
    },
}


def test_a_fault_is_planted_of_each_kind_that_the_page_lists() -> None:
    page = (ROOT / "docs/watch.md").read_text().partition("## What it finds")[2]
    rows = [
        line.split("|")[1].strip() for line in page.partition("##")[0].splitlines() if "|" in line
    ]
    assert rows[2:] == [*PLANTED]
    assert {name for names in PLANTED.values() for name in names} == {*FAULTS}


@pytest.mark.usefixtures("forked_ranks", "nothing_left")
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(command: Any, tmp_path: Path, name: str) -> None:
    changes, base, kind, sentence = FAULTS[name]
    script = watched_script.write(tmp_path, *changes, text=base)
    limit = ["--standstill", "4"] * (name in SOON)
    code, told, report = watch(command, script, "--every", "1", *limit)
    assert code == 1, told
    first = report["findings"][0]
    assert first["kind"] == kind and first["broken"], told
    lines = enumerate(script.read_text().splitlines(), 1)
    line = next((str(number) for number, text in lines if "# here" in text), "")
    assert re.search(sentence.replace("LINE", line), first["sentence"]), told
    assert first["sentence"] in told
