"""A load takes all or nothing, on all ranks alike; what has no place is told or refused."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import checkpoints
import pytest
import torch
from checkpoints import ADAMW, held, make, put_together, saved, train, workload
from local_ranks import succeed, threads
from pieces import Rows
from torch import Tensor, nn

from shardproof import registry
from shardproof.comm import Mesh
from shardproof.contract import Kind, OptimizerSpec, Refused, ScalerSpec, is_outer
from shardproof.impls.reference.checkpoint.agreement import State
from shardproof.impls.reference.checkpoint.contents import Contents
from shardproof.impls.reference.checkpoint.errors import CheckpointError, CheckpointWarning
from shardproof.impls.reference.checkpoint.loading import Loading
from shardproof.impls.reference.checkpoint.reading.checkpoint import Checkpoint
from shardproof.impls.reference.checkpoint.reading.reshape import Read
from shardproof.impls.reference.checkpoint.root import newest
from shardproof.impls.reference.checkpoint.sharded import Sharded
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.state import aliases_of, named_state
from shardproof.impls.reference.engine.state import draws as module_draws
from shardproof.workloads import Workload

pytestmark = pytest.mark.usefixtures("one_thread")


def last(root: Path) -> Path:
    found = newest(root)
    assert found is not None
    return found


def read_by(reader: type[Checkpoint], system: Engine) -> None:
    """Let ``reader`` read what ``system`` loads."""
    system.saves().loading_type = type("Loads", (Loading,), {"reader_type": reader})


def refused(system: Engine, path: Path) -> str:
    """What is said, and that nothing of ``system`` changed."""
    before, steps = held(system), system.steps_done
    with pytest.raises(CheckpointError) as error:
        system.load(path)
    after = held(system)
    assert steps == system.steps_done and system.loaded is None
    assert before.keys() == after.keys()
    for kind, rows in before.items():
        assert [row["name"] for row in rows] == [row["name"] for row in after[kind]], kind
        for row, again in zip(rows, after[kind], strict=True):
            assert torch.equal(row["tensor"], again["tensor"])
    return str(error.value)


# ---------------------------------------------------------------------------------- all or nothing


@pytest.mark.parametrize("trained", [0, 1], ids=["fresh", "used"])
def test_damage_that_one_rank_sees_is_refused_by_all(trained: int, tmp_path: Path) -> None:
    work = workload(layers=1)
    saved(tmp_path, "zero3", {"shard": 2}, 2, work=work)
    file = sorted(last(tmp_path).glob("rank-00001.safetensors"))[0]
    data = bytearray(file.read_bytes())
    data[-9] ^= 4
    file.write_bytes(data)

    def body(rank: int, world: int) -> str:
        system = make("zero3", work, {"shard": 2}, rank)
        train(system, work, 0, trained)
        return refused(system, tmp_path)

    said = succeed(body, 2)
    assert said[0] == said[1] and "were changed since they were written (rank 1)" in said[0]


def test_a_file_that_one_rank_cannot_open(tmp_path: Path) -> None:
    work = workload(layers=1)
    saved(tmp_path, "zero1", {"shard": 2}, 2, work=work)

    class Unreadable(Checkpoint):
        @classmethod
        def open(cls, path: Path) -> Any:
            raise PermissionError(13, "Permission denied", str(path))

    def body(rank: int, world: int) -> str:
        system = make("zero1", work, {"shard": 2}, rank)
        if rank == 1:
            read_by(Unreadable, system)
        return refused(system, tmp_path)

    said = succeed(body, 2)
    assert said[0] == said[1] and "Permission denied (rank 1)" in said[0]


def test_all_ranks_load_what_the_first_one_found(tmp_path: Path) -> None:
    """Another checkpoint became the newest while they looked."""
    work = workload(layers=1)
    saved(tmp_path, "ddp", {"replicate": 2}, 1, work=work)
    first = last(tmp_path).name

    class Before(Loading):
        def find(self) -> str:
            return first

    def body(rank: int, world: int) -> int:
        system = make("ddp", work, {"replicate": 2}, rank)
        system.load(tmp_path)
        train(system, work, 1, 2)
        system.save(tmp_path, {})
        system = make("ddp", work, {"replicate": 2}, rank)
        if rank == 0:
            system.saves().loading_type = Before
        system.load(tmp_path)
        return system.steps_done

    assert succeed(body, 2) == [1, 1]
    assert last(tmp_path).name != first


def test_a_disk_that_dies_after_the_check_says_that_the_system_is_spoilt(tmp_path: Path) -> None:
    work = workload(layers=1)
    saved(tmp_path, "zero3", {"shard": 2}, 2, work=work)

    class Dies(Checkpoint):
        def fill(self, target: Tensor, reads: Sequence[Read]) -> None:
            raise OSError(5, "Input/output error", "rank-00000.safetensors")

    def body(rank: int, world: int) -> str:
        system = make("zero3", work, {"shard": 2}, rank)
        if rank == 1:
            read_by(Dies, system)
        with pytest.raises(CheckpointError) as error:
            system.load(tmp_path)
        return str(error.value)

    said = succeed(body, 2)
    assert said[0] == said[1] and "the checkpoint was undamaged when this load started" in said[0]
    assert "call setup again" in said[0]


def test_any_error_of_one_rank_ends_the_load_on_all(tmp_path: Path) -> None:
    work = workload(layers=1)
    saved(tmp_path, "zero3", {"shard": 2}, 2, work=work)

    class Breaks(Checkpoint):
        def check(self, reads: Sequence[Read]) -> None:
            raise MemoryError("no more of it")

    def body(rank: int, world: int) -> str:
        system = make("zero3", work, {"shard": 2}, rank)
        if rank == 1:
            read_by(Breaks, system)
        return refused(system, tmp_path)

    said = succeed(body, 2)
    assert said[0] == said[1] and "MemoryError was raised: no more of it (rank 1)" in said[0]


# -------------------------------------------------------------------------------- another model


def test_names_that_this_model_does_not_have_are_refused(tmp_path: Path) -> None:
    big, small = workload(layers=4), workload(layers=2)
    saved(tmp_path / "big", "ddp", {"replicate": 2}, 2, work=big)
    saved(tmp_path / "small", "ddp", {"replicate": 2}, 2, work=small)

    def body(rank: int, world: int) -> tuple[str, str]:
        mesh = {"pipe": world}
        one = refused(make("pipeline", small, mesh, rank), tmp_path / "big")
        return one, refused(make("pipeline", big, mesh, rank), tmp_path / "small")

    bigger, smaller = succeed(body, 2)[0]
    assert "has the parameter 'blocks.2" in bigger and "more), which this system does" in bigger
    assert "the parameter 'blocks.2" in smaller and "was not saved" in smaller


class Changed:
    """A build whose module is changed before anybody sees it."""

    def __init__(self, work: Workload, rank: int, change: Callable[[nn.Module], None]) -> None:
        self.build, self.change = work.build_for(rank), change

    def __call__(self, device: str = "cpu") -> nn.Module:
        module = self.build(device)
        self.change(module)
        return module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.build, name)


def changed(work: Workload, rank: int, change: Callable[[nn.Module], None]) -> Engine:
    """DDP over two ranks, of a model that is ``change``-d."""
    system: Engine = registry.load("reference/ddp")()  # type: ignore[assignment]
    build = Changed(work, rank, change)
    state = named_state(build()) if rank == 0 else None
    system.setup(build, state, ADAMW, Mesh({"replicate": 2}), {})
    return system


def untie(module: nn.Module) -> None:
    for name in aliases_of(module):
        owner, _, own = name.rpartition(".")
        tensor = module.get_parameter(name).detach().clone()
        setattr(module.get_submodule(owner), own, nn.Parameter(tensor))


def test_tied_and_untied_weights_are_named(tmp_path: Path) -> None:
    work = workload("tied", layers=1)
    saved(tmp_path / "tied", "ddp", {"replicate": 2}, 2, work=work)
    with Checkpoint.open(tmp_path / "tied") as checkpoint:
        ((alias, first),) = checkpoint.manifest.about.aliases.items()

    def body(rank: int, world: int) -> tuple[str, str]:
        untied = changed(work, rank, untie)
        one = refused(untied, tmp_path / "tied")
        train(untied, work, 0, 1)
        untied.save(tmp_path / "untied", {})
        return one, refused(make("ddp", work, {"replicate": 2}, rank), tmp_path / "untied")

    from_tied, from_untied = succeed(body, 2)[0]
    assert (
        f"{alias!r} was not saved; when the checkpoint was saved, it was tied to {first!r}"
        in from_tied
    )
    assert f"has the parameter {alias!r}" in from_untied
    assert f"to {first!r}" in from_untied


def test_a_slot_of_what_is_not_trained_here_is_refused(tmp_path: Path) -> None:
    work = workload(layers=1)
    saved(tmp_path, "ddp", {"replicate": 2}, 2, work=work)

    def freeze(module: nn.Module) -> None:
        next(module.parameters()).requires_grad_(False)

    def body(rank: int, world: int) -> str:
        return refused(changed(work, rank, freeze), tmp_path)

    assert "has optimizer state" in succeed(body, 2)[0]


def test_another_mesh_or_strategy_is_refused_on_request(tmp_path: Path) -> None:
    work = workload(layers=1)
    saved(tmp_path, "zero1", {"shard": 2}, 2, work=work)
    strict = {"reshape": False}

    def same(rank: int, world: int) -> int:
        system = make("zero1", work, {"shard": 2}, rank, checkpoint=strict)
        system.load(tmp_path)
        return system.steps_done

    def other(rank: int, world: int) -> str:
        strategy = "zero1" if world == 3 else "zero2"
        system = make(strategy, work, {"shard": world}, rank, checkpoint=strict)
        return refused(system, tmp_path)

    assert succeed(same, 2) == [2, 2]
    for world, words in (
        (3, "but this system is zero1 on {'shard': 3}"),
        (2, "but this system is zero2 on"),
    ):
        said = succeed(other, world)[0]
        assert f"was saved by zero1 on {{'shard': 2}}, {words}" in said
        assert "checkpoint: {reshape: true}" in said


# --------------------------------------------------------------------------------- what is told


def notes_of(
    root: Path, spec: OptimizerSpec, world: int = 2, *traits: str
) -> tuple[tuple[str, ...], list[str]]:
    """Notes of the first rank, and warnings of all."""

    def body(rank: int, ranks: int) -> tuple[str, ...]:
        work = workload(*traits, layers=1)
        system = make("zero1", work, {"shard": ranks}, rank, spec)
        system.load(root)
        assert system.loaded is not None
        return system.loaded.notes

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CheckpointWarning)
        notes = succeed(body, world)[0]
    said = [str(one.message) for one in caught if one.category is CheckpointWarning]
    return notes, said


def test_what_differs_is_told_by_one_rank(tmp_path: Path) -> None:
    saved(tmp_path, "zero1", {"shard": 2}, 2, work=workload(layers=1))
    assert notes_of(tmp_path, ADAMW) == ((), [])
    other = dataclasses.replace(ADAMW, lr=5.0, betas=(0.1, 0.2), weight_decay=0.0)
    notes, said = notes_of(tmp_path, other)
    assert notes == (
        "lr was 0.01 at the save and is 5.0 here; the value of this system is used",
        "betas was [0.9, 0.95] at the save and is [0.1, 0.2] here; the value of this system is "
        "used",
        "weight_decay was 0.1 at the save and is 0.0 here; the value of this system is used",
    )
    assert said == [f"{last(tmp_path)}: {note}" for note in notes]


def test_loss_scaling_of_only_one_side_is_told(tmp_path: Path) -> None:
    scaled = dataclasses.replace(ADAMW, scaler=ScalerSpec(initial=8.0))
    for name, spec in (("with", scaled), ("without", ADAMW)):
        saved(tmp_path / name, "zero1", {"shard": 2}, 2, spec=spec, work=workload(layers=1))
    assert notes_of(tmp_path / "with", scaled)[0] == ()
    assert notes_of(tmp_path / "with", ADAMW)[0] == (
        "losses were scaled when the checkpoint was saved, and are not scaled here",
    )
    assert notes_of(tmp_path / "without", scaled)[0] == (
        "losses were not scaled when the checkpoint was saved, and are scaled here",
    )
    finer = dataclasses.replace(ADAMW, scaler=ScalerSpec(initial=8.0, interval=5))
    assert '"interval": 5' in notes_of(tmp_path / "with", finer)[0][0]


def test_random_states_of_single_ranks_are_left_out_elsewhere_and_told(tmp_path: Path) -> None:
    drawing = "dropout_stateful"
    saved(tmp_path, "zero1", {"shard": 2}, 2, work=workload(drawing, layers=1))
    notes, said = notes_of(tmp_path, ADAMW, 3, drawing)
    assert notes == (
        "the random states of 2 saved ranks were not loaded, because fewer ranks load than saved: "
        "dropout will draw different masks",
    )
    assert len(said) == 1


def test_random_states_that_no_module_uses_are_left_out_in_silence(tmp_path: Path) -> None:
    saved(tmp_path, "zero1", {"shard": 2}, 2, work=workload(layers=1))
    assert notes_of(tmp_path, ADAMW, 3) == ((), [])


class Attention(nn.Module):
    """As many keep the share of a dropout that their forward calls as a function."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.attention_dropout = share


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (nn.Linear(2, 2), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)), False),
        (nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), True),
        (nn.AlphaDropout(0.5), True),
        (nn.TransformerEncoderLayer(4, 2, 8), True),
        (nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0), False),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.LSTM(2, 2, 2, dropout=0.1), True),
        (nn.RReLU(), True),
        (Attention(0.1), True),
        (Attention(0.0), False),
    ],
)
def test_what_draws_random_numbers(module: nn.Module, draws: bool) -> None:
    assert module_draws(module) is draws


