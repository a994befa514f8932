"""The pipeline: a backward in two parts, any schedule on rank threads, ties, refusals, memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from local_ranks import succeed
from torch import Tensor, nn

from shardproof import workloads
from shardproof.backends.disturbances import Disturbances
from shardproof.case import WorkloadSpec
from shardproof.comm import Mesh
from shardproof.contract import KINDS, OptimizerSpec, Point, Refused
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.pipeline import Options, ReferencePipeline
from shardproof.impls.reference.pipeline.executor import forwards
from shardproof.impls.reference.pipeline.split_backward import SplitBackward
from shardproof.impls.reference.pipeline.stages import cut
from shardproof.oracle import training
from shardproof.schedules import Action, problems
from shardproof.workloads import TRAITS, Workload, suggested_groups

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES: tuple[Any, ...] = ("gpipe", "1f1b", "zb_h1", "zb_h2")
SGD, CLIPPED = OptimizerSpec(), OptimizerSpec(clip_norm=0.05)
BOUND = 1e-12


def work(*traits: str, layers: int = 4, **values: Any) -> Workload:
    sizes = {"width": 8, "heads": 2, "seq": 8, "layers": layers} | values.pop("params", {})
    return workloads.make(
        WorkloadSpec("charnames_gpt", traits, **({"global_batch": 14} | values), params=sizes)
    )


class Traced(ReferencePipeline):
    """Keeps what it computes; asks ``look`` after each action."""

    look: Callable[[Traced, Action], None] | None = None

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.trace = self.note  # type: ignore[assignment]

    @contextmanager
    def note(self, action: Action) -> Iterator[None]:
        yield
        self.actions.append(action)
        if self.look:
            self.look(action)


def drive(
    workload: Workload,
    spec: OptimizerSpec,
    rank: int,
    world: int,
    options: dict[str, Any],
    kind: type[ReferencePipeline] = ReferencePipeline,
    steps: int = 2,
) -> dict[str, Any]:
    """One rank: what it held at every point of every step, what it lost, and how it evaluates."""
    system = kind()
    state = workload.state() if rank == 0 else None
    system.setup(workload.build_for(rank), state, spec, Mesh({"pipe": world}), options)
    record: dict[str, Any] = {"steps": [], "system": system}
    for step in range(steps):
        seen: dict[str, Any] = {}

        def observe(point: Point, seen: dict[str, Any] = seen) -> None:
            for what in KINDS:
                pieces = system.local_state(what)
                seen[f"{point} {what}"] = {p.name: (p.tensor.clone(), p.replica) for p in pieces}

        (batch,) = workload.batch(step, 1)
        result = system.step(batch, observe)
        record["steps"].append(seen | {"loss": result.loss, "norm": result.norm})
    record["evaluated"] = system.evaluate(batch)
    record["training"] = {part.training for part in system.module.modules()}
    record["full"] = system.full_state("parameters")
    system.close()
    return record


def compare(records: list[dict[str, Any]], truth: dict[str, Any], exact: bool) -> None:
    """Every rank's tensors against the oracle's; together they are all of them."""
    for step, true in enumerate(truth["steps"]):
        for moment, wanted in (
            ("gradients_final gradients", true["gradients"]),
            ("after_update parameters", true["parameters"]),
            ("after_update optimizer", true["optimizer"]),
            ("after_update buffers", true["buffers"][0]),
        ):
            found = set()
            for record in records:
                for name, (tensor, _) in record["steps"][step][moment].items():
                    found.add(name)
                    assert tensor.shape == wanted[name].shape
                    if exact:
                        assert torch.equal(tensor, wanted[name]), (step, moment, name)
                    else:
                        scale = max(float(wanted[name].norm()), 1e-6)
                        assert float((tensor - wanted[name]).norm()) <= BOUND * scale, name
            assert found == set(wanted), (step, moment)
        known = [r["steps"][step]["loss"] for r in records if r["steps"][step]["loss"] is not None]
        (loss,) = known
        assert float(loss) == pytest.approx(true["loss"], rel=1e-13)
        for record in records:
            if record["steps"][step]["norm"] is not None:
                assert float(record["steps"][step]["norm"]) == pytest.approx(
                    float(true["norm"]), rel=1e-12
                )
    for record in records:
        assert record["training"] == {True}
        assert set(record["full"]) == set(truth["steps"][-1]["parameters"])


# ------------------------------------------------------------------------- backward in two parts


class Two(nn.Module):
    """A weight that is used twice, between other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, values: Tensor) -> Tensor:
        return self.shared(torch.tanh(self.shared(torch.tanh(self.first(values)))))


