"""Compressed reductions: what each method promises, over seeds and worlds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import held, make, put_together, train, workload
from local_ranks import succeed
from scipy import stats
from torch import Tensor

from shardproof.comm import Comm, Mesh
from shardproof.contract import OptimizerSpec, Refused, ScalerSpec
from shardproof.impls.reference import ddp, fsdp, hybrid, naive_ddp, zero1
from shardproof.impls.reference.engine.choices import Compress, Reduction
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.options import parse_options
from shardproof.impls.reference.engine.summing import Summing
from shardproof.impls.reference.parts.compressors.compressor import Compressor
from shardproof.impls.reference.parts.compressors.draws import count, first_factor, mask
from shardproof.impls.reference.parts.compressors.emulators import emulator
from shardproof.impls.reference.parts.compressors.signs import pack, unpack
from shardproof.impls.reference.parts.flat import FlatLayout
from shardproof.impls.reference.parts.reducers import Bucket, Reducer

FP16 = torch.float16
#: Every method, and every way of sending values.
METHODS: dict[str, Compress] = {
    "fp16": Compress("cast", dtype=FP16, feedback=True),
    "bf16": Compress("cast", dtype=torch.bfloat16, feedback=True),
    "topk": Compress("topk", density=0.1),
    "topk fp16": Compress("topk", density=0.1, dtype=FP16),
    "randomk": Compress("randomk", density=0.1),
    "randomk fp16": Compress("randomk", density=0.1, dtype=FP16),
    "randomk fed back": Compress("randomk", density=0.3, feedback=True),
    "powersgd": Compress("powersgd", rank=2),
    "sign": Compress("sign"),
    "onebit": Compress("onebit"),
}
#: A matrix, a tensor of three dimensions, a vector, a number, and nothing.
SHAPES = {"a": (12, 10), "b": (7, 3, 5), "c": (13,), "d": (), "e": (0, 4)}
Tensors = dict[str, Tensor]


def gradients(seed: int, shapes: Mapping[str, Sequence[int]] = SHAPES) -> Tensors:
    """Of one rank, in fp64."""
    source = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn([*shape], generator=source, dtype=torch.float64)
        for name, shape in shapes.items()
    }


def reducer(chosen: Compress, rank: int, ranks: int) -> Compressor:
    """What the engine makes of the option."""
    kind: type[Compressor] = getattr(Summing, f"{chosen.method}_type")
    return kind(chosen, rank, ranks, Reducer())


def reduced(
    by: Reducer, comm: Comm, step: int, own: Tensors, buckets: Sequence[Sequence[str]]
) -> Tensors:
    """What ``by`` makes of this rank's gradients, in these buckets."""
    flats = {}
    for names in buckets:
        layout = FlatLayout({name: own[name] for name in names}, 1)
        flat = layout.empty()
        layout.pack(flat, dict(own))
        flats[flat] = layout
    works = [by.all_reduce(Bucket(f, lay.whole, step), comm) for f, lay in flats.items()]
    for work in works:
        work.wait()
    return {name: v for flat, layout in flats.items() for name, v in layout.views(flat).items()}


ONE, SEVERAL = [list(SHAPES)], [["c", "e"], ["a", "d"], ["b"]]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
@pytest.mark.parametrize("name", METHODS)
def test_a_reducer_is_its_emulation_whatever_the_buckets(name: str, ranks: int) -> None:
    """Bit for bit but for PowerSGD, in four steps, between which buckets are laid out anew."""
    chosen, steps = METHODS[name], range(4)
    whole = emulator(chosen, Reduction())
    own = [[gradients(100 * step + rank) for rank in range(ranks)] for step in steps]
    want = [whole(step, own[step]) for step in steps]

    def body(rank: int, size: int) -> list[list[Tensors]]:
        comm, found = Mesh({"replicate": size}).comm("replicate"), []
        for buckets in ([ONE] * 4, [SEVERAL] * 4, [SEVERAL, ONE, SEVERAL, ONE]):
            by = reducer(chosen, rank, size)
            pairs = zip(steps, buckets, strict=True)
            found.append([reduced(by, comm, s, own[s][rank], b) for s, b in pairs])
        return found

    close = {"rtol": 1e-12, "atol": 1e-13} if name == "powersgd" else {"rtol": 0, "atol": 0}
    for ways in succeed(body, ranks):
        for results in ways:
            for step in steps:
                torch.testing.assert_close(results[step], want[step], **close)
    different = [not torch.equal(want[0][n], sum(o[n] for o in own[0])) for n in ("a", "b")]
    assert all(different), "nothing was compressed"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", [name for name, chosen in METHODS.items() if chosen.feeds_back])