def test_the_manifest_says_who_saved_with_what(tmp_path: Path) -> None:
    policy = {"parameters": "bfloat16", "reduce": "float32"}

    def body(rank: int, world: int) -> None:
        system = make("zero1", workload(layers=1), {"shard": 2}, rank, precision=policy)
        train(system, workload(layers=1), 0, 1)
        system.save(tmp_path, {}).wait()

    succeed(body, 2)
    with Checkpoint.open(tmp_path) as checkpoint:
        about = checkpoint.manifest.about
    assert about.precision == {"parameters": "torch.bfloat16", "reduce": "torch.float32"}
    assert about.versions["torch"] == torch.__version__ and "shardproof" in about.versions


def test_frozen_parameters_are_taken_from_who_computes_with_them(tmp_path: Path) -> None:
    """ZeRO-1 holds them whole, as they are computed with; ZeRO-3 shards them as they were built.
    Without a policy of precision they would be computed with as built, and that nobody saved.
    """
    policy, work = {"parameters": "bfloat16", "reduce": "float32"}, workload("frozen", layers=1)

    def save(rank: int, world: int) -> dict[str, Rows]:
        system = make("zero1", work, {"shard": 2}, rank, precision=policy)
        train(system, work, 0, 1)
        system.save(tmp_path, {}).wait()
        return held(system)

    def load(rank: int, world: int) -> tuple[dict[str, Rows], set[str]]:
        system = make("zero3", work, {"shard": 3}, rank, precision=policy)
        system.load(tmp_path)
        return held(system), system.frozen

    there, loaded = put_together(succeed(save, 2)), succeed(load, 3)
    here, (frozen, *_) = put_together([state for state, _ in loaded]), [f for _, f in loaded]
    assert frozen
    for name in frozen:
        assert there["parameters"][name].dtype == torch.bfloat16
        assert torch.equal(there["parameters"][name].float(), here["parameters"][name])

    def refused(rank: int, world: int) -> None:
        with pytest.raises(
            CheckpointError, match="use the precision with which the checkpoint was saved"
        ):
            make("zero3", work, {"shard": 3}, rank).load(tmp_path)

    succeed(refused, 3)