class Odd(nn.Module):
    """Owns a weight beside a child with weights; takes two tensors, one by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

    def forward(self, values: Tensor, also: Tensor) -> Tensor:
        return self.inner(values) * self.scale + also


class Mixed(nn.Module):
    """Owners of all kinds: a table of integers, norms, frozen weights, one that goes unused."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.odd = nn.Embedding(9, 6), nn.LayerNorm(6), Odd()
        self.two, self.unused, self.frozen = Two(), nn.Linear(6, 6), nn.Linear(6, 6)
        self.frozen.weight.requires_grad_(False)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, hidden: Tensor, symbols: Tensor) -> Tensor:
        hidden = self.norm(hidden + self.table(symbols))
        hidden = self.odd(hidden, also=torch.sin(hidden)) + self.conv(hidden)
        return self.two(self.frozen(torch.relu(hidden)))


def test_two_parts_equal_one_backward_bit_for_bit() -> None:
    torch.manual_seed(1)
    module = Mixed().double()
    micros = [
        (torch.randn(3, 4, 6).double(), torch.randint(9, (3, 4)), torch.randn(3, 4, 6).double())
        for _ in range(3)
    ]

    def whole() -> list[Tensor]:
        inputs = []
        for hidden, symbols, gradient in micros:
            hidden = hidden.clone().requires_grad_()
            torch.autograd.backward(module(hidden, symbols), gradient)
            inputs.append(hidden.grad)
        return inputs

    fired: list[str] = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))
    expected, once = whole(), list(fired)
    gradients = {name: p.grad for name, p in module.named_parameters()}
    module.zero_grad()
    fired.clear()
    split = SplitBackward(module)
    queued, found = [], []
    for hidden, symbols, gradient in micros:
        hidden = hidden.clone().requires_grad_()
        with split.deferring() as deferred:
            output = module(hidden, symbols)
        torch.autograd.backward(output, gradient)
        found.append(hidden.grad)
        queued.append(deferred)
        assert not fired, "gradients of weights came with those of the input"
    for deferred in queued:
        deferred.backward()
    assert sorted(fired) == sorted(once)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    for name, parameter in module.named_parameters():
        if gradients[name] is None:
            assert parameter.grad is None, name
        else:
            assert torch.equal(parameter.grad, gradients[name]), name
    split.close()
    assert "forward" not in vars(module.norm)


@pytest.mark.parametrize("name", ["charnames_gpt", "digits_cnn", "dyadic_mlp"])
def test_two_parts_of_every_odd_module(name: str) -> None:
    traits = [t for t, about in TRAITS.items() if name in about.applies_to]
    traits = [trait for trait in traits if trait != "overflow_on_one_rank"]
    workload = workloads.make(WorkloadSpec(name, tuple(traits), global_batch=12, micro_batches=3))
    micros = workload.batch(1, 1)[0].micro_batches
    found = []
    for splits in (False, True):
        build = workload.build_for(0)
        module = build()
        workload.load(module)
        split = SplitBackward(module)
        for micro in micros:
            with split.deferring() as deferred:
                if not splits:
                    split.deferred = None
                loss = build.loss(module(micro.inputs), micro)
            loss.backward()
            deferred.backward()
        found.append({n: p.grad for n, p in module.named_parameters()})
    for key, gradient in found[0].items():
        other = found[1][key]
        assert (gradient is None) == (other is None), key
        assert gradient is None or torch.equal(gradient, other), key


