"""The study of ``Training`` against plain loops: both train, and every block has both."""

from __future__ import annotations

import re

import pytest

from shardproof.errors import SelectionError
from tools.studies import training

pytestmark = pytest.mark.launches


def test_both_loops_take_turns(capsys: pytest.CaptureFixture[str]) -> None:
    code = training.run(["zero2"], ranks=2, blocks=3, launches=1, layers=1, goal=1e9)
    *_, row = capsys.readouterr().out.splitlines()
    assert code == 0
    assert re.match(r"\| zero2 \| [\d.]+ \[[\d.]+, [\d.]+\] \| [\d.]+ \[", row), row


def test_loops_that_train_differently_are_no_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training.Turns, "train", _with_other_targets(training.Turns.train))
    with pytest.raises(RuntimeError, match="the loops train differently"):
        training.run(["ddp"], ranks=1, blocks=2, launches=1, layers=1)


def _with_other_targets(train):  # type: ignore[no-untyped-def]
    def changed(self, steps):  # type: ignore[no-untyped-def]
        self.batches = [(inputs, targets + 1) for inputs, targets in self.batches]
        return train(self, steps)

    return changed


def test_an_unknown_strategy_has_a_remedy() -> None:
    with pytest.raises(SelectionError, match="write one of pytorch/ddp"):
        training.run(["zero9"])