# ------------------------------------------------------------------------ state of single ranks


@pytest.mark.parametrize("form", checkpoints.FORMATS)
def test_generators_of_modules_come_back(form: str, tmp_path: Path) -> None:
    """Dropout that draws from a generator in its module goes on as if it had never stopped."""
    work, mesh = workload("dropout_stateful", layers=1), {"replicate": 2}
    saved(tmp_path, "ddp", mesh, 2, form, work=work)

    def straight(rank: int, world: int) -> dict[str, Rows]:
        system = make("ddp", work, mesh, rank)
        train(system, work, 0, 4)
        return held(system)

    def resumed(rank: int, world: int) -> dict[str, Rows]:
        system = make("ddp", work, mesh, rank)
        system.load(tmp_path)
        assert system.loaded is not None and not system.loaded.notes
        train(system, work, 2, 4)
        return held(system)

    expected = put_together(succeed(straight, 2))
    for kind, tensors in put_together(succeed(resumed, 2)).items():
        for name, tensor in tensors.items():
            assert torch.equal(tensor, expected[kind][name]), f"{kind} {name}"


@pytest.mark.parametrize(
    ("saver", "own", "loader", "others", "kept"),
    [
        ("ddp", {"replicate": 2}, "zero3", {"shard": 2}, True),
        ("ddp", {"replicate": 2}, "hybrid", {"replicate": 2, "tensor": 1}, True),
        ("ddp", {"replicate": 2}, "tensor", {"tensor": 2}, False),
        ("zero1", {"shard": 2}, "pipeline", {"pipe": 2}, False),
        ("tensor", {"tensor": 2}, "ddp", {"replicate": 2}, False),
        ("pipeline", {"pipe": 2}, "zero3", {"shard": 2}, False),
        ("hybrid", {"shard": 2, "tensor": 2}, "hybrid", {"pipe": 2, "shard": 2}, False),
    ],
)
def test_generators_stay_where_a_rank_has_the_same_data(
    saver: str,
    own: dict[str, int],
    loader: str,
    others: dict[str, int],
    kept: bool,
    tmp_path: Path,
) -> None:
    """Tensor ranks would else draw apart: each from what another share of the batch drew."""
    work = workload("dropout_stateful")
    saved(tmp_path, saver, own, 2, work=work)

    def body(rank: int, world: int) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
        system = make(loader, work, others, rank)

        def states() -> dict[str, Tensor]:
            found = Contents(system).generators().items()
            return {n: g.get_state() for n, g in found if not n.startswith("torch@")}

        before = states()
        system.load(tmp_path)
        assert system.loaded is not None
        left = [name for name in system.loaded.left_out if "generator@" in name]
        return before, states(), len(left)

    for before, after, left in succeed(body, math.prod(others.values())):
        assert all(torch.equal(before[n], after[n]) != kept for n in before)
        assert (left == 0) == kept


