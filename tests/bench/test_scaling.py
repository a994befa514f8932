"""Scaling: efficiencies recovered from simulated times, scenario files, refusals, real runs.

No test here asserts an absolute time, or which efficiency a real machine reaches.
"""

from __future__ import annotations

import json
import math
import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import typer
from commands import here, started

from shardproof.bench import compared, session, stats
from shardproof.bench.command import time_budget
from shardproof.bench.evidence import load_times, write_times
from shardproof.bench.leader_tasks import Answer
from shardproof.bench.lines import CellLine, Interval, MeasuredCell
from shardproof.bench.scaling import judge, matrix, tables
from shardproof.bench.session import cell_launch
from shardproof.bench.sides import files, kind_of
from shardproof.bench.subjects import CELL_BLOCKS, ORDER, PLAIN, SCALING, Cell, Room
from shardproof.commands.verify import verify
from shardproof.compare.snapshot import Version
from shardproof.errors import InputError, SelectionError
from shardproof.registry.declaration import Declaration
from shardproof.runs.run_folder import RunFolder, read
from shardproof.scenarios import load

pytestmark = pytest.mark.usefixtures("brief_sessions")

ROOT = Path(__file__).parents[2]
STRONG = ROOT / "scenarios" / "scaling" / "strong.yaml"
WEAK = STRONG.with_name("weak.yaml")
VERSION = Version("0", "0")
#: Log-ratio SD of a block, as in tests/bench/test_timing.py.
SD = 0.10
SMALL = """\
name: small
about: two systems that take no time
mode: {mode}
target: 0.8
workload: {{name: charnames_gpt, params: {{layers: 1}}, {batch}: 8}}
optimizer: sgd
backends: {backend}
worlds: {worlds}
blocks: 3
implementations: {systems}
"""


def small(
    folder: Path,
    mode: str = "strong",
    worlds: Sequence[int] = (2,),
    systems: str = "[reference/ddp]",
    backend: str = "gloo",
) -> Path:
    """A scenario that is measured in seconds."""
    batch = "global_batch" if mode == "strong" else "batch_per_rank"
    path = folder / f"{mode}.yaml"
    path.write_text(
        SMALL.format(mode=mode, batch=batch, worlds=list(worlds), systems=systems, backend=backend)
    )
    return path


def simulated(
    efficiency: float,
    wrapping: float = 1.1,
    world: int = 2,
    mode: str = "strong",
    blocks: int = CELL_BLOCKS,
    sd: float = SD,
    seed: int = 0,
) -> list[stats.TimedStep]:
    """Raw times: a machine that drifts, ``world`` ranks at ``efficiency`` against the plain T1."""
    rng = np.random.default_rng(seed)
    factor = {
        "plain": 1.0,
        "wrapped": wrapping,
        "ranks": 1 / (efficiency * (world if mode == "strong" else 1)),
    }
    rows: list[stats.TimedStep] = []
    for block in range(blocks):
        machine = math.exp(rng.normal(0, 0.3))  # met by all sides alike
        own = {"plain": 0.0, "wrapped": 0.0, "ranks": rng.normal(0, sd)}
        for segment, side in enumerate(ORDER):
            for step in range(2):
                for rank in range(world if side == "ranks" else 1):
                    slower = 1 - 0.001 * rank
                    where = (block % 2, SCALING, block, segment, side, step, rank)
                    seconds = machine * factor[side] * math.exp(own[side]) * slower
                    rows.append(stats.TimedStep(*where, seconds))
    return rows


# ---------------------------------------------------------------------------------- statistics