def test_a_module_whose_backward_cannot_be_split_says_so() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, values: Tensor) -> tuple[Tensor, Tensor]:
            return values * self.weight, values

    module = Pair()
    split = SplitBackward(module)
    with (
        split.deferring(),
        pytest.raises(TypeError, match="module Pair has weights and returns tuple"),
    ):
        module(torch.ones(3))


# ------------------------------------------------------------------------------- against the oracle


def equal_to_one_process(
    workload: Workload,
    options: dict[str, Any],
    spec: OptimizerSpec = SGD,
    world: int = 2,
    exact: bool = True,
    steps: int = 2,
    kind: type[ReferencePipeline] = ReferencePipeline,
    disturbances: Disturbances | None = None,
) -> list[dict[str, Any]]:
    """What every rank held; it is what one process holds."""
    truth = training.train(workload, spec, 1, steps, "per_rank").to_dict()
    records = succeed(
        lambda rank, size: drive(workload, spec, rank, size, options, kind, steps),
        world,
        disturbances=disturbances,
    )
    compare(records, truth, exact)
    return records


@pytest.mark.parametrize("micro_batches", [1, 2, 4, 10])
@pytest.mark.parametrize("schedule", [*SCHEDULES, "zb_v"])
def test_schedules_accumulate_as_one_process_does(schedule: str, micro_batches: int) -> None:
    """Fewer micro-batches than ranks, as many, many more; uneven ones; bit for bit."""
    workload = work(layers=6, micro_batches=micro_batches, windows=2, global_batch=23)
    equal_to_one_process(workload, {"schedule": schedule}, world=3)


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_interleaving(chunks: int) -> None:
    options = {"schedule": {"name": "interleaved", "chunks": chunks}, "split": [2, *[1] * 5]}
    options |= {} if chunks == 3 else {"split": []}
    equal_to_one_process(work("dropout_stateful", layers=7, micro_batches=4), options)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v", {"name": "interleaved"}])
def test_ties_over_stages(schedule: Any, world: int) -> None:
    """Over two ranks, over two stages of one rank, and within one stage."""
    workload = work("tied_over_units", "two_groups", layers=6, micro_batches=6, windows=2)
    spec = OptimizerSpec("adamw", lr=0.01, clip_norm=0.05, groups=suggested_groups(workload.traits))
    records = equal_to_one_process(
        workload, {"schedule": schedule}, spec, world, exact=False, steps=1
    )
    for moment in ("gradients_final gradients", "after_update parameters"):
        held = [r["steps"][0][moment].get("embed.token.weight") for r in records]
        copies = [entry for entry in held if entry is not None]
        assert sorted(replica for _, replica in copies) == list(range(len(copies)))
        assert all(torch.equal(tensor, copies[0][0]) for tensor, _ in copies)
    assert len(copies) == (2 if world > 1 and schedule != "zb_v" else 1)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h2"])
def test_lengths_that_vary_and_buffers_full_of_nan(schedule: str) -> None:
    workload = work("variable_lengths", layers=3, micro_batches=5, windows=2, global_batch=20)
    assert len({m.inputs.shape for m in workload.batch(0, 1)[0].micro_batches}) > 2
    disturbances = Disturbances(delay=True, poison=True)
    equal_to_one_process(
        workload, {"schedule": schedule}, CLIPPED, 3, exact=False, disturbances=disturbances
    )