def test_a_generator_that_was_not_saved_is_told(tmp_path: Path) -> None:
    work = workload(layers=1)
    saved(tmp_path, "ddp", {"replicate": 2}, 2, work=work)

    def draw(module: nn.Module) -> None:
        module.source = torch.Generator()  # type: ignore[assignment]

    def body(rank: int, world: int) -> tuple[str, ...]:
        system = changed(work, rank, draw)
        system.load(tmp_path)
        assert system.loaded is not None
        return system.loaded.notes

    assert succeed(body, 2)[0] == ("the checkpoint has no state for these generators: source@0",)


def test_state_of_the_reducer_is_named_extra_state(tmp_path: Path) -> None:
    work, compress = workload(layers=1), {"method": "onebit"}

    def kept(system: Engine) -> dict[str, Tensor]:
        return {piece.name: piece.tensor.clone() for piece in system.reducer.pieces()}

    def save(rank: int, world: int) -> dict[str, Tensor]:
        system = make("ddp", work, {"replicate": 2}, rank, compress=compress)
        train(system, work, 0, 2)
        system.save(tmp_path, {}).wait()
        assert kept(system)
        return kept(system)

    def load(rank: int, world: int) -> dict[str, Tensor]:
        system = make("ddp", work, {"replicate": 2}, rank, compress=compress)
        train(system, work, 0, 1)  # what it has is replaced
        system.load(tmp_path)
        assert system.loaded is not None and not system.loaded.left_out
        return kept(system)

    def without(rank: int, world: int) -> tuple[str, ...]:
        system = make("ddp", work, {"replicate": 2}, rank)
        system.load(tmp_path)
        assert system.loaded is not None
        return system.loaded.left_out

    before, after = succeed(save, 2), succeed(load, 2)
    both = {name for state in before for name in state}
    with Checkpoint.open(tmp_path) as checkpoint:
        assert set(checkpoint.names("extra")) == both
        assert not [name for name in checkpoint.names("optimizer") if "@" in name]
    for rank in range(2):
        assert before[rank].keys() == after[rank].keys()
        assert all(torch.equal(e, after[rank][n]) for n, e in before[rank].items())
    assert [set(names) for names in succeed(without, 2)] == [both, both]