def test_sent_and_residual_are_gradient_and_old_residual(name: str, seed: int) -> None:
    """One rank alone has gradients, so what is applied is what it sent: bit for bit where values
    are only chosen or rounded.
    """
    chosen = METHODS[name]

    def body(rank: int, size: int) -> list[tuple[Tensors, Tensors, Tensors]]:
        comm, by, found = (
            Mesh({"replicate": size}).comm("replicate"),
            reducer(chosen, rank, size),
            [],
        )
        for step in range(5):
            own = gradients(10 * seed + step)
            if rank:
                own = {n: torch.zeros_like(g) for n, g in own.items()}
            before = {n: r.clone() for n, r in by.feedback.residuals.items()}
            sent = reduced(by, comm, step, {n: g.clone() for n, g in own.items()}, ONE)
            if not rank:
                after = by.feedback.residuals
                found.append((own, before, {n: (sent[n] + after[n]) for n in after}))
        return found

    is_exact, seen = chosen.method in ("cast", "topk", "randomk"), 0
    for own, before, after in succeed(body, 2)[0]:
        for parameter, have in after.items():
            want = own[parameter] + before.get(parameter, 0.0)
            close = {"rtol": 0, "atol": 0} if is_exact else {"rtol": 1e-12, "atol": 1e-12}
            torch.testing.assert_close(have, want, **close)
            seen += int(want.any())
    assert seen >= 10


def test_random_masks_are_unbiased() -> None:
    """Over 400 steps: the sum's projection on itself has the right mean (t-test, two-sided, 1 in
    10,000).  A mean that is wrong by 5 % is found with a power of 99 %, a missing n/k always.
    """
    steps, ranks, chosen = 400, 3, Compress("randomk", density=0.2)
    shapes = {"a": (40, 30)}
    own = [gradients(rank, shapes) for rank in range(ranks)]

    def body(rank: int, size: int) -> list[Tensor]:
        comm, by = Mesh({"replicate": size}).comm("replicate"), reducer(chosen, rank, size)
        mine = own[rank]
        return [
            reduced(by, comm, s, {n: g.clone() for n, g in mine.items()}, [["a"]])["a"]
            for s in range(steps)
        ]

    results = succeed(body, ranks)
    truth = sum(g["a"] for g in own)
    shares = torch.stack([(r * truth).sum() / (truth * truth).sum() for r in results[0]]).numpy()
    spread = shares.std(ddof=1) / math.sqrt(steps)
    limit = stats.t.ppf(1 - 0.5e-4, steps - 1)
    power = {bias: stats.nct.sf(limit, steps - 1, bias / spread) for bias in (0.05, 0.8)}
    print(f"mean {shares.mean():.4f}, standard error {spread:.4f}, power {power}")
    assert power[0.05] > 0.99 and power[0.8] > 0.9999
    assert stats.ttest_1samp(shares, 1.0).pvalue > 1e-4
    for mine in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(mine, results[0], strict=True))
    assert {int((r != 0).sum()) for r in results[0]} == {count(0.2, 1200)}
    sent = sum((r != 0).double() for r in results[0])
    assert int(sent.min()) > 0 and int(sent.max()) < steps, "masks must differ from step to step"


@pytest.mark.parametrize("seed", range(4))
def test_powersgd_is_exact_where_its_rank_suffices(seed: int) -> None:
    """The sum has rank 3, ranks less or more; 3 columns and more give it, 2 do not."""
    ranks, chosen = 3, {r: Compress("powersgd", rank=r) for r in (2, 3, 5)}

    source = torch.Generator().manual_seed(seed)
    left, right = (
        torch.linalg.qr(torch.randn(n, 3, generator=source, dtype=torch.float64)).Q
        for n in (20, 30)
    )

    def matrices(step: int) -> list[Tensors]:
        """Of each rank; their sum has the singular values 1, 2 and 3."""
        source = torch.Generator().manual_seed(1000 * seed + step)
        parts = torch.randn(ranks, 3, 3, generator=source, dtype=torch.float64)
        parts[-1] = torch.diag(torch.tensor([1.0, 2.0, 3.0])) - parts[:-1].sum(0)
        return [{"a": left @ part @ right.T} for part in parts]

    def body(rank: int, size: int) -> dict[int, list[Tensor]]:
        comm = Mesh({"replicate": size}).comm("replicate")
        found = {}
        for r, option in chosen.items():
            by = reducer(option, rank, size)
            found[r] = [reduced(by, comm, s, matrices(s)[rank], [["a"]])["a"] for s in range(3)]
        return found

    results = succeed(body, ranks)[0]
    for step in range(3):
        truth = sum(own["a"] for own in matrices(step))
        errors = {r: float((results[r][step] - truth).norm() / truth.norm()) for r in chosen}
        assert errors[3] < 1e-12 and errors[5] < 1e-12, errors
        assert errors[2] > 1e-3, errors