def test_a_schedule_of_the_user() -> None:
    """GPipe's forwards, backwards in another order on the second rank, messages as they come."""
    orders = [
        ["F0@0", "F1@0", "F2@0", "BW0@0", "B1@0", "B2@0", "W1@0", "W2@0"],
        ["F0@1", "B0@1", "F1@1", "B1@1", "W0@1", "W1@1", "F2@1", "BW2@1"],
    ]
    workload, options = work(layers=3, micro_batches=3), {"schedule": {"orders": orders}}
    records = equal_to_one_process(workload, options, kind=Traced)
    for record, order in zip(records, orders, strict=True):
        done = record["system"].actions
        assert [str(action) for action in done[: len(order)]] == order
        evaluated = done[2 * len(order) :]
        assert {action.op for action in evaluated} == {"F"}


def test_receives_that_are_posted_early() -> None:
    """Nothing waits before it must: both sides post first, though no form is known yet."""
    orders = [
        ["RB0@0", "RB1@0", "F0@0", "SF0@0", "F1@0", "SF1@0", "BW0@0", "BW1@0"],
        ["RF0@1", "RF1@1", "F0@1", "BW0@1", "SB0@1", "F1@1", "BW1@1", "SB1@1"],
    ]
    workload, options = work(layers=2, micro_batches=2), {"schedule": {"orders": orders}}
    equal_to_one_process(workload, options)


@pytest.mark.parametrize("every", [1, 2])
def test_recomputation_ends_where_a_stage_ends(every: int) -> None:
    workload = work("dropout_stateful", layers=5, micro_batches=3)
    equal_to_one_process(workload, {"recompute_every": every, "split": [3, 2]})


def test_evaluation_is_that_of_one_process() -> None:
    workload = work("dropout_counter", layers=4, micro_batches=4)
    truth = training.train(workload, SGD, 1, 2, "per_rank").to_dict()
    options = {"schedule": {"name": "interleaved"}}
    records = succeed(lambda rank, world: drive(workload, SGD, rank, world, options), 2)
    state = {**truth["steps"][-1]["parameters"], **truth["steps"][-1]["buffers"][0]}
    expected = training.evaluator(workload)(state, workload.batch(1, 1)[0].micro_batches)
    assert [r["evaluated"] is None for r in records] == [True, False]
    assert float(records[1]["evaluated"]) == pytest.approx(expected, rel=1e-13)


