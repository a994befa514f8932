"""The memory ledger counts every byte: against hand counts, closed forms and the allocator.

Phases are set by hand here, so that nothing but the ledger is under test.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from local_ranks import succeed
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from shardproof.backends.base import GroupBase, Request
from shardproof.contract import Piece
from shardproof.ledgers.memory.installed import communicated, watch
from shardproof.ledgers.memory.log import MemoryLog
from shardproof.ledgers.memory.recorder import MemoryLedger
from shardproof.ledgers.memory.summary import summary

STATE = ("parameters", "gradients", "optimizer_state")
W = 256 * 256 * 4


class Run:
    """A ledger with its phase: ``run.phase = "forward"``."""

    def __init__(self) -> None:
        self.phase = "setup"
        self.ledger = MemoryLedger(lambda: self.phase)

    def now(self) -> dict[str, int]:
        """Bytes by class at this moment, classes that hold nothing left out."""
        self.ledger.mark("now")
        return {kind: size for kind, size in self.ledger.log.bytes("now").items() if size}

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Callable[[], Tensor],
        settle: Callable[[], object] = lambda: None,
    ) -> None:
        """Two steps; marks and labels at the contract's observation points, after ``settle()``."""
        ledger = self.ledger
        for step in range(2):
            ledger.step, self.phase = step, "setup"
            inputs = data()
            self.phase = "forward"
            loss = model(inputs).square().sum()
            self.phase = "backward"
            loss.backward()
            settle()
            self.phase = "observe"
            ledger.classify(modules=[model])
            ledger.mark("gradients_final")
            self.phase = "update"
            optimizer.step()
            self.phase = "observe"
            ledger.classify(modules=[model])
            ledger.mark("after_update")
            self.phase = "update"
            optimizer.zero_grad()
            del inputs, loss
        self.phase = "setup"


@pytest.fixture
def run() -> Iterator[Run]:
    found = Run()
    with found.ledger:
        yield found


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), foreach=False)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 5))


def of_states(levels: dict[str, int]) -> list[int]:
    return [levels[kind] for kind in STATE]


# ------------------------------------------------------------------------------ counted by hand


def test_linear_with_adamw_to_the_byte(run: Run) -> None:
    model = nn.Linear(256, 256, bias=False)
    optimizer = adamw(model)
    run.train(model, optimizer, lambda: torch.randn(64, 256))
    # Weight, its gradient, two moments, one fp32 step counter; 64 x 256 inputs; the loss.
    expected = {"parameters": W, "gradients": W, "optimizer_state": 2 * W + 4}
    inputs, loss = {"temporary": 65_536}, {"activations": 4}
    held = {k: v for k, v in run.ledger.log.bytes("after_update", 1).items() if v}
    assert held == {**expected, **inputs, **loss}
    first = run.ledger.log.bytes("gradients_final", step=0)
    assert of_states(first) == [W, W, 0]
    assert run.now() == {"parameters": W, "optimizer_state": 2 * W + 4}


def test_mlp_with_step_counters(run: Run) -> None:
    model = mlp()
    run.train(model, adamw(model), lambda: torch.randn(3, 16))
    n = 16 * 24 + 24 + 24 * 5 + 5
    assert of_states(run.ledger.log.bytes("after_update")) == [4 * n, 4 * n, 8 * n + 4 * 4]


def test_peaks_by_phase(run: Run) -> None:
    model = nn.Linear(256, 256, bias=False)
    run.train(model, adamw(model), lambda: torch.randn(64, 256))
    x, log = 65_536, run.ledger.log
    peaks = {phase: log.peak(phase, 1).bytes for phase in ("forward", "backward", "update")}
    states = W + 2 * W + 4
    # y and y^2 lie beside x, and the loss of 4 bytes.
    assert peaks["forward"] == states + 3 * x + 4
    # Gradient of y^2 is an expanded scalar: dy/d(y^2) makes 2y and its product with the scalar.
    assert peaks["backward"] == states + W + 2 * x + 4 + 4
    # AdamW's denominator: sqrt, and the quotient by the bias correction.
    assert peaks["update"] == states + W + 2 * W + x + 4
    assert log.peak("update", 1, "gradients").bytes == W
    assert log.peak("setup", -1).classes["parameters"] == W
    with pytest.raises(KeyError, match="no phase 'drain' in step 1"):
        log.peak("drain", 1)
    with pytest.raises(KeyError, match=r"'nowhere'.*after_update of step 1"):
        log.bytes("nowhere")


