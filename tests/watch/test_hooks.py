"""What the hooks of a rank do where a script does what few do; no process is started."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardproof.watch import compare
from shardproof.watch.compare import LAST, Compared
from shardproof.watch.rank import Settings, Watch
from shardproof.watch.record import RankRecord


class Replacing(torch.optim.SGD):
    """Its step puts new tensors into the module and the group, as some quantizing ones do."""

    def __init__(self, model: nn.Linear, name: str = "weight") -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.model, self.name = model, name

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        old = self.param_groups[0]["params"][0]
        new = nn.Parameter(old - 0.1 * old.grad)
        del self.model.weight
        self.model.register_parameter(self.name, new)
        self.param_groups[0]["params"][0] = new


def alone(optimizer: torch.optim.Optimizer) -> Compared:
    """Rank 0 of two, who reaches nobody."""
    record = RankRecord(0, 2, 1, "host", "train.py", "2.13")
    return Compared(optimizer, 0, None, record, None, 1)


def step(one: Compared, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    one.before(optimizer, has_closure=False)
    optimizer.step()
    one.after(optimizer)


def test_a_step_may_put_new_tensors_in_place() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = Replacing(model)
    one = alone(optimizer)
    for _ in range(3):
        step(one, optimizer)
        assert {"gradients", "parameters"} <= {*one._sums}
        assert one.found.tracked[0].parameter is model.weight
    assert one.rows == 3


def test_what_was_kept_of_other_parameters_is_dropped() -> None:
    model = nn.Linear(2, 2, bias=False)
    optimizer = Replacing(model, "other")
    one = alone(optimizer)
    step(one, optimizer)
    assert [*one._sums] == ["parameters"]
    assert one.found.tracked[0].name == "other"
    assert one.seen.not_compared["gradients"] == "the step replaces the parameters by others"


def test_a_model_that_outlives_its_group_is_passed_over() -> None:
    model = nn.Linear(2, 2)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    outlives = nn.parallel.DistributedDataParallel(model)
    dist.destroy_process_group()
    optimizer = torch.optim.SGD(model.parameters())
    one = alone(optimizer)
    step(one, optimizer)
    assert {each.name for each in one.found.tracked} == {"weight", "bias"}
    assert outlives.module is model


def watch(folder: Path) -> Watch:
    made = Watch(Settings(folder, every=1), 0, 2)
    made.record.initialised = True
    return made


def made_step(one: Watch, optimizer: torch.optim.Optimizer) -> None:
    """As torch calls the hooks of :meth:`Watch.install`."""
    one._safe(one._before_step)(optimizer, (), {})
    one._safe(one._after_step)(optimizer, (), {})


def test_a_hook_that_fails_ends_watching_and_not_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    one = watch(tmp_path)
    made_step(one, optimizer)

    def fails(*_: object) -> None:
        raise ValueError("of the suite's own")

    monkeypatch.setattr(compare.checksum, "of_parameters", fails)
    for _ in range(2):
        made_step(one, optimizer)
    (finding,) = one.record.findings
    assert finding.kind == "not compared" and not finding.broken
    said = "watching failed on rank 0 at step 2, ValueError: of the suite's own (test_hooks.py:"
    assert finding.sentence.startswith(said)
    assert "of the suite's own" in (tmp_path / "rank0.json").read_text()
    one.finish()
    assert one.record.ended


class Reached:
    """Ranks that hold the same as this one."""

    broken = ""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def start(self, row: list[int]) -> Reached:
        self.rows.append([*row])
        return self

    def result(self) -> list[list[int]]:
        return [self.rows[-1]] * 2

    def close(self) -> None:
        self.broken = "it is closed"


def reaching(folder: Path) -> tuple[Watch, Reached]:
    one, reached = watch(folder), Reached()
    one.exchange = reached  # type: ignore[assignment]
    return one, reached


def test_an_exception_handled_since_before_the_steps_hides_no_comparison(tmp_path: Path) -> None:
    """``except ImportError: main()``."""
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    one, reached = reaching(tmp_path)
    try:
        raise ImportError("no such accelerator")
    except ImportError:
        made_step(one, optimizer)
        assert not one._is_failing()
        one._compare_the_end(one._is_failing())
    assert len(reached.rows) == 2
    assert LAST not in one.record.optimizers[0].not_compared


def test_a_comparison_at_the_end_that_is_left_out_is_named(tmp_path: Path) -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    one, reached = reaching(tmp_path)
    made_step(one, optimizer)
    try:
        raise ValueError("in the script")
    except ValueError:
        assert one._is_failing()
        one._compare_the_end(one._is_failing())
    assert len(reached.rows) == 1
    why = "an exception was under way when the script ended"
    assert one.record.optimizers[0].not_compared[LAST] == why
