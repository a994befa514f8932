"""The adapter around DDP in docs/add-an-implementation.md passes, and fails with a line changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import here, script

pytestmark = pytest.mark.launches

PAGE = (Path(__file__).parents[2] / "docs/add-an-implementation.md").read_text()
SECTION = PAGE.partition("## In full: ")[2]
ADAPTER, CALL, SHORT = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
#: Most lines of the adapter without blank ones.
MOST = 48
SHOW = "print([(row.world, row.verdict, row.reason) for row in frame.itertuples()])\n"
#: What is changed into what, and what is then said of it.
FAULTS = {
    "no schedule": ("self.spec.lr_at(batch.step)", "self.spec.lr", "differs from the oracle"),
    "no decay": ('"weight_decay": optimizer.weight_decay, ', "", "differs from the oracle"),
    "a mean": (" * self.comm.size", "", "every gradient is 3 times too small (3 = ranks)"),
    "no reduction": ("if number < last else nullcontext()", "", "it was not reduced"),
}


def run(folder: Path, adapter: str, **arguments: object) -> str:
    """What is printed of the verdicts."""
    call = f"frame = prove('my_ddp:MyDDP', **{arguments!r})\n"
    return program(folder, adapter, f"from shardproof import prove\n{call}{SHOW}")


def program(folder: Path, adapter: str, text: str) -> str:
    """What a script beside the adapter prints; it raises what the script raises."""
    (folder / "my_ddp.py").write_text(adapter)
    (folder / "judge.py").write_text(text)
    done = script(folder / "judge.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_passes_as_it_stands(tmp_path: Path) -> None:
    assert len([line for line in ADAPTER.splitlines() if line.strip()]) <= MOST
    program(tmp_path, ADAPTER, CALL)
    more = {"worlds": (1, 2, 3), "optimizer": "adamw", "workload": "digits_cnn"}
    told = run(tmp_path, ADAPTER, **more)
    assert told.count("'pass'") == 3, told


def test_the_one_with_a_base_class_passes(tmp_path: Path) -> None:
    (tmp_path / "my_fsdp2.py").write_text(SHORT)
    given = {"axis": "shard", "optimizer": "adamw", "clip": (None, 0.05)}
    call = f"frame = prove('my_fsdp2:MyFSDP2', **{given!r})\n"
    told = program(tmp_path, ADAPTER, f"from shardproof import prove\n{call}{SHOW}")
    assert told.count("'pass'") == 6, told


def test_it_passes_on_a_model_with_a_constant_buffer(tmp_path: Path) -> None:
    """As rotary tables and masks: no state dict holds them, and every build makes them."""
    model = """
import torch
from torch import nn
from shardproof import OwnWorkload


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 2)
        self.register_buffer("table", torch.linspace(0.5, 2, 8), persistent=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x) * self.table))


def batch(size, generator):
    x = torch.randn(size, 6, generator=generator)
    return x, x.sum(1).gt(0).long()


net = OwnWorkload(Net, nn.CrossEntropyLoss(reduction="none"), batch)
"""
    (tmp_path / "tabled.py").write_text(model)
    told = run(tmp_path, ADAPTER, worlds=(1, 2, 3), workload="tabled:net")
    assert told.count("'pass'") == 3, told


def test_it_passes_the_cells_of_all_scenarios_that_it_does_not_decline(tmp_path: Path) -> None:
    """As the page says: ``shardproof run --impl``."""
    (tmp_path / "my_ddp.py").write_text(ADAPTER)
    words = ("run", "--impl", "my_ddp:MyDDP", "--backend", "in_memory", "--results", "out")
    done = here(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", FAULTS)
def test_it_fails_with_a_line_changed(tmp_path: Path, name: str) -> None:
    old, new, says = FAULTS[name]
    assert ADAPTER.count(old) == 1
    told = run(tmp_path, ADAPTER.replace(old, new), worlds=(3,))
    assert "'fail'" in told and says in told, told