# --------------------------------------------------------------------------- the outer optimizer

#: Strategy, mesh and options, and the slots of its outer optimizer.
OUTER: list[tuple[str, dict[str, int], dict[str, Any], list[str]]] = [
    ("zero2", {"shard": 2}, {}, []),
    ("local_sgd", {"replicate": 2}, {"every": 1}, []),
    ("diloco", {"replicate": 2}, {"every": 1, "outer_momentum": 0}, ["outer_start"]),
    ("diloco", {"replicate": 2}, {"every": 1}, ["outer_momentum", "outer_start"]),
]


@pytest.mark.parametrize("loads", OUTER)
@pytest.mark.parametrize("saves", OUTER)
def test_an_outer_optimizer_begins_anew_where_none_was_saved(
    saves: tuple[Any, ...], loads: tuple[Any, ...], tmp_path: Path
) -> None:
    """Of every parameter, one that was never used included; and nobody else wants it."""
    work, spec = workload("unused", layers=1), OptimizerSpec("sgd", lr=0.1)

    def state(system: Engine, kind: Kind) -> dict[str, Tensor]:
        return {p.name: p.tensor.clone() for p in system.local_state(kind)}

    def body(rank: int, world: int) -> None:
        one, other = (
            make(n, work, mesh, rank, spec, **more) for n, mesh, more, _ in (saves, loads)
        )
        train(one, work, 0, 1)
        train(other, work, 0, 2)  # what it has is replaced
        one.save(tmp_path, {}).wait()
        other.load(tmp_path)
        assert other.loaded is not None
        parameters, saved, have = (
            state(other, "parameters"),
            *(
                {name: t for name, t in state(system, "optimizer").items() if is_outer(name)}
                for system in (one, other)
            ),
        )
        assert sorted(have) == sorted(
            f"{n}.{slot}" for n in other.handle.reduced() for slot in loads[3]
        )
        for full, tensor in have.items():
            name, _, slot = full.rpartition(".")
            anew = parameters[name] if slot == "outer_start" else torch.zeros_like(tensor)
            assert torch.equal(tensor, saved.get(full, anew)), full
        assert sorted(n for n in other.loaded.left_out) == sorted(saved.keys() - have.keys())
        begun = " or ".join(slot for slot in loads[3] if slot not in saves[3])
        what = f"the checkpoint has no {begun} of any parameter"
        said = f"{what}: the outer optimizer starts without state"
        assert (said in other.loaded.notes) == bool(begun)

    succeed(body, 2)