@pytest.mark.parametrize("mode", ["strong", "weak"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_a_known_efficiency_is_recovered(mode: str, world: int) -> None:
    figures = judge.judge(simulated(0.83, 1.25, world, mode, sd=0.0), mode, world)
    assert figures.efficiency is not None and figures.wrapping is not None
    assert figures.efficiency["plain"].ratio == pytest.approx(0.83)
    assert figures.efficiency["wrapped"].ratio == pytest.approx(0.83 * 1.25)
    assert figures.wrapping.ratio == pytest.approx(1.25)
    assert figures.blocks == CELL_BLOCKS and figures.launches == 2
    assert set(figures.median_seconds) == {"plain", "wrapped", "ranks"}


def against_plain(seed: int) -> Interval:
    """A simulated efficiency of 0.8."""
    efficiency = judge.judge(simulated(0.8, seed=seed), "strong", 2).efficiency
    assert efficiency is not None
    return efficiency["plain"]


def test_the_interval_covers_the_truth_in_95_of_100() -> None:
    intervals = [against_plain(seed) for seed in range(400)]
    covered = sum(each.low <= 0.8 <= each.high for each in intervals) / len(intervals)
    assert 0.92 <= covered <= 0.98


def test_a_target_that_is_just_met_is_rarely_called_held_or_missed() -> None:
    verdicts = [judge.verdict(against_plain(seed), 0.8) for seed in range(400)]
    assert verdicts.count("inconclusive") >= 0.92 * len(verdicts)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.81, 0.9, "holds"),
        (0.8, 0.9, "holds"),
        (0.7, 0.79, "below"),
        (0.7, 0.8, "inconclusive"),
        (0.79, 0.95, "inconclusive"),
    ],
)
def test_verdicts(low: float, high: float, expected: str) -> None:
    assert judge.verdict(Interval(ratio=0.8, low=low, high=high, half_width=0.1), 0.8) == expected


def test_blocks_that_were_cut_off_do_not_count() -> None:
    rows = simulated(0.9, blocks=4)
    last = [row for row in rows if row.block == 3]
    for missing in (
        [row for row in last if row.segment == 5],
        [row for row in last if row.rank == 1],
    ):
        cut = [row for row in rows if row not in missing]
        assert judge.judge(cut, "strong", 2).blocks == 3
    alone = judge.judge([row for row in rows if row.block == 0], "strong", 2)
    assert alone.blocks == 1 and alone.efficiency is None


# --------------------------------------------------------------------------- lines and the table


def line_of(cell: Cell, room: int, rows: Sequence[stats.TimedStep], **more: Any) -> dict[str, Any]:
    """A line as :func:`evidence.result` has it, judged."""
    sides = ("plain", "wrapped", "ranks")
    line: dict[str, Any] = {
        "kind": "scaling",
        "id": cell.id,
        "mode": cell.mode,
        "implementation": cell.system.implementation,
        "backend": cell.backend,
        "world": cell.world,
        "target": cell.target,
        "cell": cell.to_dict(),
        "room": {"ranks": room, "of": "physical cores", "threads": 1},
        "problem": None,
        "losses": {side: [2.0, 1.9] for side in sides},
        "targets_per_step": dict.fromkeys(sides, 256),
        "seconds": 1.0,
        "mesh": {"replicate": cell.world},
        "strategy": "ddp",
        "probed": None,
        "peak_bytes": None,
    }
    judged = judge.conclude(MeasuredCell.model_validate(line | more), rows).to_dict()
    stored: dict[str, Any] = json.loads(json.dumps(line | more | judged))
    return stored


def cells(path: Path = STRONG, system: str = "reference/ddp") -> dict[int, Cell]:
    """World -> cell of one system."""
    return {cell.world: cell for cell in matrix.read([path]) if cell.title == system}


