"""Input that cannot be used is a ``ValueError`` that says what to write instead."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plain_loop import LOSS, batches, loader, model, samples
from torch import nn

import shardproof
from shardproof import Training
from shardproof.backends import BACKENDS
from shardproof.impls.reference.checkpoint.errors import CheckpointWarning
from shardproof.training import places
from shardproof.training.world import World


def made(data: Any = None, **kind: Any) -> Training:
    return Training(model(), LOSS, data or loader(), **kind).backend("in_memory")


def on(ranks: int, program: Callable[[World], Any]) -> list[Any]:
    return places.run(BACKENDS["in_memory"], ranks, program, timeout=60.0)


#: What is done -> what the error says.
NUMBERS: list[tuple[Callable[[], object], str]] = [
    (lambda: made().run(0), "steps = 0: give a whole number of at least 1"),
    (lambda: made().run("10"), "steps = '10': give a whole number"),  # type: ignore[arg-type]
    (lambda: made().run(1.5), "steps = 1.5: give a whole number"),  # type: ignore[arg-type]
    (lambda: made().run(True), "steps = True: give a whole number"),
    (lambda: made().run(1, ranks=0), "ranks = 0: give a whole number of at least 1"),
    (lambda: made().run(1, progress=-1), "progress = -1: give a whole number of at least 0"),
    (lambda: made().strategy("ddp", accumulate=0), "accumulate = 0: give"),
    (lambda: made().optimizer("adamw", clip=0), "clip = 0: give a number above 0"),
    (lambda: made().optimizer("adamw", lr="0.1"), "lr = '0.1': give a number"),  # type: ignore[arg-type]
    (lambda: made().optimizer("adamw", warmup=-1), "warmup = -1: give"),
    (lambda: made().optimizer("adamw", weight_decay="0.1"), "weight_decay = '0.1': give a number"),
    (lambda: made().backend("gloo", timeout=0), "timeout = 0: give a number above 0"),
    (lambda: made().checkpoint("x", every=-1), "every = -1: give"),
    (lambda: made().checkpoint("x", keep=0), "keep = 0: give"),
    (lambda: made(samples(), batch=0), "batch = 0: give"),
    (lambda: shardproof.join(timeout=-1), "timeout = -1: give a number above 0"),
]
NAMES: list[tuple[Callable[[], object], str]] = [
    (lambda: made().strategy(None), "strategy None is not a name: write a name"),  # type: ignore[arg-type]
    (lambda: made().strategy("fsdp3"), "unknown strategy 'fsdp3'; did you mean fsdp"),
    (lambda: made().strategy("fsdp", precision=None), "unknown precision None; valid: bf16"),  # type: ignore[arg-type]
    (lambda: made().strategy("fsdp", offload="disk"), "'offload' = 'disk'.*valid: none"),
    (lambda: made().backend(3), "unknown backend 3; valid: gloo"),  # type: ignore[arg-type]
    (lambda: made().backend("mpi").run(1, ranks=2), "start the script by mpirun: mpirun -n 2"),
    (lambda: made().checkpoint(""), "checkpoint folder '' is not a path: give"),
    (lambda: made().checkpoint(None), "checkpoint folder None is not a path: give"),  # type: ignore[arg-type]
    (lambda: made().strategy("ddp", [4]), r"mesh = \[4\]: write the number of ranks of each"),  # type: ignore[arg-type]
    (lambda: made().strategy("ddp", {}), "mesh = {}: write the number of ranks.*or leave mesh out"),
    (lambda: made().strategy("ddp", {"dp": 2}), "mesh: unknown axis 'dp'; valid: context"),
    (lambda: made().strategy("fsdp", {"shard": 0}), "'shard' = 0: give a whole number of ranks"),
    (
        lambda: made().optimizer("adamw", betas=0.9),
        "AdamW with .* failed in a trial update.*TypeError",
    ),
    (lambda: made().optimizer("lbfgs"), "LBFGS .*closure.*or the optimizer"),
    (lambda: made().optimizer("sparseadam"), "SparseAdam does not support dense"),
    (lambda: made(units="0"), "units = '0': give a list of module names"),
    (lambda: made(units=["0", "0"]), "units = .*give a list of module names"),
    (lambda: made(units=[""]), "units = .*list of module names"),
    (lambda: made(units=["nothing"]), "the model has no module 'nothing'"),
    (lambda: made(roles={"0": "colum"}), "unknown role 'colum' of '0'; valid: embedding"),  # type: ignore[dict-item]
]


@pytest.mark.parametrize(("wrong", "match"), [*NUMBERS, *NAMES])
def test_what_is_written_wrongly(wrong: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        wrong()


def test_models_that_cannot_be_trained() -> None:
    for wrong, match in (
        (nn.Linear, "is not an instance of nn.Module"),
        (lambda inputs: inputs, "is not an instance of nn.Module"),
        (nn.ReLU(), "no parameter that requires a gradient"),
        (model().requires_grad_(False), "no parameter that requires a gradient"),
        (nn.LazyLinear(3), "has no shape yet: call the model once"),
    ):
        with pytest.raises(ValueError, match=match):
            Training(wrong, LOSS, loader())  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=match):
            on(2, lambda world, w=wrong: shardproof.wrap(w, "zero1"))
    with pytest.raises(ValueError, match=r"CrossEntropyLoss is a class: write CrossEntropyLoss\("):
        Training(model(), nn.CrossEntropyLoss, loader())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="requires no gradient: compute the loss from outputs"):
        Training(model(), lambda o, t: LOSS(o, t).detach(), loader()).backend("in_memory").run(1)


class Shared(nn.Module):
    """Two layers with one weight: it is trained, and stays one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.two.weight = self.one.weight
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.two(torch.tanh(self.one(inputs))))
        return outputs


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp"])
def test_shared_parameters_stay_shared(strategy: str) -> None:
    torch.manual_seed(0)
    plain = Shared()
    own = copy.deepcopy(plain)
    built = Training(own, LOSS, loader()).backend("in_memory").optimizer("adamw", lr=1e-2)
    result = built.strategy(strategy).run(4, ranks=3)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for inputs, targets in batches(4):
        optimizer.zero_grad()
        LOSS(plain(inputs), targets).backward()
        optimizer.step()
    assert own.two.weight is own.one.weight
    for name, value in plain.named_parameters():
        torch.testing.assert_close(result.state[name], value.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp"])
def test_the_state_of_a_loop_has_the_names_that_torch_has(strategy: str) -> None:
    class Buffered(Shared):
        """Besides a weight under two names, a buffer that torch saves and one that it does not."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.ones(2))
            self.register_buffer("derived", torch.ones(2), persistent=False)

    plain = Buffered()
    expected = {name: value.clone() for name, value in plain.state_dict().items()}

    def program(world: World) -> dict[str, torch.Tensor]:
        return shardproof.wrap(copy.deepcopy(plain), strategy).state_dict()

    for state in on(2, program):
        assert list(state) == list(expected)
        assert state["one.weight"] is state["two.weight"]
        for name, value in expected.items():
            assert torch.equal(state[name], value), name
        Buffered().load_state_dict(state)


def test_data_that_is_too_short_or_read_by_all_threads() -> None:
    with pytest.raises(ValueError, match=r"ended after 3 of 9 steps: give a DataLoader or a list"):
        made(iter(batches(3))).run(9, ranks=1)
    with pytest.raises(
        ValueError, match="data is an iterator, and 2 ranks in one process cannot share it"
    ):
        made(iter(batches(3))).run(3, ranks=2)
    built = Training(model(), LOSS, iter(batches(3))).backend("gloo").optimizer("sgd", lr=0.1)
    alone = Training(model(), LOSS, batches(3)).backend("in_memory").optimizer("sgd", lr=0.1)
    assert built.run(3, ranks=2).losses == pytest.approx(alone.run(3).losses, rel=1e-9)


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save(model().state_dict(), file)
    with pytest.raises(ValueError, match="this path is a file, but must be a folder: name another"):
        made().checkpoint(file).run(1)
    folder = tmp_path / "runs"
    made().strategy("zero1").checkpoint(folder).run(4, ranks=2)
    with pytest.raises(
        ValueError,
        match=r"steps = 2, but the checkpoint in .* was saved after 4 steps: .*name a new folder",
    ):
        made().strategy("zero1").checkpoint(folder).run(2, ranks=2)
    with pytest.raises(ValueError, match=r"of another run, but resume is False: name a new folder"):
        made().strategy("zero1").checkpoint(folder, resume=False).run(2, ranks=2)
    other = Training(Shared(), LOSS, loader()).backend("in_memory").checkpoint(folder)
    with pytest.raises(ValueError, match=r"was not saved.*same model"):
        other.run(9, ranks=2)
    with pytest.raises(ValueError, match=r"holds no checkpoint|is not a folder"):
        on(2, lambda world: shardproof.wrap(model(), "ddp").load(tmp_path / "nothing"))


def test_a_checkpoint_of_a_loop_is_no_checkpoint_of_a_training(tmp_path: Path) -> None:
    on(2, lambda world: shardproof.wrap(model(), "zero1").save(tmp_path, step=3))
    with pytest.raises(ValueError, match=r"Training did not save.*by shardproof\.wrap"):
        made().strategy("zero1").checkpoint(tmp_path).run(4, ranks=2)


def test_a_resume_on_other_ranks_warns_once_if_the_model_has_dropout(tmp_path: Path) -> None:
    for share in (0.0, 0.5):
        own = nn.Sequential(nn.Dropout(share), *model())
        built = Training(own, LOSS, loader()).backend("in_memory").strategy("zero1")
        built.checkpoint(tmp_path / f"{share}").run(2, ranks=2)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            built.run(4, ranks=3)
        said = [str(one.message) for one in told if one.category is CheckpointWarning]
        assert len(said) == (share > 0)
        assert all("random states of 2 saved ranks" in one for one in said)


def test_what_wrap_refuses() -> None:
    def wrapped(**how: Any) -> Callable[[World], Any]:
        return lambda world: shardproof.wrap(model(), "zero1", **how)

    for how, match in (
        ({"mesh": 2}, "mesh = 2: write the number of ranks of each axis"),
        ({"mesh": {"tensor": 2}}, "no axis 'tensor' .*: write e.g. mesh="),
        (
            {"weight_decay": 0.1},
            r"argument of the optimizer: write arguments={'weight_decay': 0.1}",
        ),
        ({"arguments": {"beta": 1}}, "takes no argument 'beta'; did you mean betas"),
        ({"accumulate": "2"}, "accumulate = '2': give a whole number"),
        ({"clip": -1.0}, "clip = -1.0: give a number above 0"),
    ):
        with pytest.raises(ValueError, match=match):
            on(2, wrapped(**how))

    def twice(world: World) -> None:
        own = model()
        first = shardproof.wrap(own, "fsdp")
        with pytest.raises(ValueError, match="wrapped already: use the object that"):
            shardproof.wrap(own, "ddp")
        with pytest.raises(ValueError, match="clip = 'a': give a number"):
            first.clip("a")  # type: ignore[arg-type]
        first.close()

    on(2, twice)


def test_a_model_that_torch_distributes_is_refused() -> None:
    def program(world: World) -> None:
        with pytest.raises(ValueError, match="already distributed by torch: pass the plain module"):
            shardproof.wrap(nn.parallel.DistributedDataParallel(model()), "zero1")

    places.run(BACKENDS["gloo"], 1, program, timeout=60.0)


def test_layers_teach() -> None:
    def raised(match: str, program: Callable[[World], Any]) -> None:
        with pytest.raises(ValueError, match=match):
            on(2, program)

    column, vocabulary = shardproof.ColumnParallelLinear, shardproof.VocabularyParallelEmbedding
    attention = shardproof.ParallelSelfAttention
    raised("is not a communicator: give world.comm", lambda world: column(6, 8, group=world))
    raised("is not a communicator: give world.comm", lambda world: column(6, 8, group=None))
    raised("out_features = -2: give a whole", lambda world: column(6, -2, group=world.comm))
    raised("in_features = '6': give", lambda world: column("6", 8, group=world.comm))
    raised(
        "takes an nn.Linear, not a Conv1d", lambda w: column.of(nn.Conv1d(6, 8, 1), group=w.comm)
    )
    raised("takes an nn.Embedding, not a Linear", lambda w: vocabulary.of(nn.Linear(3, 3), w.comm))
    raised("heads = 0: give a whole", lambda w: attention(8, 0, group=w.comm))
    raised("the width 10 is not divisible by 4 heads", lambda w: attention(10, 4, group=w.comm))

    def look_up(token: int) -> Callable[[World], Any]:
        return lambda w: vocabulary(10, 4, group=w.comm)(torch.tensor([0, token]))

    raised("got token 11; valid: 0 to 9", look_up(11))
    raised("got token -1; valid: 0 to 9", look_up(-1))
    raised(r"new_group\(1\): give a list of ranks", lambda w: w.new_group(1))
    raised("mesh = 2: write the number of ranks", lambda w: w.new_mesh(2))


class Sign(torch.optim.Optimizer):
    """An optimizer of a user's own, without the arguments of torch's."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad.sign()


@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3", "fsdp"])
def test_an_optimizer_of_a_users_own_runs_on_shards(strategy: str) -> None:
    plain = model()
    optimizer = Sign(plain.parameters())
    for inputs, targets in batches(3):
        optimizer.zero_grad()
        LOSS(plain(inputs), targets).backward()
        optimizer.step()
    result = made().optimizer(Sign).strategy(strategy).run(3, ranks=3)
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(result.state[name], value, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3", "fsdp"])
def test_the_peak_of_an_own_loop_is_that_of_a_training(strategy: str) -> None:
    expected = made().strategy(strategy).run(2, ranks=2).memory_stats()

    def program(world: World) -> Any:
        wrapped = shardproof.wrap(model(), strategy)
        assert "peak" not in wrapped.memory_stats()
        with wrapped.measured():
            for inputs, targets in batches(2):
                own = [part.chunk(2)[world.rank] for part in (inputs, targets)]
                LOSS(wrapped(own[0]), own[1]).backward()
                wrapped.step()
        with pytest.raises(ValueError, match="run forward, backward and step"), wrapped.measured():
            pass
        return wrapped.memory_stats()

    kinds = ("parameters", "gradients", "optimizer_state", "communication")
    for got, wanted in zip(on(2, program), expected, strict=True):
        for kind in kinds:
            assert got["peak"].get(kind) == wanted["peak"].get(kind), kind
        assert got["peak"]["activations"] == pytest.approx(wanted["peak"]["activations"], rel=0.3)
        assert got["peak"]["all"] >= got["current"]["all"] > 0


@pytest.mark.parametrize(
    ("strategy", "mesh"),
    [
        ("pytorch/hybrid", {"pipe": 1, "tensor": 2}),
        ("pytorch/tensor_parallel", {"tensor": 2}),
    ],
)
def test_a_plain_model_gets_a_remedy_where_names_of_layers_decide(
    strategy: str, mesh: dict[str, int]
) -> None:
    built = made().backend("gloo").strategy(strategy, mesh, accumulate=2)
    with pytest.raises(ValueError, match=r"choose pytorch/tensor_plan .* or reference/tensor with"):
        built.run(1)


def test_the_pipeline_of_picotron_refuses_a_model_whose_width_it_cannot_read() -> None:
    from shardproof.impls.ecosystem.picotron_pipeline import PicotronPipeline

    # Before it calls picotron, so this needs no checkout of it.
    with pytest.raises(ValueError, match=r"this model has no parameter 'embed.position.weight'"):
        PicotronPipeline().shard(model())


def test_a_missing_package_is_told_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    built = made().strategy("ecosystem/accelerate_ddp")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="ddp: the optional package 'accelerate' is not installed"):
        built.run(1, ranks=1)


def test_buffers_that_no_rank_returns_are_refused() -> None:
    built = Training(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)), LOSS, loader())
    with pytest.raises(ValueError, match="does not return buffers such as"):
        built.backend("in_memory").strategy("async_sgd").run(1, ranks=2)


def test_a_system_of_processes_is_refused_on_threads() -> None:
    pytest.importorskip("deepspeed")
    with pytest.raises(ValueError, match="zero1 runs on gloo only: choose the backend gloo"):
        made().strategy("deepspeed/zero1").run(1, ranks=2)