@pytest.mark.parametrize(
    "chosen",
    [
        Compress("topk", density=1),
        Compress("topk", density=1, feedback=False),
        Compress("randomk", density=1),
        Compress("randomk", density=1, feedback=True),
        Compress("cast", dtype=torch.float64),
        Compress("cast", dtype=torch.float64, feedback=True),
    ],
    ids=str,
)
def test_what_sends_everything_changes_nothing(chosen: Compress) -> None:
    def body(rank: int, size: int) -> bool:
        comm, by = Mesh({"replicate": size}).comm("replicate"), reducer(chosen, rank, size)
        for step in range(3):
            plain = reduced(Reducer(), comm, step, gradients(7 * step + rank), SEVERAL)
            sent = reduced(by, comm, step, gradients(7 * step + rank), SEVERAL)
            assert all(torch.equal(sent[name], plain[name]) for name in SHAPES)
        assert not any(left.any() for left in by.feedback.residuals.values())
        return True

    for ranks in (2, 3, 4, 5):
        assert all(succeed(body, ranks))


def test_other_seeds_steps_and_names_draw_otherwise() -> None:
    """The emulation draws by the same functions: no case could tell."""
    keys = [(0, 0, "a"), (1, 0, "a"), (0, 1, "a"), (0, 0, "b")]
    sent = [mask(seed, step, name, 100, 0.1) for seed, step, name in keys]
    starts = [first_factor(seed, name, 8, 2, torch.float64) for seed, _, name in keys]
    alike = [
        [torch.equal(a, b) for i, b in enumerate(drawn) for a in drawn[:i]]
        for drawn in (sent, [starts[0], starts[1], starts[3]])
    ]
    assert not any(map(any, alike))
    assert torch.equal(mask(0, 0, "a", 100, 0.1), sent[0]) and torch.equal(starts[0], starts[2])


def test_what_is_kept_has_the_dtype_of_the_gradients_also_where_a_wider_one_travels() -> None:
    def body(rank: int, size: int) -> set[torch.dtype]:
        comm = Mesh({"replicate": size}).comm("replicate")
        by = reducer(Compress("cast", dtype=torch.float64, feedback=True), rank, size)
        own = {name: tensor.float() for name, tensor in gradients(rank).items()}
        reduced(by, comm, 0, own, SEVERAL)
        return {left.dtype for left in by.feedback.residuals.values()}

    assert succeed(body, 2) == [{torch.float32}] * 2


@pytest.mark.parametrize("numel", [1, 7, 8, 9, 16, 33])
def test_signs_survive_packing(numel: int) -> None:
    for seed in range(5):
        plus = torch.rand(numel, generator=torch.Generator().manual_seed(seed)) < 0.5
        packed = pack(plus)
        assert packed.dtype == torch.uint8 and len(packed) == math.ceil(numel / 8)
        assert torch.equal(unpack(packed, numel, torch.float64) > 0, plus)


def test_a_density_is_meant_as_it_is_written() -> None:
    """0.1 is a little more than a tenth in binary: 0.1 * 30 would be rounded up to 4."""
    assert [count(density, 30) for density in (0.1, 0.05, 1, 1.0, 0.001)] == [3, 2, 30, 30, 1]
    assert count(0.1, 0) == 0


def test_shards_are_those_of_the_whole_sum() -> None:
    for name, chosen in METHODS.items():
        scattered = emulator(chosen, Reduction(scattered=True))
        own = [gradients(rank) for rank in range(3)]
        want = scattered(0, own)

        def body(rank: int, size: int, chosen: Compress = chosen) -> Tensor:
            comm, by = Mesh({"shard": size}).comm("shard"), reducer(chosen, rank, size)
            layout = FlatLayout(gradients(rank), size)
            flat = layout.empty()
            layout.pack(flat, dict(gradients(rank)))
            shard = flat.new_empty(layout.shard_numel)
            by.reduce_scatter(Bucket(flat, layout.whole, 0), comm, shard).wait()
            return shard

        layout = FlatLayout(want, 3)
        for parameter, view in layout.views(torch.cat(succeed(body, 3))).items():
            torch.testing.assert_close(view, want[parameter], rtol=1e-12, atol=1e-13, msg=name)


