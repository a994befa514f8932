"""``shardproof bench collectives``: what is timed, what is made of it, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardproof import report
from shardproof.bench import collective_times
from shardproof.bench.collective_times import BACKEND, Timed, by_size, over_backend, summary
from shardproof.bench.collectives import OPERATIONS, SIZES, Request
from shardproof.bench.command.collectives_plan import parse_sizes
from shardproof.bench.drawings import bandwidth
from shardproof.errors import SelectionError
from shardproof.registry import collectives as own
from shardproof.runs.run_folder import read


def timed(operation: str, algorithm: str, seconds: dict[int, list[float]], world: int = 4) -> Timed:
    by_bytes = {str(size): times for size, times in seconds.items()}
    name = f"collectives::{operation}::{algorithm}"
    return Timed(name, operation, algorithm, "gloo", world, 0, by_bytes)


def test_sizes_go_from_4_bytes_to_64_mib() -> None:
    assert (SIZES[0], SIZES[-1], len(SIZES)) == (4, 64 * 2**20, 13)
    assert parse_sizes(["16MiB", "4", "64KiB", "4"]) == (4, 65536, 16 * 2**20)
    assert parse_sizes([]) == SIZES


def test_the_backends_own_stand_beside_every_operation() -> None:
    systems = Request().systems
    assert [s for s in systems if s[1] == BACKEND] == [(each, BACKEND) for each in OPERATIONS]
    assert len(systems) == 4 + 5 + 3  # hierarchical needs to know the nodes
    assert ("all_reduce", "hierarchical") in Request(world=4, ranks_per_node=2).systems
    assert Request(algorithms=("rabenseifner",)).systems == [
        ("all_reduce", BACKEND),
        ("all_reduce", "rabenseifner"),
    ]


def test_bandwidths_are_those_of_nccl_tests() -> None:
    factors = {
        operation: timed(operation, "ring", {4: [1.0]}).factor()
        for operation in ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    }
    assert factors == {
        "all_reduce": 1.5,  # 2 (N-1)/N with 4 ranks
        "reduce_scatter": 0.75,
        "all_gather": 0.75,
        "broadcast": 1.0,
    }
    (row,) = by_size([timed("all_reduce", "ring", {2_000_000: [0.002, 0.001, 0.003]})]).rows
    assert row[4:7] == ("2,000.0", "1.0000", "1.5000")  # the median; 1 GB/s, times 1.5


@pytest.mark.parametrize("name", ["ring", "recursive_doubling", "rabenseifner"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_a_fit_finds_the_alpha_and_beta_that_made_the_times(name: str, world: int) -> None:
    alpha, beta = 25e-6, 1 / 2e9
    shape = timed("all_reduce", name, {size: [1.0] for size in SIZES}, world)
    made = {}
    for size in SIZES:
        rounds, sent = shape.cost(size)
        made[size] = [alpha * rounds + beta * sent] * 3
    found = timed("all_reduce", name, made, world).fit()
    assert found == pytest.approx((alpha, beta), rel=1e-6)


def test_ratios_pair_the_rounds() -> None:
    """A machine that is three times slower in one round changes no ratio."""
    base = timed("all_reduce", BACKEND, {4: [1.0, 3.0, 1.0]})
    ring = timed("all_reduce", "ring", {4: [1.2, 3.6, 1.2]})
    assert over_backend(ring, [base, ring], 4) == pytest.approx(1.2)
    assert over_backend(ring, [ring], 4) is None


def test_the_drawing_has_a_line_and_a_name_for_each_algorithm() -> None:
    lines = [
        timed("all_reduce", name, {4: [1e-4], 2**20: [1e-2]})
        for name in (BACKEND, "ring", "rabenseifner")
    ]
    ((heading, image),) = bandwidth.panels(lines)
    assert heading == "all_reduce on gloo, 4 ranks"
    for number, line in enumerate(lines):
        assert f'class="w-{number}"' in image and line.algorithm in image
    assert len(summary(lines).rows) == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--algorithm", "rign"], "unknown algorithm (rign) - did you mean ring?"),
        (["--algorithm", "hierarchical"], "hierarchical needs full nodes: 2 ranks, 0 per node"),
        (["--world", "3", "--ranks-per-node", "2"], "give --ranks-per-node a divisor of --world"),
        (["--world", "1"], "1 rank sends nothing"),
        (["--bytes", "6"], "--bytes: this is not a valid size (6)"),
        (["--backend", "glo"], "unknown backend (glo) - did you mean gloo?"),
        (["--backend", "gloo_cuda"], "cannot send from one rank to another"),
        (["--goal", "2"], "--goal is not an option of `bench collectives`"),
    ],
)
def test_bad_input_ends_with_2_and_a_remedy(command: Any, options: list[str], says: str) -> None:
    code, _, errors = command("bench", "collectives", *options)
    assert code == 2 and says in errors


def test_options_of_collectives_belong_to_nothing_else(command: Any) -> None:
    code, _, errors = command("bench", "data-parallel", "--algorithm", "ring")
    assert code == 2 and "or use `bench collectives`" in errors


def test_an_algorithm_that_cannot_serve_the_world_is_refused() -> None:
    with pytest.raises(SelectionError, match="full nodes"):
        Request(world=6, algorithms=(own.HIERARCHICAL,), ranks_per_node=4).check()
    Request(world=6, algorithms=(own.HIERARCHICAL,), ranks_per_node=3).check()


def test_a_dry_run_names_what_would_be_timed(command: Any) -> None:
    code, out, _ = command("bench", "collectives", "--dry-run", "--algorithm", "ring")
    assert code == 0 and "collectives::all_gather::ring::gloo::world2" in out.splitlines()


@pytest.mark.launches
def test_times_end_in_the_report(command: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ["--bytes", "4", "--bytes", "4KiB", "--rounds", "2", "--backend", "in_memory"]
    code, out, errors = command("bench", "collectives", *options, "--results", str(folder))
    assert code == 0, out + errors
    run = read(folder)
    lines = collective_times.of(run)
    assert [(line.operation, line.algorithm) for line in lines] == Request().systems
    for line in lines:
        assert all(len(times) == 2 and min(times) > 0 for times in line.seconds.values())
        assert [*line.seconds] == ["4", "4096"]
    assert "Bus bandwidth of all_reduce on in_memory, 2 ranks" in report.html(run)
    assert "## Collectives" in report.document(run)
    code, out, _ = command("verify", str(folder))
    assert code == 0 and "12 measured collectives read" in out
    code, out, _ = command("report", str(folder))
    assert code == 0 and "rabenseifner" in out
