"""Machines: what is written of them, and how this one is measured."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from commands import here

from shardproof.errors import MachineError, SelectionError
from shardproof.simulate import machines
from shardproof.simulate.machines import Link

NAMED = ("a100", "h100", "h200", "b200")


def test_the_named_machines_are_those_of_the_data_sheets() -> None:
    assert {*machines.machines()} == {*NAMED}
    dense = {name: machines.machine(name).peak("bfloat16") / 1e12 for name in NAMED}
    assert dense == {"a100": 312.0, "h100": 989.4, "h200": 989.4, "b200": 2250.0}
    gb = {name: machines.machine(name).memory / 1e9 for name in NAMED}
    assert gb == {"a100": 80.0, "h100": 80.0, "h200": 141.0, "b200": 180.0}


@pytest.mark.parametrize("name", NAMED)
def test_what_is_reached_is_no_more_than_the_data_sheet_says(name: str) -> None:
    one = machines.machine(name)
    shares = one.matrix_share, one.attention_share, one.bandwidth_share
    assert all(0.3 < share < 1 for share in shares)
    assert one.inter.bandwidth < one.intra.bandwidth and one.inter.latency > one.intra.latency
    # A dtype without a figure of its own is computed with as float32 is.
    assert one.peak("bfloat16") > one.peak("float32") == one.peak("complex64") > 0


def test_an_operator_takes_as_long_as_its_arithmetic_or_its_memory() -> None:
    """By hand: 1 TFLOP/s of which half is reached, 100 GB/s of which a fifth."""
    one = replace(machines.machine("a100"), flops={"float32": 1e12}, matrix_share=0.5,
                  attention_share=0.25, bandwidth=1e11, bandwidth_share=0.2)  # fmt: skip
    assert one.seconds(1e12, 0, "float32") == 2.0
    assert one.seconds(1e12, 0, "float32", is_attention=True) == 4.0
    assert one.seconds(1e12, 1e11, "float32") == 5.0
    assert one.seconds(0, 2e10, "float32") == 1.0


def test_an_unknown_machine_is_refused_with_the_nearest() -> None:
    with pytest.raises(SelectionError, match=r"unknown machine \(h10\) - did you mean h100"):
        machines.machine("h10")
    with pytest.raises(SelectionError, match=r"a node needs at least 1 rank \(-1\) - give"):
        machines.machine("h100", -1)
    assert machines.machine("h100", 4).node == 4 and machines.machine("h100").node == 8


def test_the_link_here_is_the_median_of_the_backends_own_collectives() -> None:
    def row(algorithm: str, alpha: float, rate: float) -> dict[str, Any]:
        return {"algorithm": algorithm, "alpha us": alpha, "1/beta GB/s": rate}

    rows = [row("backend", 10, 4), row("ring", 1, 9), row("backend", 30, 2), row("backend", 20, 3)]
    assert machines.link_of({"tables": [{"rows": rows}]}) == Link(3e9, 20e-6)
    with pytest.raises(MachineError, match="no collective was timed - name another machine"):
        machines.link_of({"tables": [{"rows": rows[1:2]}]})


def test_this_machine_is_measured() -> None:
    """A core does between 1 GFLOP/s and 10 TFLOP/s; load can hide what a link takes."""
    done = here("bench", "collectives", "--world", "2", "--rounds", "1", "--algorithm", "ring",
                "--bytes", "4KiB", "--bytes", "1MiB", "--no-progress", "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    try:
        link = machines.link_of(json.loads(done.stdout))
    except MachineError as error:
        assert "name another machine" in str(error)
        pytest.skip("the load of this machine hid every collective")
    assert link.latency > 0 and link.bandwidth > 0
    rates = machines._rates(1)
    assert 1e9 < rates["float32"] < 1e13 and 1e8 < rates["bandwidth"] < 1e13
    assert 1e-7 < rates["gap"] < 0.1