def test_more_ranks_than_cores_are_refused_and_modelled() -> None:
    rows = simulated(0.9)
    found = [line_of(cell, 2, rows) for cell in cells().values()]
    told = {line["world"]: line for line in found}
    for line in found[1:]:
        line["modelled"] = {"world": line["world"], "efficiency": 1 / line["world"]}
    assert told[2]["verdict"] == "holds" and told[2]["efficiency"]["plain"]["low"] > 0.8
    for world in (4, 8, 1024):
        assert told[world]["verdict"] == "oversubscribed"
        assert told[world]["efficiency"] is None and "ranks" not in told[world]["median_seconds"]
        assert f"{world} ranks, 2 physical cores" in told[world]["reason"]
    lines = [CellLine.model_validate(line) for line in found]
    table = tables.table(lines)
    table_rows = table.texts
    assert len(table_rows) == 2 and all(len(row) == len(table.headings) for row in table_rows)
    assert table_rows[1][3] == "4 to 1,024" and "25.0% at 4" in table_rows[1][7]
    assert re.fullmatch(r"[\d.]+% \[[\d.]+%, [\d.]+%\]", table_rows[0][5]), "E has one unit"
    assert len(tables.table(lines, tables.NARROW).texts[0]) == len(tables.NARROW)
    modelled = tables.modelled_table(lines)
    assert "1,024" in modelled.headings
    assert [len(row) for row in modelled.rows] == [len(modelled.headings)]
    # With a core for every rank nothing is refused.
    assert line_of(cells()[4], 4, simulated(0.5, world=4))["verdict"] == "below"


def test_sides_that_do_not_train_the_same_have_no_efficiency() -> None:
    rows, cell = simulated(0.9), cells()[2]
    alike = {"plain": [2.0, 1.9], "wrapped": [2.0, 1.9], "ranks": [2.0, 1.9]}
    assert line_of(cell, 2, rows, losses=alike)["verdict"] == "holds"
    told = line_of(cell, 2, rows, losses=alike | {"ranks": [2.0, 1.8]})
    assert told["verdict"] == "fail" and "2 ranks" in told["reason"]
    # In weak scaling N ranks see another batch: that is no fault.
    weak = line_of(cells(WEAK)[2], 2, simulated(0.9, mode="weak"), losses=alike | {"ranks": [1.0]})
    assert weak["verdict"] == "holds"


@pytest.mark.parametrize("path", [STRONG, WEAK], ids=["strong", "weak"])
def test_times_without_losses_have_figures_and_no_verdict(path: Path) -> None:
    """Ctrl-C in the first launch leaves blocks, and nobody knows what the ranks trained."""
    cell = cells(path)[2]
    told = line_of(cell, 2, simulated(0.95, mode=cell.mode), losses={})
    assert told["efficiency"]["plain"]["low"] > 0.8 and told["trained_alike"] is None
    assert told["verdict"] == "inconclusive" and "is not known" in told["reason"]
    assert not compared._of_cell(CellLine.model_validate(told), VERSION).samples
    known = line_of(cell, 2, simulated(0.95, mode=cell.mode))
    assert known["verdict"] == "holds" and known["trained_alike"] is True
    assert compared._of_cell(CellLine.model_validate(known), VERSION).samples
    # What is refused claims nothing of times.
    refused = line_of(cells(path)[64], 2, simulated(0.95, mode=cell.mode), losses={})
    assert refused["verdict"] == "oversubscribed"


def test_an_open_interval_says_how_many_blocks_it_takes() -> None:
    told = line_of(cells()[2], 2, simulated(0.8, sd=0.2))
    assert told["verdict"] == "inconclusive" and "blocks give a half-width" in told["reason"]
    few = line_of(cells()[2], 2, simulated(0.9, blocks=1))
    assert few["verdict"] == "inconclusive" and "at least 2 whole blocks" in few["reason"]


def test_exit_codes() -> None:
    from shardproof.bench.command.measuring import exit_code
    from shardproof.bench.command.options import FailOn

    def told(*words: str) -> list[CellLine]:
        return [CellLine.model_construct(verdict=word) for word in words]

    assert exit_code(told("holds", "oversubscribed"), ()) == 0
    assert exit_code(told("below", "oversubscribed"), ()) == 0
    assert exit_code(told("below"), [FailOn.goal]) == 1
    assert exit_code(told("oversubscribed"), ()) == 3
    assert exit_code(told("holds", "inconclusive"), ()) == 3
    assert exit_code(told("holds", "crash"), ()) == 1
    assert exit_code([], ()) == 3


