"""Layers without initial values, the rule that gives them, and the shape that all models share.

torch's own layers draw their initial values from the global random generator, which threads share
and which would tie the values to the order of construction.  Here a layer starts uninitialised; a
value depends on the workload's seed and on the tensor's *name* only, so that adding a trait leaves
every other tensor as it was.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _disable_current_modes

from shardproof.contract import Role


class _Uninitialised:
    def reset_parameters(self) -> None:
        """Leave the values as they are."""


class Linear(_Uninitialised, nn.Linear):
    """``nn.Linear`` that starts uninitialised."""


class Embedding(_Uninitialised, nn.Embedding):
    """``nn.Embedding`` that starts uninitialised."""


class Conv2d(_Uninitialised, nn.Conv2d):
    """``nn.Conv2d`` that starts uninitialised."""


#: A position that no sample has.
_BEHIND = 1 << 40


class Span:
    """Which positions of its samples a model computes with, and where documents begin.

    All parts of a model that know positions share one (attribute ``span``).  ``rows``: the numbers
    of these positions (``None``: all, from 0 on); a strategy that cuts positions sets them, and may
    keep those of all ranks as ``parts``.
    ``starts`` ``(samples, positions)``: the first position of each position's document, of whole
    samples (``None``: each sample is one document).
    """

    def __init__(self, begins: int | None = None, behind: int = 0) -> None:
        #: The token that begins a document, and how many inputs stand behind the last position.
        self.begins, self.behind = begins, behind
        self.rows: Tensor | None = None
        self.parts: Sequence[Tensor] | None = None
        self.starts: Tensor | None = None

    def read(self, inputs: Tensor) -> Tensor:
        """Note the documents in ``inputs`` ``(samples, ...)`` of whole samples; their tokens."""
        tokens = inputs[:, : inputs.shape[1] - self.behind]
        if self.begins is not None:
            place = torch.arange(tokens.shape[1], device=tokens.device)
            # The first position begins one, too: its token holds flags.
            begins = (tokens == self.begins) | (place == 0)
            self.starts = torch.where(begins, place, 0).cummax(-1).values
        return tokens

    def cut(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Those of ``tokens``, of whole samples, that are computed, and their positions."""
        if self.rows is None:
            return tokens, torch.arange(tokens.shape[-1], device=tokens.device)
        return tokens[:, self.rows], self.rows

    def held(self, length: int, device: torch.device) -> Tensor:
        """The positions of ``length`` rows; those of padding come after all others."""
        if self.rows is None:
            return torch.arange(length, device=device)
        return F.pad(self.rows, (0, length - len(self.rows)), value=_BEHIND)

    def places(self, rows: Tensor) -> Tensor:
        """Where positions ``rows`` lie in their documents: ``(rows,)`` or ``(samples, rows)``."""
        rows = rows.where(rows < _BEHIND, 0)
        return rows if self.starts is None else rows - self.begin(rows)

    def begin(self, rows: Tensor) -> Tensor:
        """The first position of the document of each of ``rows``; padding has the last one's."""
        assert self.starts is not None
        return self.starts[:, rows.clamp(max=self.starts.shape[1] - 1)]

    def hides(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Whether a row may not see a column, because that comes later, or in another document:
        ``(rows, columns)`` or ``(samples, 1, rows, columns)``.
        """
        later = columns[None, :] > rows[:, None]
        if self.starts is None:
            return later
        other = self.begin(rows)[:, :, None] != self.begin(columns)[:, None]
        return (later | other)[:, None]


#: What a block takes and gives: the hidden state, or a dictionary and a tuple around it.
Passed = Tensor | dict[str, tuple[Tensor]]


def nested(hidden: Tensor) -> Passed:
    """``hidden`` inside of containers."""
    return {"states": (hidden,)}


def bare(given: Passed) -> Tensor:
    """The hidden state in what a block takes or gives."""
    return given if isinstance(given, Tensor) else given["states"][0]


class StackForward(nn.Module):
    """``embed -> front -> blocks -> tail -> norm -> final -> head``: of these what it has."""

    blocks: nn.ModuleList | nn.ModuleDict
    #: Reads the flag bits of the samples from the inputs (see ``workloads.traits``).
    _flags: Callable[[Tensor], Tensor]
    #: Whether blocks pass containers; what parts of a stack pass is one tensor.
    _is_nested: bool
    #: Flag bit of samples of which the head learns alone; 0: there are none.
    _alone: int

    def forward(self, tensor: Tensor) -> Tensor:
        """Inputs or hidden states in, hidden states or outputs (logits) out; the first dimension
        counts samples in all.
        """
        hidden, own = tensor, self._modules
        if "embed" in own:
            hidden = self.get_submodule("embed")(tensor)
        if "front" in own:
            hidden = self.get_submodule("front")(hidden, self._flags(tensor))
        passed: Passed = nested(hidden) if self._is_nested else hidden
        for block in self.blocks.children():
            passed = block(passed)
        hidden = bare(passed)
        for name in ("tail", "norm", "final", "head"):
            if name == "head" and self._alone and bool((self._flags(tensor) & self._alone).all()):
                hidden = hidden.detach()
            if name in own:
                hidden = self.get_submodule(name)(hidden)
        return hidden


class Stack(StackForward):
    """The form of every model here.

    ``odd`` has the modules that traits ask for: ``front`` (registered first, applied after
    ``embed``), ``final`` (between ``norm`` and ``head``) and ``tail`` (registered last, applied
    after the blocks); without such traits they do not exist.
    """

    roles: ClassVar[Mapping[str, Role]] = {"head": "classes"}

    def __init__(
        self,
        *,
        embed: nn.Module,
        blocks: Iterable[nn.Module],
        norm: nn.Module,
        head: nn.Module,
        flags: Callable[[Tensor], Tensor],
        odd: Mapping[str, nn.Module | None],
        is_nested: bool = False,
        alone: int = 0,
    ) -> None:
        super().__init__()
        self._is_nested, self._flags, self._alone = is_nested, flags, alone
        parts = {"embed": embed, "blocks": nn.ModuleList(blocks), "norm": norm, "head": head, **odd}
        for name in ("front", "embed", "blocks", "norm", "final", "head", "tail"):
            if (part := parts.get(name)) is not None:
                self.add_module(name, part)


class StackPart(StackForward):
    """Blocks ``start`` to ``stop - 1`` of ``stack``, with what comes before the first block and
    after the last one.  Shares the stack's modules and keeps their names.
    """

    def __init__(self, stack: Stack, start: int, stop: int) -> None:
        super().__init__()
        self._flags, self._is_nested, self._alone = stack._flags, stack._is_nested, 0
        is_first, is_last = start == 0, stop == len(stack.blocks)
        for name, child in stack.named_children():
            if name == "blocks":
                chosen = {str(i): child.get_submodule(str(i)) for i in range(start, stop)}
                self.blocks = nn.ModuleDict(chosen)
            elif is_first if name in ("front", "embed") else is_last:
                self.add_module(name, child)


def tie(module: nn.Module, first: str, second: str) -> None:
    """Let the layer ``second`` use the weight of ``first`` (dotted names)."""
    weight = module.get_parameter(f"{first}.weight")
    module.get_submodule(second).register_parameter("weight", weight)


_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.BatchNorm2d, nn.GroupNorm)
#: Elements of the largest tensor whose initial value is kept.
_FEW = 1 << 13


def named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module]]:
    """Parameters, then buffers, each once, with the module that owns it (tied: the first owner)."""
    owners = dict(module.named_modules())
    for source in (module.named_parameters(), module.named_buffers()):
        for name, tensor in source:
            yield name, tensor, owners[name.rpartition(".")[0]]


def is_derived(name: str, owner: nn.Module) -> bool:
    """Whether ``name`` is a buffer that its module computes and no state dict holds."""
    return name.rpartition(".")[2] in owner._non_persistent_buffers_set


def initial_value(seed: str, name: str, tensor: Tensor, owner: nn.Module) -> Tensor:
    """The initial value of ``tensor``: fp64 values rounded to fp32 (integers as they are).

    Biases are not 0 and norm weights not 1, so that a fault in either shows in the first step.
    """
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    kind = next((kind for kind in (*_NORMS, nn.Embedding) if isinstance(owner, kind)), nn.Module)
    keep = tensor.numel() <= _FEW and type(tensor) in (Tensor, nn.Parameter)
    return (_kept if keep else _drawn)(seed, name, tensor.shape, kind)


@functools.lru_cache(maxsize=2048)
def _kept(seed: str, name: str, shape: torch.Size, kind: type[nn.Module]) -> Tensor:
    """Drawn once for all ranks and cases that build this model: it must not be changed, and no
    memory ledger counts it.
    """
    with _disable_current_modes():
        return _drawn(seed, name, shape, kind)


def _drawn(seed: str, name: str, shape: torch.Size, kind: type[nn.Module]) -> Tensor:
    leaf = name.rpartition(".")[2]
    generator = torch.Generator().manual_seed(seed_number(f"{seed}/{name}"))
    noise = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    if leaf == "running_var":
        value = 1 + 0.1 * noise.abs()
    elif kind in _NORMS:
        value = 1 + 0.1 * noise if leaf == "weight" else 0.1 * noise
    elif kind is nn.Embedding:
        value = 0.2 * noise
    elif len(shape) == 3:  # matrices of experts, one for each
        value = noise / math.sqrt(shape[-1])
    elif leaf == "weight" and len(shape) > 1:
        value = noise / math.sqrt(max(1, math.prod(shape[1:])))
    elif leaf == "bias":
        value = 0.1 * noise
    else:
        value = 0.3 * noise
    return value.to(torch.float32).to(torch.float64)


def load_state(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into the parameters and buffers of ``module`` with the same names."""
    with torch.no_grad():
        for name, tensor, _ in named_tensors(module):
            tensor.copy_(state[name])


def seed_number(text: str) -> int:
    """A 63-bit seed from ``text``, the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


#: Keyword arguments that place a layer: ``{"device": ..., "dtype": ...}``.
Place = Mapping[str, Any]