def test_who_allocated(run: Run) -> None:
    model = nn.Linear(256, 256, bias=False)
    run.train(model, adamw(model), lambda: torch.randn(64, 256))
    log = run.ledger.log
    kinds = zip(log.storages, log.classes(), strict=True)
    made = [storage for storage, kind in kinds if kind == "gradients"][-1]
    assert (made.operation, made.phase, made.step) == ("aten.mm.default", "backward", 1)


# ----------------------------------------------------------------------------- lives of storages


def test_views_and_in_place_work_hold_nothing_of_their_own(run: Run) -> None:
    tensor = torch.zeros(100)
    views = [tensor.view(10, 10), tensor[3:], tensor.reshape(4, 25), tensor.view(20, 5).t()]
    views += [torch.ops.aten._unsafe_view(tensor, (5, 20)), *tensor.split(30), tensor.detach()]
    tensor.add_(1).mul_(2)
    torch.add(tensor, 1, out=tensor)
    assert run.now() == {"temporary": 400}
    del tensor
    assert run.now() == {"temporary": 400}, "a view keeps the storage"
    views.clear()
    assert run.now() == {}


def test_resized_storages(run: Run) -> None:
    tensor = torch.zeros(100)
    tensor.untyped_storage().resize_(0)
    assert run.now() == {}
    tensor.untyped_storage().resize_(800)
    assert run.now() == {"temporary": 800}
    tensor.resize_(300)
    assert run.now() == {"temporary": 1200}
    out = torch.empty(0)
    torch.mul(torch.ones(7), 2, out=out)
    assert run.now() == {"temporary": 1200 + 28}


def test_a_resize_belongs_to_the_phase_it_falls_in(run: Run) -> None:
    whole = torch.zeros(100)
    run.ledger.claim([whole], "parameters")
    run.phase = "backward"
    whole.untyped_storage().resize_(0)
    assert run.ledger.log.peak("backward", -1).classes["parameters"] == 400
    run.phase = "forward"  # two gathers in a row, no operator between
    whole.untyped_storage().resize_(800)
    assert run.ledger.log.peak("backward", -1).classes["parameters"] == 400
    assert run.ledger.log.peak("forward", -1).classes["parameters"] == 800


def test_storages_that_no_operator_made(run: Run) -> None:
    taken = torch.empty(0).set_(torch.UntypedStorage(64))
    constant = torch.tensor([1.0, 2.0])
    assert run.now() == {"temporary": 64 + 8}
    assert taken.numel() == 16 and constant.numel() == 2


def test_inference_mode_where_composites_are_not_taken_apart(run: Run) -> None:
    with torch.inference_mode():
        tensor = torch.zeros(6, 4)
        same, copied = tensor.reshape(24), tensor.t().reshape(24)
        assert run.now() == {"temporary": 2 * 96}
        del tensor, same, copied
    assert run.now() == {}


def test_sparse_gradients(run: Run) -> None:
    table = nn.Embedding(50, 8, sparse=True)
    table(torch.tensor([1, 4, 4])).sum().backward()
    run.ledger.classify(modules=[table])
    assert table.weight.grad is not None
    # Three rows of eight values and three int64 indices.
    assert run.now() == {"parameters": 50 * 8 * 4, "gradients": 3 * 8 * 4 + 3 * 8}


def test_activations_live_from_forward_to_backward(run: Run) -> None:
    model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.Tanh(), nn.Linear(32, 1, bias=False))
    run.ledger.classify(modules=[model])
    run.phase, run.ledger.step = "forward", 0
    loss = model(torch.ones(4, 8)).sum()
    run.ledger.mark("forward_over")
    run.phase = "backward"
    loss.backward()
    run.ledger.mark("backward_over")
    # inputs and tanh's output are saved, the loss is ours; the rest died in forward.
    assert run.ledger.log.bytes("forward_over")["activations"] == 4 * (4 * 8 + 4 * 32 + 1)
    assert run.ledger.log.bytes("backward_over")["activations"] == 4
    assert run.ledger.log.peak("forward", 0, "temporary").bytes == 4 * 4 * 32 + 0


