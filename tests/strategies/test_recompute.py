"""Recomputation changes nothing but what is kept; what cannot be repeated is said."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardproof import workloads
from shardproof.case import WorkloadSpec
from shardproof.contract import Refused
from shardproof.impls.reference.engine.recompute import recompute_units
from shardproof.ledgers.memory.recorder import MemoryLedger
from shardproof.workloads.draws import read_draws

MIXES = {
    "charnames_gpt": (
        "dropout_stateful",
        "dropout_counter",
        "tied",
        "module_twice",
        "rebound_buffer",
        "conditional_by_rank",
        "frozen",
    ),
    "digits_cnn": ("dropout_stateful", "rebound_buffer"),
}


def trained(name: str, every: int, repeat_in_eval: bool = False) -> list[Tensor | None]:
    """Losses, gradients, buffers and generators over two steps of two micro-batches."""
    spec = WorkloadSpec(name, MIXES[name], params={"layers": 3}, global_batch=8, micro_batches=2)
    work = workloads.make(spec, "float32")
    build = work.build_for(0)
    module = build()
    work.load(module)
    recompute_units(module, build.units, every)
    seen: list[Tensor | None] = []
    for step in range(2):
        for micro in work.batch(step, 1)[0].micro_batches:
            loss = build.loss(module(micro.inputs), micro)
            if repeat_in_eval:
                with torch.no_grad():
                    module.eval()(micro.inputs)
                    module.train()
            loss.backward()
            seen.append(loss.detach())
        seen += [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        seen += [buffer.clone() for buffer in module.buffers()]
        seen += read_draws(module).values()
    return seen


@pytest.mark.parametrize("name", MIXES)
@pytest.mark.parametrize("every", [1, 2, 3])
def test_on_equals_off_bit_for_bit(name: str, every: int) -> None:
    kept, repeated = trained(name, 0), trained(name, every, repeat_in_eval=True)
    assert len(kept) == len(repeated)
    for one, other in zip(kept, repeated, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.calls = 0

    def forward(self, hidden: Tensor) -> Tensor:
        self.calls += 1
        return torch.tanh(torch.tanh(torch.tanh(self.inner(hidden))))


def stack(every: int, count: int = 4) -> nn.Sequential:
    module = nn.Sequential(*[Block() for _ in range(count)])
    recompute_units(module, [str(index) for index in range(count)], every)
    return module


def activations(every: int) -> int:
    """Bytes of activations when the forward is over, the loss not counted."""
    phase = "setup"
    ledger = MemoryLedger(lambda: phase)
    with ledger:
        module, inputs = stack(every), torch.ones(32, 16)
        ledger.classify(modules=[module])
        phase, ledger.step = "forward", 0
        loss = module(inputs).sum()
        ledger.mark("forward_over")
        phase = "backward"
        loss.backward()
    return ledger.log.bytes("forward_over")["activations"] - 4


def test_only_the_inputs_of_groups_are_kept() -> None:
    each = 32 * 16 * 4
    # Without: three outputs of tanh a block.  With: what enters each group but the first, whose
    # input was there before.
    assert [activations(every) for every in (0, 1, 2, 4)] == [12 * each, 3 * each, each, 0]


def test_names_hooks_and_calls_survive() -> None:
    module = stack(2)
    assert [n for n, _ in module.named_parameters()][:2] == ["0.inner.weight", "0.inner.bias"]
    seen: list[int] = []
    for index, unit in enumerate(module):
        unit.register_forward_pre_hook(lambda *_, index=index: seen.append(index))
    module(torch.ones(2, 16)).sum().backward()
    assert seen == [0, 1, 2, 3, 2, 3, 0, 1], "each group is repeated once, the last one first"
    with torch.no_grad():
        module(torch.ones(2, 16))
    assert [unit.calls for unit in module] == [3, 3, 3, 3]


def test_units_get_their_forwards_back() -> None:
    module = stack(0, count=3)
    special = module[1].forward = partial(Block.forward, module[1])
    # The same unit in two groups: the forwards are nested, and taken off from the outside.
    groups = recompute_units(module, ["0", "1", "2", "1"], 2)
    assert all("forward" in vars(unit) for unit in module)
    for group in reversed(groups):
        group.close()
        group.close()
    assert ["forward" in vars(unit) for unit in module] == [False, True, False]
    assert module[1].forward is special


def test_deeper_than_the_model_is_refused() -> None:
    with pytest.raises(Refused, match="'recompute_every' = 5: the model has 4 units"):
        stack(5)


def test_the_global_generator_is_refused() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)))
    with pytest.raises(Refused, match=r"'0\.1' \(Dropout, p = 0\.5\)"):
        recompute_units(module, ["0"], 1)


def test_units_that_do_not_follow_one_another() -> None:
    module = stack(2, count=2)
    with pytest.raises(Refused, match="'1' was not called with the output of '0' as its only"):
        module[1](module[0](torch.ones(2, 16)) + 1)
    with pytest.raises(Refused, match="'1' was called, but unit '0' was expected"):
        stack(2, count=2)[1](torch.ones(2, 16))


class Passing(Block):
    """Takes and returns tensors inside of others, as units of libraries do."""

    def forward(self, given: Any) -> Any:  # type: ignore[override]
        hidden = super().forward(given["hidden"])
        return {"hidden": hidden, "rest": (hidden * 2, [given["rest"][0]], 3)}


@pytest.mark.parametrize("changed", [None, "tensor", "word", "length", "in place"])
def test_units_that_pass_containers(changed: str | None) -> None:
    """What is in them is compared, not the objects: who wraps a unit makes others."""
    module = nn.Sequential(Passing(), Passing())
    recompute_units(module, ["0", "1"], 2)
    hidden = torch.ones(2, 16, requires_grad=True)
    between = module[0]({"hidden": hidden, "rest": (hidden, [hidden], 3)})
    first, second, word = between["rest"]
    copies = {
        None: (first.clone(), [*second], word),
        "tensor": (first + 1, [*second], word),
        "word": (first, second, word + 1),
        "length": (first, second),
        "in place": (first, second, word),
    }
    if changed == "in place":
        second.append(hidden)
    if changed:
        with pytest.raises(Refused, match="'1' was not called with the output of '0'"):
            module[1](between | {"rest": copies[changed]})
    else:
        module[1](between | {"rest": copies[None]})["hidden"].sum().backward()
        assert [unit.calls for unit in module] == [2, 2]


class Noting(Block):
    """Notes what it computed in lists that it is given."""

    def forward(self, hidden: Tensor, notes: list[Any]) -> Tensor:  # type: ignore[override]
        hidden = super().forward(hidden)
        notes.append(hidden.detach())
        return hidden


@pytest.mark.parametrize("before", [[], [torch.ones(1)]])
def test_a_repetition_writes_into_lists_of_its_own(before: list[Tensor]) -> None:
    unit = Noting()
    recompute_units(unit, [""], 1)
    notes = [*before]
    loss = unit(torch.ones(2, 16), notes).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
    assert unit.calls == 3 and len(notes) == len(before) + 1


def test_an_input_that_changed() -> None:
    module = stack(1, count=1)
    inputs = torch.ones(2, 16)
    loss = module(inputs).sum()
    inputs.add_(1)
    with pytest.raises(Refused, match="input of 0 was changed in place"):
        loss.backward()


def test_a_forward_that_cannot_be_repeated() -> None:
    class Counting(Block):
        def forward(self, hidden: Tensor) -> Tensor:
            hidden = super().forward(hidden)
            return torch.tanh(hidden) if self.calls == 2 else hidden

    module = nn.Sequential(Counting())
    recompute_units(module, ["0"], 1)
    with pytest.raises(
        RuntimeError, match="forward of 0 saved 4 tensors, but its recomputation saved 5"
    ):
        module(torch.ones(2, 16)).sum().backward()