# ----------------------------------------------------------------------------------- the option


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, r"option 'compress.method' is missing; valid: cast, topk, randomk, .*, onebit$"),
        ({"method": None}, r"'compress.method' = null is not valid; valid: cast, .*, onebit$"),
        ({"method": "top-k"}, r"did you mean 'topk'"),
        (
            {"method": "topk"},
            r"'compress.density' is missing, but topk needs it; write e.g. density: 0.01",
        ),
        ({"method": "topk", "density": 0}, r"'compress.density' = 0: .* above 0 and at most 1"),
        ({"method": "topk", "density": -0.5}, r"'compress.density' = -0.5"),
        ({"method": "randomk", "density": 1.5}, r"'compress.density' = 1.5"),
        ({"method": "topk", "density": float("nan")}, r"'compress.density' = nan"),
        ({"method": "powersgd", "rank": 0}, r"'compress.rank' must be at least 1, not 0"),
        ({"method": "powersgd", "rank": 1.5}, r"'compress.rank' must be of type"),
        ({"method": "powersgd", "rank": 2, "density": 0.1}, r"powersgd uses rank, feedback, seed"),
        (
            {"method": "cast"},
            r"'compress.dtype' is missing, but cast needs it; write e.g. dtype: bfloat16",
        ),
        ({"method": "cast", "dtype": "fp16"}, r"'compress.dtype' = 'fp16' is not a dtype; valid"),
        ({"method": "sign", "feedback": True}, r"'compress.feedback' = true: sign uses no other"),
        ({"method": "onebit", "feedback": False}, r"'compress.feedback' = false: onebit uses"),
        ({"method": "randomk", "density": 0.1, "seed": -1}, r"'compress.seed' must be at least 0"),
        ({"method": "topk", "density": 0.1, "k": 3}, r"unknown option 'compress.k'"),
    ],
)
def test_what_a_method_does_not_take_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(Refused, match=says):
        parse_options(ddp.Options, {"compress": given})


TOPK = {"method": "topk", "density": 0.1}