def test_recomputed_activations_are_temporary(run: Run) -> None:
    block = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
    sizes = []
    for recompute in (False, True):
        run.ledger.step += 1
        run.phase = "forward"
        inputs = torch.ones(32, 16, requires_grad=True)
        out = checkpoint(block, inputs, use_reentrant=False) if recompute else block(inputs)
        loss = out.sum()
        run.phase = "backward"
        loss.backward()
        peak = run.ledger.log.peak("backward", run.ledger.step)
        sizes.append(peak.classes["activations"])
        del inputs, out, loss
        block.zero_grad()
    each = 32 * 16 * 4
    # Inputs, four outputs of tanh, the loss; with recomputation inputs, the last output, the loss.
    assert sizes == [each * 5 + 4, each * 2 + 4]


def test_a_mark_before_any_event_holds_nothing_and_hides_no_other() -> None:
    run = Run()
    with run.ledger:
        run.ledger.log.marks.append(("gradients_final", 0, 0))
        kept = torch.zeros(10)
        run.ledger.mark("after_update")
    marks = [row for row in summary(run.ledger.log) if row.moment == "mark"]
    assert {row.where for row in marks} == {"after_update"} and kept.sum() == 0


def test_an_exception_closes_the_ledger() -> None:
    run = Run()
    with pytest.raises(ZeroDivisionError), run.ledger:
        kept = torch.zeros(10)
        1 / 0  # noqa: B018
    assert run.ledger.log.storages and kept.sum() == 0
    events = len(run.ledger.log.events)
    del kept
    assert len(run.ledger.log.events) == events, "a closed ledger is deaf"
    with pytest.raises(RuntimeError, match="already used in a `with`"):
        run.ledger.__enter__()


def test_nothing_is_installed_without_a_ledger() -> None:
    from torch.optim import optimizer

    def installed() -> bool:
        return bool(
            "resize_" in vars(torch.UntypedStorage)
            or optimizer._global_optimizer_post_hooks
            or _get_current_dispatch_mode_stack()
        )

    assert not installed()
    with Run().ledger:
        with Run().ledger:
            assert installed()
        assert installed(), "the outer one is open"
    assert not installed()


# ------------------------------------------------------------------------------------- labels


def test_pieces_are_found_by_storage(run: Run) -> None:
    flat, moments = torch.zeros(100), torch.zeros(2, 50)
    master = torch.zeros(50, dtype=torch.float64)
    pieces = {
        "parameters": [Piece("a", (40,), flat[:40], flat_range=(0, 40))],
        "optimizer": [Piece("a.exp_avg", (50,), moments[0]), Piece("a.master", (50,), master)],
        "gradients": [Piece("a", (40,), flat[40:80].view(4, 10))],
    }
    assert run.ledger.classify(pieces) == []
    # The whole flat buffer counts, once: parameters win over gradients.
    assert run.now() == {"parameters": 400, "optimizer_state": 400, "masters": 400}


def test_a_copy_made_for_the_judge_is_no_memory_of_the_rank(run: Run) -> None:
    weights = torch.ones(8)
    run.phase = "observe"
    computed = Piece.whole("w", weights * 2)
    assert run.ledger.classify({"parameters": [computed]}) == ["parameters w"]
    run.phase = "update"
    assert run.now() == {"temporary": 32}


def test_what_the_suite_lends_counts_once_it_is_kept(run: Run) -> None:
    with run.ledger.paused():
        lent, unused = torch.ones(16), torch.ones(16)
    assert run.now() == {} and unused.numel()
    run.ledger.classify({"parameters": [Piece.whole("w", lent)]})
    assert run.now() == {"parameters": 64}


