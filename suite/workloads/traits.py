"""Traits: trigger conditions that make faults show, and the odd modules that create them.

Any workload can carry any combination.  Most traits add a small odd module, whose output is added
to the hidden state at one of four places: ``front`` (after the embedding; registered first),
``inner`` (inside the middle block, hence inside a unit), ``final`` (between norm and head) and
``tail`` (after the blocks; registered last).  The others change the batch or suggest parameter
groups.  Place ``backend`` changes neither model nor data: such a trait asks for disturbances
(``shardproof.backends.disturbances``).

*Conditional* branches must depend on the data, not on the rank, or no single process could repeat
the training.  Each sample therefore carries flag bits inside its inputs (the start token of a name,
a pixel that is 0 in every image).  A branch runs in a micro-batch if one of its samples is flagged,
and adds only to flagged samples.  So the gradient is the same however the batch is cut, but the
ranks and micro-batches that use the branch differ.  Such a forward reads values, so it does not run
on meta or fake tensors.

*Dropout* comes in two forms.  ``dropout_counter`` draws its mask from (seed, step, site, sample,
position).  A key for seed, step and sample travels inside the inputs, beside the flags, so every
cut, stage and repetition draws the same mask.  ``dropout_stateful`` has a generator in its module,
seeded per data coordinate; each forward in training advances it.  Recomputation must first restore
the state of ``module.generator``.

The numbers in ``conditions`` are those of docs/trigger-conditions.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.contract import GroupSpec
from shardproof.workloads.draws import counter_mask
from shardproof.workloads.layers import Linear, Place, Span

#: The data-driven branches and the bit that flags a sample for each.
FLAGS = {
    "conditional_by_rank": 1,
    "conditional_by_micro_batch": 2,
    "conditional_last_micro_batch": 4,
    "conditional_late_step": 8,
    "conditional_early_step": 32,
}

#: Bits of the one sample whose backward overflows, and the steps: first to infinity, later to NaN
#: (the result of infinities that cancel).
OVERFLOW_FLAG, NAN_FLAG = 16, 64
SPIKES = {1: OVERFLOW_FLAG, 4: NAN_FLAG}

#: A model reads one number per sample from its inputs: flags in the low bits, then the dropout key.
KEY_SHIFT = 8

#: Workloads of names, whose samples have positions, and all that compute with real numbers.
NAMES = ("charnames_gpt", "charnames_rnn")
#: Workloads with attention.
ATTENDING = ("charnames_gpt",)
REAL = (*NAMES, "digits_cnn", "digits_penalty", "digits_experts")

#: Groups that ``two_groups`` suggests: biases and norms, which lie between weights in every block.
TWO_GROUPS = (GroupSpec(pattern=r"(bias|norm[^.]*\.weight)$", lr_scale=0.5, weight_decay=0.05),)


@dataclass(frozen=True)
class Trait:
    """``about`` in one line; the trigger conditions it serves; the workloads that can carry it.

    ``micro_batches``: the smallest number of micro-batches for which it has an effect.
    ``by_cut``: gradients depend, by definition, on how the global batch is cut.
    """

    about: str
    conditions: tuple[int, ...]
    place: Literal["front", "inner", "tail", "final", "model", "batch", "optimizer", "backend"]
    applies_to: tuple[str, ...] = REAL
    micro_batches: int = 1
    by_cut: bool = False


TRAITS: dict[str, Trait] = {
    "tied": Trait("one weight used by two layers of one unit", (5,), "inner"),
    "tied_over_units": Trait("one weight used by two units: embedding, head", (5,), "model"),
    "frozen": Trait("parameters without gradients next to trainable ones", (7,), "front"),
    "unused": Trait("parameters that no forward uses, registered first and last", (6,), "front"),
    "conditional_by_rank": Trait("a branch for the first half of the batch", (6, 22), "front"),
    "conditional_by_micro_batch": Trait(
        "a branch that only the first micro-batch of a step uses", (6, 8), "front", micro_batches=2
    ),
    "conditional_last_micro_batch": Trait(
        "a branch that only the last micro-batch of a step uses", (6, 8), "front", micro_batches=2
    ),
    "conditional_late_step": Trait("a branch that all ranks use, but in step 0", (6, 19), "front"),
    "conditional_early_step": Trait("a branch that all ranks use in step 0 only", (6, 11), "front"),
    "module_twice": Trait("a module that runs twice in one forward", (6, 5), "inner"),
    "scalar": Trait("a parameter without dimensions", (17, 4), "final"),
    "one_element": Trait("a parameter with one element", (17, 4, 2), "final"),
    "empty": Trait("a parameter with no elements", (17, 4), "inner"),
    "prime_sized": Trait("parameters whose first dimension is 13", (4, 1), "inner"),
    "smaller_than_world": Trait("parameters with 2 rows or 2 elements", (4, 1), "inner"),
    "non_contiguous": Trait("a parameter that is a transposed view", (17,), "inner"),
    "two_groups": Trait("biases and norms with their own rate and decay", (7,), "optimizer"),
    "rebound_buffer": Trait("a buffer that every forward rebinds", (13, 3), "front"),
    "unequal_tokens": Trait("few valid targets in early samples, many in later", (9,), "batch"),
    "one_rank_without_tokens": Trait("no valid target in the batch's second half", (9,), "batch"),
    "variable_lengths": Trait("lengths end at the last valid target", (20, 9), "batch", NAMES),
    "ignore_index": Trait("ignored targets are -100, which is not a class", (16, 9), "batch"),
    "unequal_micro_batches": Trait("odd data coordinates run one more", (8, 22), "batch"),
    "incomplete_window": Trait(
        "a last window with half as many micro-batches", (8, 20), "batch", micro_batches=2
    ),
    "rotating_shares": Trait("shares move on by a data coordinate a step", (8, 22), "batch"),
    "short_epochs": Trait("epochs of 2.5 batches; half of one is left out", (26,), "batch"),
    "dropout_counter": Trait("its mask depends on seed, step, sample, position", (14,), "front"),
    "dropout_stateful": Trait(
        "dropout with its own generator, seeded per data coordinate", (14,), "inner", by_cut=True
    ),
    "rotary": Trait(
        "queries and keys turn with their position in the document", (35,), "model", ATTENDING
    ),
    "packed": Trait(
        "samples of several documents, which do not see each other", (35,), "batch", ATTENDING
    ),
    "overflow_on_one_rank": Trait(
        "the backward of the last sample is infinite in step 1 and NaN in step 4",
        (12, 9),
        "front",
        tuple(name for name in REAL if name != "digits_penalty"),  # its forward has a backward
    ),
    "late_results": Trait("results of calls arrive only at their wait", (21,), "backend"),
    "poisoned_buffers": Trait(
        "receive buffers hold NaN until their call has been waited for", (21,), "backend"
    ),
    "skewed_ranks": Trait("ranks sleep a little before some of their calls", (21,), "backend"),
}

#: Traits that leave a model of integers exact.
_EXACT = (
    *("tied_over_units", "frozen", "unequal_tokens", "one_rank_without_tokens"),
    *("unequal_micro_batches", "incomplete_window", "variable_lengths", "short_epochs"),
    "rotating_shares",
    *("late_results", "poisoned_buffers", "skewed_ranks"),
)
for _name in _EXACT:
    TRAITS[_name] = replace(TRAITS[_name], applies_to=(*TRAITS[_name].applies_to, "dyadic_mlp"))


def suggested_groups(traits: Iterable[str]) -> tuple[GroupSpec, ...]:
    """Parameter groups that ``traits`` suggest (empty: none)."""
    return TWO_GROUPS if "two_groups" in traits else ()


# ------------------------------------------------------------------------------- odd modules
# Each maps the hidden state (features last) to a term that is added to it.


class OneLayer(nn.Module):
    """A part of a block that consists of one linear layer."""

    def __init__(self, width: int, place: Place) -> None:
        super().__init__()
        self.layer = Linear(width, width, **place)


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self, width: int, place: Place) -> None:
        super().__init__()
        self.first, self.second = (Linear(width, width, **place) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(..., width)`` to values of the same shape."""
        return self.second(torch.tanh(self.first(hidden)))