@pytest.mark.parametrize(
    ("system", "options", "says"),
    [
        (ddp.ReferenceDDP, {"all_reduce": "ring"}, "with all_reduce = 'ring'"),
        (zero1.ReferenceZero1, {"reduce_scatter": "ring"}, "with reduce_scatter = 'ring'"),
        (zero1.ReferenceZero1, {"precision": {"reduce": "bfloat16"}}, "with 'precision'"),
        (fsdp.ReferenceFSDP, {"sharding_strategy": "HYBRID_SHARD"}, "'HYBRID_SHARD'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    system: type[Engine], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(Refused, match=says):
        system.capabilities({**options, "compress": TOPK})


@pytest.mark.parametrize(
    ("strategy", "mesh", "options", "spec", "says"),
    [
        (
            "hybrid",
            {"replicate": 2, "tensor": 2},
            {"data_options": {"compress": TOPK}},
            OptimizerSpec(),
            "each rank of the axis 'tensor' holds a part",
        ),
        (
            "hybrid",
            {"pipe": 2, "shard": 2},
            {"data": "zero2", "data_options": {"compress": TOPK}},
            OptimizerSpec(),
            "are compressed in the order of the schedule",
        ),
        (
            "ddp",
            {"replicate": 2},
            {"compress": TOPK},
            OptimizerSpec(scaler=ScalerSpec()),
            "with a loss scaler",
        ),
    ],
)
def test_meshes_and_optimizers_that_cannot_be_held_are_refused(
    strategy: str, mesh: dict[str, int], options: dict[str, Any], spec: OptimizerSpec, says: str
) -> None:
    work = workload()

    def body(rank: int, size: int) -> None:
        with pytest.raises(Refused, match=says):
            make(strategy, work, mesh, rank, spec, **options)

    succeed(body, math.prod(mesh.values()))


def test_a_system_declares_what_its_bits_are_compared_with() -> None:
    plain = naive_ddp.ReferenceNaiveDDP.capabilities({})
    assert (plain.oracle, plain.exactness) == ("plain", "reordered-sum")
    for method, exactness in (("topk", "bitwise"), ("powersgd", "lossy")):
        option = TOPK if method == "topk" else {"method": method, "rank": 2}
        for data, emulates in (("ddp", "step"), ("zero1", "step"), ("zero3", "round")):
            given = {"data": data, "data_options": {"compress": option}}
            declared = hybrid.ReferenceHybrid.capabilities(given)
            assert declared.oracle == "emulated" and declared.exactness == exactness
            assert declared.emulates == emulates


# ------------------------------------------------------------------------------ saved and loaded


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero3"])
@pytest.mark.parametrize("method", ["topk", "powersgd", "onebit"])
def test_training_goes_on_with_what_was_kept(strategy: str, method: str, tmp_path: Path) -> None:
    """Saved, loaded by as many ranks, the next steps are those of a run that was not stopped."""
    option = {"topk": TOPK, "powersgd": {"method": method, "rank": 2}, "onebit": {"method": method}}
    work, axis = workload(layers=2), "replicate" if strategy == "ddp" else "shard"

    def body(rank: int, size: int) -> tuple[Any, Any, Any]:
        options = {"compress": option[method]}
        first = make(strategy, work, {axis: size}, rank, **options)
        train(first, work, 0, 2)
        first.save(tmp_path, {}).wait()
        train(first, work, 2, 4)
        second = make(strategy, work, {axis: size}, rank, **options)
        second.load(tmp_path)
        train(second, work, 2, 4)
        forgetful = make(strategy, work, {axis: size}, rank, **options)
        forgetful.load(tmp_path)
        forgetful.reducer = forgetful.handle.reducer = forgetful.make_reducer()
        train(forgetful, work, 2, 4)
        found = tuple(held(system) for system in (first, second, forgetful))
        first.close()
        return found

    ranks = succeed(body, 3)
    want, have, lost = (put_together([found[i] for found in ranks]) for i in range(3))
    for kind, tensors in want.items():
        assert tensors.keys() == have[kind].keys()
        assert all(torch.equal(tensors[name], have[kind][name]) for name in tensors)
    same = (torch.equal(t, lost["parameters"][n]) for n, t in want["parameters"].items())
    assert not all(same), "what is kept must matter"


@pytest.mark.parametrize(("before", "after"), [(4, 3), (2, 4), (3, 1)])
@pytest.mark.parametrize("method", ["topk", "powersgd", "onebit"])
def test_another_world_goes_on_from_all_residuals(
    method: str, before: int, after: int, tmp_path: Path
) -> None:
    option = {"topk": TOPK, "powersgd": {"method": method, "rank": 2}, "onebit": {"method": method}}
    work, options = workload(layers=2), {"compress": option[method]}

    def save(rank: int, size: int) -> Any:
        system = make("ddp", work, {"replicate": size}, rank, **options)
        train(system, work, 0, 2)
        system.save(tmp_path, {}).wait()
        return held(system)

    def load(rank: int, size: int) -> Any:
        system = make("ddp", work, {"replicate": size}, rank, **options)
        system.load(tmp_path)
        found = held(system)
        train(system, work, 2, 3)
        return found

    old = put_together(succeed(save, before))["optimizer"]
    new = put_together(succeed(load, after))["optimizer"]
    if after == 1:
        assert not any("@" in name for name in new), "one rank keeps nothing"
        return

    def owed(state: Tensors, ranks: int) -> Tensors:
        names = {name.partition("@")[0] for name in state if ".residual@" in name}
        return {
            n: sum(s for k in range(ranks) if (s := state.get(f"{n}@{k}")) is not None)
            for n in names
        }

    want, have = owed(old, before), owed(new, after)
    assert want.keys() == have.keys() and want
    for name, total in want.items():
        torch.testing.assert_close(have[name], total, rtol=1e-12, atol=1e-15)
    common = [name for name in old if name.endswith("@all") or ".factor@0" in name]
    assert bool(common) == (method != "topk")
    assert all(torch.equal(old[name], new[name]) for name in common)


def test_a_plain_system_leaves_out_what_reductions_kept(tmp_path: Path) -> None:
    work = workload(layers=2)

    def body(rank: int, size: int) -> list[str]:
        system = make("ddp", work, {"replicate": size}, rank, compress=TOPK)
        train(system, work, 0, 2)
        system.save(tmp_path, {}).wait()
        plain = make("ddp", work, {"replicate": size}, rank)
        plain.load(tmp_path)
        train(plain, work, 2, 3)
        return [piece.name for piece in plain.local_state("optimizer") if "@" in piece.name]

    assert succeed(body, 2) == [[], []]


def test_nobody_keeps_what_was_lost_of_a_tensor_without_elements() -> None:
    """A fault of the emulator: it promised a residual that no server has a part of."""
    told = emulator(Compress("onebit"), Reduction())
    nothing = torch.empty(0, 3)
    total, sent = told.reduce(0, "empty", [nothing, nothing])
    assert total.shape == (0, 3)
    assert len(sent) == 2
    assert not any(name.startswith("empty.server") for name in told.kept)
    told.reduce(0, "one", [torch.ones(1), torch.ones(1)])
    assert "one.server_residual@all" in told.kept