def test_a_model_from_before_the_ledger() -> None:
    model, run = mlp(), Run()
    with run.ledger:
        model(torch.ones(2, 16))
        next(model.parameters()).data.add_(1)
        assert run.now() == {}
        run.ledger.classify(modules=[model])
        assert run.now() == {"parameters": 4 * (16 * 24 + 24 + 24 * 5 + 5)}


def test_masters_are_what_the_optimizer_updates_but_no_module_holds(run: Run) -> None:
    model = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
    master = nn.Parameter(model.weight.detach().float())
    optimizer = torch.optim.SGD([master], lr=0.1, momentum=0.9, foreach=False)
    model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.grad is not None
    master.grad = model.weight.grad.float()
    optimizer.step()
    master.grad = None
    run.ledger.classify(modules=[model])
    assert run.now() == {
        "parameters": 2 * 64,
        "gradients": 2 * 64,
        "masters": 4 * 64,
        "optimizer_state": 4 * 64,
    }


def test_gathered_parameters_are_seen_in_use(run: Run) -> None:
    model = nn.Linear(16, 16, bias=False)
    watch(model)
    run.ledger.classify(modules=[model])
    owned = model.weight.data
    model.weight.data = torch.cat([owned, torch.zeros(16, 16)])[:16]
    run.phase, run.ledger.step = "forward", 0
    model(torch.ones(1, 16))
    model.weight.data = owned
    assert run.ledger.log.peak("forward", 0, "parameters").bytes == 3 * 1024


def test_communication_buffers_and_activations_that_travel(run: Run) -> None:
    run.ledger.step, run.phase = 0, "forward"
    bucket, activation = torch.zeros(10), torch.zeros(20)  # made where DDP rebuilds its buckets
    staging = torch.zeros(40)
    communicated([bucket[2:], activation, staging])
    run.ledger.mark("in_forward")
    del staging
    run.phase = "backward"
    torch.zeros(1)
    del activation
    run.phase, run.ledger.step = "setup", 1
    torch.zeros(1)
    levels = run.ledger.log.bytes("in_forward")
    assert (levels["communication"], levels["activations"]) == (40 + 160, 80)
    assert bucket.numel()


def test_the_log_survives_packing(run: Run, tmp_path: Any) -> None:
    from shardproof import tensor_bytes

    model = mlp()
    run.train(model, adamw(model), lambda: torch.randn(3, 16))
    tensor_bytes.dump(tmp_path / "log", run.ledger.log.to_dict())
    again = MemoryLog.from_dict(tensor_bytes.load(tmp_path / "log"))
    assert again.peaks() == run.ledger.log.peaks()
    assert again.bytes("after_update") == run.ledger.log.bytes("after_update")
    assert MemoryLog.from_dict(MemoryLog().to_dict()).peaks() == {}


# --------------------------------------------------------------------- against other witnesses


