"""Activations of a user's module: one forward on the device ``meta``, which computes nothing.

Backward needs what autograd saves.  Each storage is counted once, for the block in which it is
saved first, and by how ranks of a tensor axis share it:

    norm     x          outer     whole on each rank; with sequence_parallel each has its positions
    column   x          gathered  whole on each rank
    between column and row,
    row's input         split     the ranks divide it; so are logits of a loss that stays split
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shardproof.costs.model_facts import ModelFacts
from shardproof.costs.shapes.activations import UnitBytes
from shardproof.ledgers.program_order import nested_tensors

#: Roles of layers whose output is split, and of the one whose input is.
_COLUMNS, _ROW, _LOGITS = ("column", "heads"), "row", "classes"


class Forward:
    """The storages that one forward of ``model`` leaves for backward, by block."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...], facts: ModelFacts) -> None:
        self.facts = facts
        self._names = facts.units
        self._place = 0  # 0: before the blocks; n: in block n - 1 or behind it
        self._is_inside, self._is_split, self._is_column = False, False, False
        self._own = set[int]()
        self._kept: dict[int, tuple[int, str, Any]] = {}
        self._inputs: Counter[int] = Counter()
        #: Elements of what each block gives.
        self.outputs: Counter[int] = Counter()
        #: Why it could not run; empty: it did.
        self.problem = ""
        #: Trained parameters in the order in which backward would complete their gradients.
        self.completed: tuple[str, ...] = ()
        state, given = _on_meta(model, inputs, facts)
        self._own = {_key(t) for t in nested_tensors((state, given))}
        try:
            with self._hooked(model), torch.autograd.graph.saved_tensors_hooks(self._note, _same):
                result = functional_call(model, state, given)
        except Exception as error:  # noqa: BLE001 - the model is the user's
            self.problem = f"its forward on the meta device raised {type(error).__name__}: {error}"
        else:
            self.completed = _completed(result, {id(t): name for name, t in state.items()})
            del result

    def units(self) -> tuple[list[UnitBytes], tuple[float, float]]:
        """Bytes of each block on a rank, and of what lies before and behind the blocks."""
        ranks, sizes = self.facts.parts("widths"), defaultdict[int, float](float)
        by = {"split": ranks, "gathered": 1, "outer": 1}
        if self.facts.option("sequence_parallel", False):
            by["outer"] = ranks
        for place, how, storage in self._kept.values():
            sizes[place] += storage.nbytes() / by[how]
        blocks = len(self._names)
        units = [UnitBytes(sizes[n], self._inputs[n] / by["outer"]) for n in range(1, blocks + 1)]
        return units, (sizes[0], sizes[blocks + 1])

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (key := _key(tensor)) not in self._own:
            how = "gathered" if self._is_column else "split" if self._is_split else "outer"
            # The storage is kept, so that no other one gets its key.
            self._kept.setdefault(key, (self._place, how, storage))
        return tensor

    @contextmanager
    def _hooked(self, model: nn.Module) -> Iterator[None]:
        roles = self.facts.roles if self.facts.parts("widths") > 1 else {}
        with ExitStack() as hooks:
            for number, name in enumerate(self._names, 1):
                unit = model.get_submodule(name)
                for handle in (
                    unit.register_forward_pre_hook(partial(self._begin, number), with_kwargs=True),
                    unit.register_forward_hook(partial(self._end, number)),
                ):
                    hooks.callback(handle.remove)
            for name, module in model.named_modules():
                if (role := roles.get(name)) in (*_COLUMNS, _ROW, _LOGITS):
                    for handle in (
                        module.register_forward_pre_hook(partial(self._enter, role)),
                        module.register_forward_hook(partial(self._leave, role)),
                    ):
                        hooks.callback(handle.remove)
            yield

    def _begin(self, number: int, module: Any, args: Any, kwargs: Any) -> None:
        self._place = number
        self._inputs[number] = sum(
            t.nbytes for t in nested_tensors((args, kwargs)) if t.is_floating_point()
        )

    def _end(self, number: int, module: Any, args: Any, output: Any) -> None:
        self.outputs[number] = sum(t.numel() for t in nested_tensors(output))
        if number == len(self._names):
            self._place = number + 1

    def _enter(self, role: str, module: Any, args: Any) -> None:
        self._is_column = role != _ROW

    def _leave(self, role: str, module: Any, args: Any, output: Any) -> None:
        self._is_column = False
        is_loss_split = bool(self.facts.option("loss_parallel", False))
        self._is_split = role in _COLUMNS or (role == _LOGITS and is_loss_split)


def _on_meta(
    model: nn.Module, inputs: tuple[Any, ...], facts: ModelFacts
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """Parameters and buffers, and the inputs, without values and in the dtypes of computing."""

    def moved(tensor: Any, dtype: str | None = None) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        kind = getattr(torch, dtype) if dtype and tensor.is_floating_point() else tensor.dtype
        like = torch.empty_like(tensor, device="meta", dtype=kind)
        return like.requires_grad_(tensor.requires_grad)

    def computed(dtype: Any) -> str:
        return facts.compute(str(dtype).removeprefix("torch."))

    state = {name: moved(p, computed(p.dtype)) for name, p in model.named_parameters()}
    state |= {name: moved(b) for name, b in model.named_buffers()}
    # Inputs in the dtype that the model is built in are computed with like its parameters.
    built = next((p.dtype for p in model.parameters()), None)
    given = tuple(
        moved(x, computed(built) if built and getattr(x, "dtype", None) == built else None)
        for x in inputs
    )
    return state, given


def _completed(result: Any, names: Mapping[int, str]) -> tuple[str, ...]:
    """Names of the parameters that ``result`` depends on, those that forward used last first."""
    first: dict[str, int] = {}
    nodes = [t.grad_fn for t in nested_tensors(result) if t.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node: Any = nodes.pop()
        for inner, _ in node.next_functions:
            if hasattr(inner, "variable"):
                # Backward goes from the last operation to the first: the gradient of a tied
                # parameter is complete when it has come to the first use.
                name, number = names.get(id(inner.variable), ""), node._sequence_nr()
                first[name] = min(number, first.get(name, number))
            elif inner is not None and inner not in seen:
                seen.add(inner)
                nodes.append(inner)
    return tuple(sorted(first.keys() - {""}, key=lambda name: -first[name]))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _same(tensor: Tensor) -> Tensor:
    return tensor