# ------------------------------------------------------------------------------ scenario files


def test_shipped_scenarios_state_mode_and_base_and_reach_1024_ranks() -> None:
    found = matrix.read([STRONG, WEAK])
    assert len({cell.id for cell in found}) == len(found)
    assert {cell.mode for cell in found} == {"strong", "weak"}
    assert {cell.target for cell in found} == {0.8}
    for path in (STRONG, WEAK):
        worlds = cells(path)
        assert min(worlds) == 2 and max(worlds) == 1024
        for world, cell in worlds.items():
            grows = world if cell.mode == "weak" else 1
            assert cell.workload.global_batch == cell.base.global_batch * grows
            assert Cell.from_dict(json.loads(json.dumps(cell.to_dict()))) == cell
    assert cells()[1024].samples(1024) == 1 and cells()[8].samples(8) == 4
    assert cells(WEAK)[8].samples(8) == 32


@pytest.mark.parametrize(
    ("old", "new", "line", "told"),
    [
        ("mode: strong", "mode: strnog", 6, "strong"),
        ("target: 0.8", "traget: 0.8", 8, "target"),
        ("target: 0.8", "target: 1.8", 8, "less than or equal to 1"),
        ("size: 1m", "size: 2m", 9, "20m"),
        ("global_batch: 32", "batch_per_rank: 32", 9, "workload.global_batch"),
        ("backends: [gloo]", "backends: [glue]", 11, "gloo"),
        ("worlds: [2, 4,", "worlds: [4, 2,", 12, "ascending"),
        ("worlds: [2, 4,", "worlds: [1, 4,", 12, "must be 2 or more"),
        ("  - reference/zero1", "  - reference/zreo1", 15, "reference/zero1"),
        ("label: views, ", "", 19, "label"),
        ("base: [plain, wrapped]", "base: [plain]", 7, "both base cases"),
    ],
)
def test_faults_of_a_scaling_scenario_have_a_line(
    tmp_path: Path, old: str, new: str, line: int, told: str
) -> None:
    text = STRONG.read_text()
    assert old in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(old, new))
    with pytest.raises(InputError, match=told) as caught:
        matrix.read([path])
    assert f"mine.yaml:{line}:" in str(caught.value)


def test_a_file_says_what_it_is(tmp_path: Path) -> None:
    speed = ROOT / "scenarios" / "speed" / "data-parallel.yaml"
    assert kind_of(STRONG) == kind_of(WEAK) == "scaling"
    assert kind_of(speed) == "speed"
    assert not kind_of(STRONG.with_name("bubble.yaml"))
    assert not kind_of(tmp_path / "absent.yaml")
    for name in ("strong", "scaling/strong", str(STRONG)):
        assert [path.resolve() for path in files([name])] == [STRONG]
    own = {"strong.yaml", "weak.yaml", "cluster-strong.yaml", "cluster-weak.yaml", "mpi.yaml"}
    own |= {"long-sequences.yaml", "divided-experts.yaml"}
    assert {path.name for path in files(["scaling"])} == own
    with pytest.raises(SelectionError, match="did you mean strong"):
        files(["storng"])


def test_judging_leaves_timed_files_to_bench(tmp_path: Path) -> None:
    folder = ROOT / "scenarios" / "scaling"
    assert [file.name for file in load.find([str(folder)])] == ["bubble"]
    for name in ("strong", "scaling/strong", str(STRONG)):
        with pytest.raises(InputError, match=r"shardproof bench .*strong"):
            load.find([name])
    with pytest.raises(SelectionError, match=r"shardproof bench .*speed"):
        load.find([str(ROOT / "scenarios" / "speed")])