def training(ledger: MemoryLedger | None, run: Run) -> float:
    """Two steps of a network with every usual kind of operator."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    model = nn.Sequential(nn.Linear(16, 32), layer, nn.Linear(32, 4))
    optimizer = adamw(model)
    if ledger is not None:
        run.train(model, optimizer, lambda: torch.randn(3, 5, 16))
        total = 0.0
    else:
        for _ in range(2):
            model(torch.randn(3, 5, 16)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        total = sum(p.double().sum().item() for p in model.parameters())
    return total


def test_the_same_bytes_on_fakes() -> None:
    real, fake = Run(), Run()
    with real.ledger:
        training(real.ledger, real)
    with FakeTensorMode(), fake.ledger:
        training(fake.ledger, fake)
    for mark in ("gradients_final", "after_update"):
        assert fake.ledger.log.bytes(mark) == real.ledger.log.bytes(mark)
    assert fake.ledger.log.peaks().keys() == real.ledger.log.peaks().keys()
    for key, peak in real.ledger.log.peaks().items():
        assert fake.ledger.log.peaks()[key].bytes == peak.bytes, key
    assert real.ledger.log.bytes("after_update")["optimizer_state"] > 0


def test_shape_arithmetic_on_fakes_is_not_counted(run: Run) -> None:
    with FakeTensorMode():
        torch.empty(1000, 1000)
    torch.empty(1000, device="meta")
    assert run.now() == {} and run.ledger.log.peak("setup", -1).bytes == 0


def test_numbers_do_not_change() -> None:
    plain = training(None, Run())
    with Run().ledger:
        assert training(None, Run()) == plain


def allocated(events: list[tuple[int, int]]) -> tuple[int, Counter[int]]:
    """Peak of ``(time, bytes given or taken)``, and how many blocks of each size were live then."""
    level = peak = 0
    live: Counter[int] = Counter()
    at_peak = live.copy()
    for _, size in sorted(events):
        level += size
        live[abs(size)] += 1 if size > 0 else -1
        if level > peak:
            peak, at_peak = level, live.copy()
    assert level == 0, "everything was freed again"
    return peak, at_peak


def test_the_allocator_agrees() -> None:
    run = Run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as witness, run.ledger:
        training(run.ledger, run)
    recorded = witness.profiler.kineto_results.events()
    peak, blocks = allocated(
        [(e.start_ns(), e.nbytes()) for e in recorded if e.name() == "[memory]"]
    )

    log = run.ledger.log
    highest = max(log.peaks().values(), key=lambda p: p.bytes)
    sizes = {index: size for index, size, _, _ in log.events[: highest.event]}
    ours = Counter(size for size in sizes.values() if size)
    # The peak lies in AdamW's ``sqrt / number``.  The number is a double, wrapped once where Python
    # calls and once more where the mode hands on, and turned into fp32 inside the kernel: 8 + 8 + 4
    # bytes that no operator returns.  Every other block is in the ledger.
    assert ours - blocks == Counter()
    assert blocks - ours == Counter({8: 2, 4: 1})
    assert peak - highest.bytes == 20


# --------------------------------------------------------------------------- ranks as threads


@pytest.fixture
def wired(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process group tells the ledgers what it is handed."""
    issue = GroupBase._issue

    def told(group: GroupBase, request: Request) -> Any:
        communicated(t for item in (*request.inputs, *request.outputs) for t in item)
        return issue(group, request)

    monkeypatch.setattr(GroupBase, "_issue", told)


COLLECTOR = threading.Lock()


def collect() -> None:
    """Free the first buckets: a future and its handle hold each other and every rank's tensors."""
    with COLLECTOR:  # while it runs on one thread it does nothing on others
        gc.collect()


def ddp_states(rank: int, bucket_view: bool) -> tuple[dict[str, int], dict[str, int]]:
    run = Run()
    with run.ledger:
        model = mlp()
        watch(model)
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=bucket_view)
        data = torch.full((3, 16), float(rank))
        run.train(wrapped, adamw(model), data.clone, settle=collect)
    return run.ledger.log.bytes("gradients_final"), run.ledger.log.bytes("after_update")


@pytest.mark.usefixtures("wired")
@pytest.mark.parametrize("bucket_view", [False, True])
def test_states_of_native_ddp(bucket_view: bool) -> None:
    psi = 4 * (16 * 24 + 24 + 24 * 5 + 5)
    for before, after in succeed(lambda rank, world: ddp_states(rank, bucket_view), 3):
        # (P + G + O) and Adam's four counters; buckets of G more unless gradients are their views.
        assert of_states(before) == of_states(after) == [psi, psi, 2 * psi + 16]
        assert before["communication"] == (0 if bucket_view else psi)


class FlatBucketDDP:
    """Gradients in one flat buffer that is all-reduced; hands out pieces that are views of it."""

    def __init__(self) -> None:
        self.model = mlp()
        self.parameters = list(self.model.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters))
        self.views = []
        start = 0
        for p in self.parameters:
            self.views.append(self.flat[start : start + p.numel()].view_as(p))
            start += p.numel()
        self.optimizer = adamw(self.model)

    def pieces(self) -> dict[str, list[Piece]]:
        named = [(str(i), p) for i, p in enumerate(self.parameters)]
        state = self.optimizer.state
        slots = [(f"{n}.{s}", v) for n, p in named for s, v in state.get(p, {}).items()]
        return {
            "parameters": [Piece.whole(n, p.detach()) for n, p in named],
            "gradients": [Piece.whole(str(i), v) for i, v in enumerate(self.views)],
            "optimizer": [Piece.whole(n, v) for n, v in slots],
        }

    def step(self, rank: int, run: Run) -> None:
        for p, view in zip(self.parameters, self.views, strict=True):
            p.grad = view
        run.phase = "forward"
        loss = self.model(torch.full((3, 16), float(rank))).square().sum()
        run.phase = "backward"
        loss.backward()
        dist.all_reduce(self.flat)
        run.phase = "update"
        self.optimizer.step()
        run.phase = "observe"
        assert run.ledger.classify(self.pieces()) == []
        run.ledger.mark("after_update")
        run.phase = "update"
        self.flat.zero_()


