"""An oracle in a process of its own, where ranks use GPUs."""

from __future__ import annotations

import os

import pytest
import torch
from made_case import made_case

from shardproof.oracle import apart
from shardproof.oracle.truth import Truth
from shardproof.registry.declaration import BrokenContract

ON_GPUS = made_case("reference/ddp", {"replicate": 2}, backend="gloo_cuda")
ON_CPU = made_case("reference/ddp", {"replicate": 2}, backend="gloo")


def _here() -> Truth:
    return Truth(initial={"w": torch.arange(3.0)}, updates=os.getpid())


def test_beside_gpus_a_child_trains() -> None:
    truth = apart.trained(ON_GPUS, _here)
    assert truth.updates != os.getpid() and torch.equal(truth.initial["w"], torch.arange(3.0))
    assert apart.trained(ON_CPU, _here).updates == os.getpid()


def test_what_the_child_raises_is_raised() -> None:
    def broken() -> Truth:
        raise BrokenContract("emulate() gave nothing")

    with pytest.raises(BrokenContract, match=r"^emulate\(\) gave nothing$"):
        apart.trained(ON_GPUS, broken)


class Odd(RuntimeError):
    """It cannot be made anew from its arguments."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__(f"{place}: {what}")


def test_what_cannot_travel_is_told_in_its_words() -> None:
    def broken() -> Truth:
        raise Odd("emulate()", "gave nothing")

    with pytest.raises(RuntimeError, match=r"^Odd\('emulate\(\): gave nothing'\)$"):
        apart.trained(ON_GPUS, broken)


def test_a_child_that_dies_is_told() -> None:
    with pytest.raises(RuntimeError, match="the reference run ended with exit code 7"):
        apart.trained(ON_GPUS, lambda: os._exit(7))