def test_commands_know_timed_files() -> None:
    done = here("check-scenario", str(STRONG), str(STRONG.with_name("bubble.yaml")))
    assert done.returncode == 0 and "strong, 70 cells" in done.stdout, done.stderr
    listed = here("list", "scenarios").stdout.splitlines()
    assert {"scaling/strong", "scaling/weak", "speed/data-parallel", "bubble"} <= set(listed)
    schema = json.loads(here("schema", "scaling").stdout)
    assert "mode" in schema["required"] and schema["title"] == "Shardproof scaling"
    done = here("bench", "scaling/weak", "-k", "zero3 and ::2::", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["scaling::weak::reference/zero3::gloo::2::charnames_gpt+1m"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("strong", "data-parallel"), "speed and scaling scenarios are mixed"),
        (("strong", "-k", "nothing_like_it"), "matches no cell"),
        (("strong", "--backend", "glue"), "gloo"),
        (("strong", "--world", "1"), "1 rank is always timed, as the base"),
        (("strong", "--param", "layers=1"), "--param is not an option of `bench scaling`"),
        (("strong", "--fail-on", "slower"), "does not apply to scaling"),
        (("strong", "--fail-on", "goal", "--fail-on", "slower"), "write --fail-on goal"),
        (("strong", "--blocks", "2", "--launches", "3"), "at most one launch per block"),
    ],
)
def test_bad_input_names_what_is_valid(arguments: tuple[str, ...], told: str) -> None:
    from typer.testing import CliRunner

    from shardproof.commands.main import app

    outcome = CliRunner().invoke(app, ["bench", *arguments, "--dry-run"])
    assert isinstance(outcome.exception, InputError), outcome.output
    assert told in str(outcome.exception)


def test_an_option_of_another_command_is_refused_and_says_whose_it_is(command: Any) -> None:
    """Every command of ``bench`` has just the options that mean something to it."""
    from shardproof.bench.command import app

    group: Any = typer.main.get_command(app)
    flags = {
        name: {o.opts[0] for o in each.params if o.opts[0].startswith("-")} - {"--help"}
        for name, each in group.commands.items()
    }
    assert set(flags) == {"pair", "speed", "scaling", "checkpoint", "collectives"}
    for name, own in flags.items():
        for flag in set().union(*flags.values()) - own:
            having = [other for other, theirs in flags.items() if flag in theirs]
            code, _, told = command("bench", name, flag, "4")
            assert code == 2 and f"{flag} is not an option of `bench {name}`" in told, (name, flag)
            assert all(f"`bench {other}`" in told for other in having), (name, flag)


def test_a_dry_run_tells_what_fits_into_the_budget(tmp_path: Path) -> None:
    from shardproof.runs.durations import Durations

    durations = Durations(tmp_path / "durations.json")
    group = session.in_order([item(cell, 4) for cell in cells().values()])
    for measured in group[:2]:
        cell = measured.subject
        durations.note(f"{cell.id}::{cell.blocks}x{cell.launches}", 40.0)

    def chosen(minutes: float) -> tuple[list[session.Measured], float]:
        schedule = time_budget.choose(group, durations, minutes)
        assert len(schedule.chosen) + len(schedule.left_out) == len(group)
        return schedule.chosen, schedule.seconds

    assert chosen(2.0) == (group, 80.0)
    # Worlds beyond the machine are modelled from 4 ranks, which do not fit.
    assert chosen(1.0) == (group[:1], 40.0)
    assert chosen(0.5) == ([], 0.0)
    done = here("bench", str(small(tmp_path, worlds=(2, 64))), "--dry-run", "--budget", "0.01")
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert "0 cells, about 0 s, 2 left out by the budget" in done.stderr


def test_options_change_cells() -> None:
    found = matrix.with_worlds(matrix.read([WEAK]), [3])
    assert {cell.world for cell in found} == {3} and len(found) == 7
    assert {cell.workload.global_batch for cell in found} == {96}


# -------------------------------------------------------------------------------- what fits here


def item(cell: Cell, room: int) -> session.Measured:
    return session.Measured(cell, room=Room(room, "physical cores"))


