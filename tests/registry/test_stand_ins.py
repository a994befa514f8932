"""What a stand-in says is what the class says that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardproof import registry, tensor_bytes
from shardproof.contract import Refused
from shardproof.launch.informant import NoAnswer
from shardproof.registry import stand_ins
from shardproof.registry.declaration import BrokenContract, Declaration

LISTED = [n for n in registry.names() if n.startswith(("reference/", "pytorch/", "plain"))]


class Through:
    """An informant in this process: what goes either way goes through a file."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "packed"

    def packed(self, value: Any) -> Any:
        tensor_bytes.dump(self._file, value)
        return tensor_bytes.load(self._file)

    def do(self, function: Callable[..., Any], *given: Any) -> Any:
        return self.packed(function(*self.packed(given)))


@pytest.mark.parametrize("name", LISTED)
def test_a_declaration_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    system: Any = registry.load(name)
    stand_in: Any = stand_ins._stand_in(Through(tmp_path), name)  # type: ignore[arg-type]
    assert stand_in.__name__ == system.__name__
    assert Declaration.of(stand_in, {}) == Declaration.of(system, {})


class Says:
    """An informant that says ``answers`` in turn."""

    def __init__(self, *answers: Any) -> None:
        self._answers = [*answers]

    def do(self, function: Callable[..., Any], *given: Any) -> Any:
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


GOOD = stand_ins.About("", "Mine", "ddp", "layout").to_dict()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ({}, "declares the fields '', expected the fields of Capabilities"),
        (
            {"axes": ["replicate"]},
            "declares the fields 'axes', expected the fields of Capabilities",
        ),
        ([1], "cannot be read"),
        (None, "cannot be read"),
        (NoAnswer("ended its process (exit code 3)"), "ended its process (exit code 3)"),
    ],
)
def test_an_answer_that_is_no_declaration_is_the_classs_fault(answer: Any, says: str) -> None:
    stand_in = stand_ins._stand_in(Says(GOOD, answer), "mine:Mine")  # type: ignore[arg-type]
    with pytest.raises(BrokenContract) as raised:
        Declaration.of(stand_in, {})
    assert says in str(raised.value)


@pytest.mark.parametrize(
    "about",
    [{}, None, "x", {**GOOD, "strategy": 3}, {**GOOD, "more": 1}, {**GOOD, "strategy": ""}],
)
def test_a_class_that_says_nothing_sound_of_itself_is_broken(about: Any) -> None:
    with pytest.raises(registry.BrokenImplementation, match="mine:Mine"):
        stand_ins._stand_in(Says(about), "mine:Mine")  # type: ignore[arg-type]


def test_refusals_are_told_as_such() -> None:
    raised = stand_ins.Raised("Refused", "option 'x' = 3", "Refused()")
    stand_in = stand_ins._stand_in(Says(GOOD, raised), "mine:Mine")  # type: ignore[arg-type]
    with pytest.raises(Refused, match="option 'x' = 3"):
        Declaration.of(stand_in, {"x": 3})