class Branch(OneLayer):
    """A layer whose output is added to the block."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(..., width)`` to values of the same shape."""
        return torch.tanh(self.layer(hidden))


class Frozen(Branch):
    """A branch whose weight is not trained."""

    def __init__(self, width: int, place: Place) -> None:
        super().__init__(width, place)
        self.layer.weight.requires_grad_(False)


class Unused(OneLayer):
    """A layer that no forward calls."""

    calls: ClassVar[Mapping[str, int]] = {"layer": 0}

    def forward(self, hidden: Tensor) -> None:
        """Nothing: the layer gets no gradient."""
        return


class Twice(OneLayer):
    """A layer that each forward calls two times."""

    #: Child -> calls per forward, where not one.
    calls: ClassVar[Mapping[str, int]] = {"layer": 2}

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(..., width)`` to values of the same shape."""
        return self.layer(torch.tanh(self.layer(hidden)))


class Scale(nn.Module):
    """A factor of shape ``()`` or ``(1,)`` on the final hidden state, hence on the logits.

    The gradient of a single number is a sum over all targets.  If it cancels to nothing, no
    relative bound holds.  Here most terms have one sign: an untrained model is overconfident.
    """

    def __init__(self, shape: tuple[int, ...], place: Place) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.empty(shape, **place))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(..., width)`` to values of the same shape."""
        return (0.5 + 0.5 * self.factor) * hidden