@pytest.mark.usefixtures("wired")
def test_states_of_a_flat_bucket_ddp_and_of_each_rank_alone() -> None:
    barrier = threading.Barrier(3, timeout=20)

    def body(rank: int, world: int) -> dict[str, int]:
        run = Run()
        with run.ledger:
            system = FlatBucketDDP()
            barrier.wait()
            for step in range(2):
                run.ledger.step = step
                system.step(rank, run)
            held = torch.zeros(1000 * rank)  # nobody else is charged for it
            barrier.wait()
            run.ledger.mark("end")
            assert held.numel() == 1000 * rank
        return run.ledger.log.bytes("end")

    psi = 4 * (16 * 24 + 24 + 24 * 5 + 5)
    for rank, levels in enumerate(succeed(body, 3)):
        assert of_states(levels) == [psi, psi, 2 * psi + 16]
        assert levels["communication"] == 0, "the bucket holds the gradients"
        assert levels["temporary"] == 4000 * rank
    assert "resize_" not in vars(torch.UntypedStorage)


@pytest.mark.usefixtures("wired")
def test_fsdp2_shards_and_frees() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def body(rank: int, world: int) -> tuple[dict[str, int], dict[str, int], int]:
        run = Run()
        with run.ledger:
            model = nn.Sequential(*[nn.Linear(32, 32, bias=False) for _ in range(4)])
            watch(model)
            mesh = init_device_mesh("cpu", (world,))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            run.train(model, adamw(model), lambda: torch.full((2, 32), float(rank)))
        log = run.ledger.log
        backward = log.peak("backward", 1, "parameters").bytes
        return log.bytes("gradients_final", 1), log.bytes("after_update", 1), backward

    psi = 4 * 32 * 32 * 4
    for before, after, backward in succeed(body, 2):
        assert of_states(before) == of_states(after) == [psi // 2, psi // 2, psi + 16]
        # Shards, and the unit in use and those before and after it at most.
        assert psi // 2 + psi // 4 <= backward < psi // 2 + psi


# ------------------------------------------------------------------------------------ its price


def test_price() -> None:
    """What an operator costs beside its kernel, in calls of Python: time is the machine's."""
    layer = nn.TransformerEncoderLayer(256, 8, 512, dropout=0.0, batch_first=True)
    inputs = torch.randn(4, 64, 256)
    operators: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            operators.append(str(func))
            return func(*args, **(kwargs or {}))

    def calls(mode: Any) -> int:
        counted = 0

        def count(frame: Any, event: str, argument: Any) -> None:
            nonlocal counted
            counted += event == "call"

        with mode:
            sys.setprofile(count)
            try:
                layer(inputs).sum().backward()
            finally:
                sys.setprofile(None)
        return counted

    calls(nullcontext())
    more = calls(Run().ledger) - calls(nullcontext())
    calls(Count())
    assert more < 20 * len(operators)


def test_what_the_suite_copies_for_itself_is_unseen_and_what_it_frees_is_not() -> None:
    run = Run()
    with run.ledger:
        kept = torch.ones(4)
        with run.ledger.unseen():
            copy = kept.clone()
            del kept
        seen = torch.ones(2)
    assert copy.numel() == 2 * seen.numel()
    made = [storage.operation for storage in run.ledger.log.storages]
    assert made == ["aten.ones.default"] * 2
    sizes = [size for index, size, _, _ in run.ledger.log.events if index >= 0]
    assert sizes[:3] == [16, 0, 8]