def test_the_largest_world_that_fits_explains_those_that_do_not() -> None:
    group = session.in_order([item(cell, 4) for cell in cells().values()])
    assert [m.subject.world for m in group[:2]] == [2, 4]
    assert [m.timed for m in group] == [True, True, *[False] * 8]
    assert all(m.source is group[1] for m in group[2:])
    # On one core a single rank is timed, and every world is modelled from it.
    group = session.in_order([item(cell, 1) for cell in cells().values()])
    assert [m.timed for m in group] == [True, *[False] * 9]
    assert all(m.refused and m.source is group[0] for m in group)


def test_systems_without_a_data_axis_are_told_so() -> None:
    cell = cells()[2]

    def declared(axes: tuple[str, ...], max_world: int | None) -> session.Measured:
        measured, says = session.Measured(cell), Declaration(axes=axes, max_world=max_world)
        session.declare(measured, {"ranks": Answer(says)}, gpus=None)
        return measured

    told = declared(("pipe",), None)
    assert told.problem == ("precondition", "reference/ddp: has no data axis, only pipe")
    told = declared(("shard",), 1)
    assert told.problem is not None and "world sizes up to 1" in told.problem[1]
    told = declared(("replicate", "shard"), 8)
    assert told.problem is None and told.meshes == {"ranks": {"shard": 2}}


def test_two_threads_of_a_core_are_one_physical_core(monkeypatch: pytest.MonkeyPatch) -> None:
    from shardproof.bench.model import physical_cores as machine

    monkeypatch.setattr(machine, "by_core", lambda: [[0, 4], [1, 5], [2]])
    assert machine.physical_cores() == 3
    monkeypatch.setattr(machine, "by_core", lambda: None)  # a kernel that tells nothing
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 64)
    monkeypatch.setattr(machine, "cores", lambda: 2)
    assert machine.physical_cores() == 2


def test_the_plain_program_is_an_implementation() -> None:
    from shardproof import registry

    registry.check(PLAIN)
    launch = cell_launch(cells()[2], {"replicate": 2}, 0, [0], together=True)
    assert launch.sides["plain"].side.implementation == PLAIN
    assert launch.sides["plain"].first_rank_only and not launch.sides["ranks"].first_rank_only


# --------------------------------------------------------------------------------- whole sessions


def test_a_session_leaves_evidence_that_verifies(tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = here("bench", str(small(tmp_path, worlds=(2, 64))), "--results", str(run))
    assert done.returncode in (0, 3), done.stdout + done.stderr
    found = {line["world"]: line for line in read(run).others["scaling"]}
    two = found[2]
    room = two["room"]["ranks"]
    assert (two["verdict"] == "oversubscribed") == (room < 2)
    if room >= 2:
        assert two["verdict"] in ("holds", "below", "inconclusive")
        assert two["blocks"] == 3 and two["efficiency"]["wrapped"]["log"]["blocks"] == 3
        assert set(two["losses"]) == {"plain", "wrapped", "ranks"}
        assert two["targets_per_step"] == {"plain": 128, "wrapped": 128, "ranks": 128}
        made, alone = two["modelled"], two["median_seconds"]["plain"]
        assert made["efficiency"] == pytest.approx(alone / (2 * made["step_seconds"]))
    assert found[64]["verdict"] == "oversubscribed" and found[64]["efficiency"] is None
    assert found[64]["times"] == two["times"] and found[64]["measured_in"] == two["id"]
    assert "oversubscribed" in done.stdout and "reference/ddp" in done.stdout
    told = verify(run)
    assert not told.problems and sum(told.others.values()) == 2
    table_again = here("report", str(run), "--format", "markdown").stdout
    assert "| strong | reference/ddp | gloo | 2 |" in table_again

    rows = load_times(run / two["times"])
    rows = [replace(row, seconds=3 * row.seconds) if row.side == "plain" else row for row in rows]
    forged: Any = SimpleNamespace(path=run, write=lambda n, data: (run / n).write_bytes(data))
    write_times(forged, two["id"], rows)
    problems = verify(run).problems
    assert any("was changed" in problem for problem in problems)
    assert any("raw times give" in problem for problem in problems)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "in_memory"])