def test_ranks_that_parted_are_loaded_by_their_own_strategy_alone(tmp_path: Path) -> None:
    """An outer optimizer that begins where a rank of local SGD is begins elsewhere on each."""
    work, mesh = workload(layers=1), {"replicate": 2}

    def body(rank: int, world: int) -> str:
        parted = make("local_sgd", work, mesh, rank, every=8)
        train(parted, work, 0, 1)
        parted.save(tmp_path, {}).wait()
        return refused(make("diloco", work, mesh, rank, every=8), tmp_path)

    assert "load with the same strategy on" in succeed(body, 2)[0]


def test_ranks_that_parted_save_no_loss_scale(tmp_path: Path) -> None:
    """Each has its own, and a checkpoint has one: it would be rank 0's."""
    work, spec = workload(layers=1), OptimizerSpec("sgd", lr=0.1, scaler=ScalerSpec(initial=64.0))

    def body(rank: int, world: int) -> None:
        parted = make("local_sgd", work, {"replicate": 2}, rank, spec, every=8)
        train(parted, work, 0, 1)
        with pytest.raises(Refused, match="cannot be saved with a loss scaler: each rank has its"):
            parted.save(tmp_path, {})

    succeed(body, 2)
    assert not [*tmp_path.iterdir()]


# ------------------------------------------------------------------------------- layout in memory


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("strategy", "axis"), [*checkpoints.AXES.items(), ("local_sgd", "replicate")]
)
def test_loaded_state_lies_in_memory_like_that_of_who_saved(
    strategy: str, axis: str, optimizer: Literal["sgd", "adamw"], tmp_path: Path
) -> None:
    """Other strides, another kernel, another last bit; gradients of buckets are contiguous."""
    work, spec = workload("non_contiguous", layers=2), OptimizerSpec(optimizer, lr=0.1)

    def strides(system: Engine) -> dict[str, tuple[int, ...]]:
        return {p.name: p.tensor.stride() for p in system.local_state("optimizer")}

    def body(rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
        straight, fresh = (make(strategy, work, {axis: 2}, rank, spec) for _ in range(2))
        train(straight, work, 0, 1)
        straight.save(tmp_path, {}).wait()
        fresh.load(tmp_path)
        return strides(straight), strides(fresh)

    for trained, loaded in succeed(body, 2):
        assert trained and trained == loaded


def test_a_rank_that_dies_in_a_save_leaves_no_lock_of_a_living_process(tmp_path: Path) -> None:
    """The other rank's collective fails; it removes the attempt, and the next job may save."""
    work = workload(layers=1)

    def body(rank: int, world: int) -> None:
        system = make("zero1", work, {"shard": 2}, rank)
        train(system, work, 0, 1)
        if rank == 1:
            system.saves().sharded_type = Dying
        system.save(tmp_path, {})

    class Dying(Sharded):
        def save(self, state: State) -> Path:
            self.agree(state)
            raise KeyboardInterrupt

    _, raised = threads(body, 2)
    assert all(raised)
    assert not any(tmp_path.iterdir())


def test_a_rank_that_has_not_used_a_parameter_loads_no_state_of_it(tmp_path: Path) -> None:
    """Ranks that train alone: one of them may have moments where others have none yet."""
    work = workload("conditional_by_rank")
    mesh = {"replicate": 2}

    def slots(system: Engine) -> list[str]:
        return sorted(piece.name for piece in system.local_state("optimizer"))

    def saves(rank: int, world: int) -> list[str]:
        system = make("local_sgd", work, mesh, rank, every=8)
        train(system, work, 0, 1)
        system.save(tmp_path, {}).wait()
        return slots(system)

    def loads(rank: int, world: int) -> list[str]:
        system = make("local_sgd", work, mesh, rank, every=8)
        system.load(tmp_path)
        return slots(system)

    saved = succeed(saves, 2)
    assert saved[0] != saved[1], "the trait gives both ranks the same state"
    assert succeed(loads, 2) == saved


def test_ranks_that_train_alone_load_what_was_saved_of_another_copy(tmp_path: Path) -> None:
    """Equal copies share the writing, so a name may have been saved of copy 1 alone."""
    work = workload()

    def saves(rank: int, world: int) -> None:
        system = make("ddp", work, {"replicate": 2}, rank)
        train(system, work, 0, 1)
        system.save(tmp_path, {}).wait()

    def loads(rank: int, world: int) -> list[str]:
        system = make("local_sgd", work, {"replicate": 1}, rank)
        system.load(tmp_path)
        return [piece.name for piece in system.local_state("optimizer")]

    succeed(saves, 2)
    (loaded,) = succeed(loads, 1)
    with Checkpoint.open(last(tmp_path)) as saved:
        assert {tuple(saved.copies["optimizer", name]) for name in loaded} == {(0,), (1,)}
        assert sorted(loaded) == saved.names("optimizer")