class Empty(nn.Module):
    """A layer with no outputs; the sum over them is 0."""

    def __init__(self, width: int, place: Place) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, width, **place))

    def forward(self, hidden: Tensor) -> Tensor:
        """A sum over no elements, ``(..., 1)``, of a weight without rows."""
        return F.linear(hidden, self.weight).sum(-1, keepdim=True)


class Narrow(nn.Module):
    """A bottleneck of ``rows``: first dimensions and a bias of that size."""

    def __init__(self, width: int, rows: int, place: Place) -> None:
        super().__init__()
        self.down = Linear(width, rows, **place)
        self.up = nn.Parameter(torch.empty(rows, width, **place))

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(..., width)`` to values of the same shape."""
        return torch.tanh(self.down(hidden)) @ self.up


class Strided(nn.Module):
    """A weight ``(width, width // 2)`` stored column by column."""

    def __init__(self, width: int, place: Place) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(max(1, width // 2), width, **place).t())

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(..., width)`` to values of the same shape."""
        return F.linear(torch.tanh(hidden[..., : self.weight.shape[1]]), self.weight)


class _Spike(torch.autograd.Function):
    """The identity; its gradient is inf where ``infinite`` is set and NaN where ``undefined``."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, infinite: Tensor, undefined: Tensor) -> Tensor:
        ctx.save_for_backward(infinite, undefined)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        infinite, undefined = ctx.saved_tensors
        spike = gradients[0].masked_fill(infinite, torch.inf)
        return spike.masked_fill(undefined, torch.nan), None, None


class Overflow(OneLayer):
    """A layer whose backward overflows for flagged samples; its forward never does.

    Then modules before it in forward have no finite gradient, and modules after it do.  Only ranks
    that own the former can see the overflow.
    """

    def forward(self, hidden: Tensor, flags: Tensor) -> Tensor:
        """``hidden`` ``(samples, ..., width)``; ``flags`` ``(samples,)``: flag bits."""
        added = torch.tanh(self.layer(hidden))
        flags = flags.view(-1, *[1] * (added.dim() - 1))
        spread: Tensor = _Spike.apply(added, flags & OVERFLOW_FLAG != 0, flags & NAN_FLAG != 0)
        return spread


class Rebound(nn.Module):
    """Keeps a running mean of the hidden state in a buffer that it re-binds; adds nothing.

    Like running statistics of a batch norm, the mean depends on the data of this rank and does not
    feed back into training.
    """

    average: Tensor

    def __init__(self, width: int, place: Place) -> None:
        super().__init__()
        self.register_buffer("average", torch.empty(width, **place))

    def forward(self, hidden: Tensor) -> None:
        """Nothing; in training the buffer is bound to a new tensor."""
        if self.training:
            mean = hidden.detach().flatten(0, -2).mean(0)
            self.average = 0.9 * self.average + 0.1 * mean


class CounterDropout(OneLayer):
    """Half of a branch's outputs, chosen by a key per sample; all of them in evaluation.

    ``first_position`` is the position of the first row of ``hidden`` in its sample, or its place
    among ``span.rows``.  Strategies that split positions set it.
    """

    span: Span

    def __init__(self, width: int, place: Place) -> None:
        super().__init__(width, place)
        self.first_position, self.span = 0, Span()

    def forward(self, hidden: Tensor, keys: Tensor) -> Tensor:
        """``hidden`` ``(samples, ..., width)``; ``keys`` ``(samples,)`` of int64."""
        added = torch.tanh(self.layer(hidden))
        if not self.training:
            return added
        rows = self.span.rows
        if rows is not None:
            # A part that is padded has rows behind the last position; nothing depends on them.
            rows = rows[self.first_position :][: added.shape[1]]
            rows = F.pad(rows, (0, added.shape[1] - len(rows)))
        mask = counter_mask(keys, 0, added.shape[1:], self.first_position, rows)
        return added * (2 * mask.to(added.dtype))


class StatefulDropout(OneLayer):
    """Half of a branch's outputs, chosen by the module's own ``generator`` (on the CPU)."""

    def __init__(self, width: int, place: Place) -> None:
        super().__init__(width, place)
        self.generator = torch.Generator()

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(..., width)`` with a mask drawn from the own generator."""
        added = torch.tanh(self.layer(hidden))
        if not self.training:
            return added
        mask = torch.rand(added.shape, generator=self.generator, dtype=torch.float32) < 0.5
        return added * (2 * mask.to(added.device, added.dtype))


_ODD: dict[str, Callable[[int, Place], nn.Module]] = {
    "tied": Tied,
    "frozen": Frozen,
    "unused": Unused,
    **dict.fromkeys(FLAGS, Branch),
    "tied_over_units": Branch,
    "module_twice": Twice,
    "scalar": lambda width, place: Scale((), place),
    "one_element": lambda width, place: Scale((1,), place),
    "empty": Empty,
    "prime_sized": lambda width, place: Narrow(width, 13, place),
    "smaller_than_world": lambda width, place: Narrow(width, 2, place),
    "non_contiguous": Strided,
    "rebound_buffer": Rebound,
    "overflow_on_one_rank": Overflow,
    "dropout_counter": CounterDropout,
    "dropout_stateful": StatefulDropout,
}


class Oddities(nn.Module):
    """Adds what the odd modules ``names`` give to the hidden state, its features on ``dim``."""

    def __init__(self, names: Iterable[str], width: int, dim: int, place: Place) -> None:
        super().__init__()
        self.dim = dim
        for name in names:
            self.add_module(name, _ODD[name](width, place))

    def forward(self, hidden: Tensor, flags: Tensor | None = None) -> Tensor:
        """``hidden`` of any shape, samples first; ``flags`` ``(samples,)``: flag bits and keys."""
        hidden = hidden.movedim(self.dim, -1)
        for name, odd in self.named_children():
            if name == "dropout_counter" and flags is not None:
                hidden = hidden + odd(hidden, flags >> KEY_SHIFT)
            elif name == "overflow_on_one_rank" and flags is not None:
                hidden = hidden + odd(hidden, flags)
            elif name not in FLAGS:
                added = odd(hidden)
                hidden = hidden if added is None else hidden + added
            elif flags is not None and bool((chosen := flags & FLAGS[name] != 0).any()):
                mask = chosen.to(hidden.dtype).view(-1, *[1] * (hidden.dim() - 1))
                hidden = hidden + mask * odd(hidden)
        return hidden.movedim(-1, self.dim)


Where = Literal["front", "inner", "tail", "final"]
#: Where a model may have odd modules.
PLACES: tuple[Where, ...] = get_args(Where)


def oddities(
    where: Where,
    traits: Iterable[str],
    width: int,
    dim: int,
    place: Place,
    also: Iterable[str] = (),
) -> Oddities | None:
    """The odd modules of ``traits`` at one place, or ``None`` if there are none.

    ``also`` names further traits to place here.
    """
    extra = {*also, "unused"} if where == "tail" else {*also}
    names = [n for n in _ODD if n in {*traits} and (TRAITS[n].place == where or n in extra)]
    return Oddities(names, width, dim, place) if names else None