def test_every_system_of_the_shipped_scenarios_scales_somehow(backend: str, tmp_path: Path) -> None:
    names = {(c.system.implementation, c.label): c for c in matrix.read([STRONG])}
    systems = json.dumps(
        [
            {"implementation": name, **({"label": label} if label else {}), "options": options}
            for (name, label), options in ((k, dict(c.system.options)) for k, c in names.items())
        ]
    )
    path = small(tmp_path, "weak", systems=systems, backend=backend)
    run = tmp_path / "run"
    few = ("--blocks", "2", "--launches", "1")
    done = here("bench", str(path), *few, "--results", str(run))
    assert done.returncode in (0, 3), done.stdout + done.stderr
    told = {line["cell"]["system"]["implementation"]: line for line in read(run).others["scaling"]}
    assert set(told) == {name for name, _ in names}
    assert {line["verdict"] for line in told.values()} <= {"holds", "below", "inconclusive"}
    assert not verify(run).problems


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ("--blocks", "4000", "--results", str(run))
    with started("bench", str(small(tmp_path)), *more) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if "/4000 blocks in" in text and " 0/4000" not in text:
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(60) == 130
    assert "stopped: 1 of 1 cells" in rest
    (line,) = read(run).others["scaling"]
    assert 0 < line["blocks"] < 4000 and not verify(run).problems
    if line["verdict"] != "oversubscribed":
        assert (line["verdict"], line["trained_alike"]) == ("inconclusive", None)


def test_what_does_not_fit_into_the_budget_is_left_out_by_name(tmp_path: Path) -> None:
    run = tmp_path / "run"
    more = ("--budget", "0.01", "--results", str(run))
    done = here("bench", str(small(tmp_path, worlds=(2, 64))), *more)
    assert done.returncode == 3, done.stdout + done.stderr
    assert done.stdout.count("left out by the budget: scaling::small::reference/ddp") == 2
    assert len(read(run).left_out) == 2 and not read(run).others and not verify(run).problems


def test_a_budget_leaves_figures_of_an_earlier_invocation(tmp_path: Path) -> None:
    run, path = tmp_path / "run", small(tmp_path)
    with RunFolder(run, ["shardproof", "bench"]) as folder:
        (cell,) = matrix.read([path])
        folder.add(line_of(cell, 2, simulated(0.9)), "scaling")
    done = here("bench", str(path), "--budget", "0.01", "--results", str(run))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "left out by the budget" in done.stdout
    assert len(read(run).others["scaling"]) == 1 and not read(run).left_out
    with RunFolder(run, ["shardproof", "bench"]) as folder:  # a failure of before is not hidden
        folder.add(read(run).others["scaling"][0] | {"verdict": "crash"}, "scaling")
    done = here("bench", str(path), "--budget", "0.01", "--results", str(run))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "(kept: crash)" in done.stdout


def test_a_system_that_raises_is_a_crash_with_its_sentence(tmp_path: Path) -> None:
    (tmp_path / "falls.py").write_text(
        "from shardproof.impls.pytorch.ddp import PyTorchDDP\n"
        "class Falls(PyTorchDDP):\n"
        "    def step(self, batch, observe):\n"
        "        raise OverflowError('on purpose')\n"
    )
    path = small(tmp_path, worlds=(2, 4), systems="['falls:Falls']")
    done = here("bench", str(path), "--results", "run", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    told = {line["world"]: line for line in read(tmp_path / "run").others["scaling"]}
    assert told[2]["verdict"] == "crash" and "OverflowError: on purpose" in told[2]["reason"]
    assert told[4]["verdict"] in ("oversubscribed", "crash")
    assert not verify(tmp_path / "run").problems