# --------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("schedule", [*SCHEDULES, "zb_v"])
def test_a_micro_batch_is_let_go_at_its_last_action(schedule: str) -> None:
    """Inputs of blocks live as long as the schedule says that their micro-batch is held."""

    class Weighed(Traced):
        def setup(self, *arguments: Any) -> None:
            super().setup(*arguments)
            self.alive: list[weakref.ref[Tensor]] = []
            self.counts: list[int] = []
            for stage in self.executor.stages.values():
                block = next(iter(stage.module.blocks.values()))
                block.mlp.up.register_forward_pre_hook(self.seen)

        def seen(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self.alive.append(weakref.ref(inputs[0].untyped_storage()))

        def look(self, action: Action) -> None:
            self.counts.append(sum(ref() is not None for ref in self.alive))

    workload = work(layers=6, micro_batches=7)
    options = {"schedule": schedule}
    records = succeed(
        lambda rank, world: drive(workload, SGD, rank, world, options, kind=Weighed, steps=1), 3
    )
    made = ReferencePipeline.schedule(options, 3, 7)
    for rank, record in enumerate(records):
        found = record["system"].counts[: len(made.computed(rank))]
        assert max(found) == made.peak(rank)
        assert found[-1] <= 1  # the last action itself is still running when it is looked at


# -------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "1f1"}, "did you mean '1f1b'"),
        ({"schedule": {"name": "interleaved", "chunks": 0}}, "'schedule.chunks' must be at least"),
        ({"schedule": {"name": "gpipe", "chunks": 3}}, "only 'interleaved' lets you choose"),
        ({"schedule": {"orders": [["F0@0", "BW0@0"]], "chunks": 1}}, "'schedule.chunks' = 1"),
        (
            {"schedule": {"orders": [["F0@0", "BW7@0"]]}},
            "highest micro-batch is 7, so the orders need at least 8 actions",
        ),
        ({"schedule": {}}, "give either 'name'"),
        ({"schedule": {"orders": [["F0@0", "G0@0"]]}}, "'G0@0' is not an action"),
        ({"schedule": {"orders": [["F0@0"]]}}, "rank 0 never does"),
        (
            {"schedule": {"orders": [["F0@0", "BW0@0"], ["F0@1", "BW0@1"]], "place": [0, 3]}},
            "'schedule.place' = [0, 3]: schedule.orders has actions for only 2 ranks",
        ),
        (
            {"schedule": {"orders": [["F0@0", "BW0@0", "BW0@4"]]}},
            "the highest stage in the orders is 4, but the orders have forwards of only 1 stages",
        ),
        (
            {
                "schedule": {
                    "orders": [
                        ["RB0@0", "RF0@0", "F0@0", "SF0@0", "BW0@0"],
                        ["RF0@1", "F0@1", "BW0@1", "SB0@1"],
                    ]
                }
            },
            "a message that no rank needs",
        ),
        (
            {
                "schedule": {
                    "orders": [
                        ["F0@0", "BW0@0", "F1@0", "BW1@0"],
                        ["F1@1", "BW1@1", "F0@1", "BW0@1"],
                    ]
                }
            },
            "deadlock: rank 0 waits in BW0@0",
        ),
        (
            {"schedule": "zb_v", "recompute_every": 1},
            "'recompute_every' = 1: this schedule computes weight gradients",
        ),
        ({"precision": {"parameters": "bfloat16"}}, "unknown option 'precision'"),
        ({"offload": "optimizer"}, "unknown option 'offload'"),
    ],
)
def test_options_are_refused_in_words(options: dict[str, Any], text: str) -> None:
    with pytest.raises(Refused) as error:
        ReferencePipeline.capabilities(options)
    assert text in str(error.value)


def test_cuts() -> None:
    assert cut(7, 3) == [(0, 3), (3, 5), (5, 7)]
    assert cut(7, 3, [1, 5, 1]) == [(0, 1), (1, 6), (6, 7)]
    for stages, split, text in (
        (8, (), "8 stages, but the model has only 7 units"),
        (3, (1, 5), "option 'split' = [1, 5]: there are 3 stages and 7 units"),
        (3, (1, 5, 2), "give 3 numbers of at least 1 that add up to 7"),
        (3, (0, 5, 2), "give 3 numbers of at least 1"),
    ):
        with pytest.raises(Refused) as error:
            cut(7, stages, split)
        assert text in str(error.value)


def test_windows_that_do_not_fit_are_refused() -> None:
    for options, ranks, micro_batches, text in (
        ({"schedule": "interleaved"}, 2, 3, "must be a multiple of 2"),
        ({"schedule": {"orders": [["F0@0", "BW0@0"]]}}, 2, 1, "is for 1 ranks"),
        ({"schedule": {"orders": [["F0@0", "BW0@0"]]}}, 1, 2, "lists 1 micro-batches"),
    ):
        with pytest.raises(Refused) as error:
            ReferencePipeline.schedule(options, ranks, micro_batches)
        assert text in str(error.value)


def test_forwards_are_a_sound_order() -> None:
    made = forwards((0, 1, 1, 0), 2, 3)
    assert [a for a in made.computed(0) if a.op != "F"] == []
    found = problems(made)
    assert all("never does" in text or text.startswith("and ") for text in found), found


def test_splits_of_a_schedule_are_known() -> None:
    own = {"orders": [["F0@0", "B0@0", "W0@0"]]}
    for schedule, splits in (("1f1b", False), ("zb_v", True), (own, True)):
        assert parse_options(Options, {"schedule": schedule}).chosen.splits is splits
