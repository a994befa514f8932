"""``charnames_gpt``: a byte-level GPT that learns to spell Unicode character names.

Pre-layer-norm blocks, learned positions, fused QKV with bias, MLP with biases, final norm; the
head is untied, or shares the embedding's weight (``tied: true`` or trait ``tied_over_units``).
With ``norm: rms`` no mean is taken out (RMSNorm, arXiv 1910.07467): then a constant on the hidden
state shows, which every layer norm behind it would hide.  With ``layout: columns`` what a block,
and each norm in it, gives lies in memory feature by feature, not position by position.  With
``passes: nested`` blocks take and return their hidden state inside of a dictionary and a tuple.
Attention is written out, so that it is the same function in every dtype and on every device;
``kv_heads`` below ``heads`` makes it grouped-query attention (arXiv 2305.13245).  Only
``CoreAttention`` looks at other positions than its own.  With trait ``rotary`` queries and keys
turn with their position, as well (arXiv 2104.09864).
``label_smoothing`` is part of the loss, and so is ``confidence_penalty`` times the negative entropy
of the predictions (arXiv 1701.06548), a second function of the logits.  With ``experts`` every MLP
is a mixture of so many (``workloads/mixture.py``).  With ``first_step: head``
the head learns alone in step 0: every other parameter is without a gradient, so that whole shares
of ranks are.

A sample is the tail of a name from a random word on: ``start, L, E, T, T, E, R, ...``.  The start
token is ``1 + flags`` (flags: see ``workloads.traits``), the end token 0.  Names shorter than
the sequence leave masked targets, so token counts are unequal by nature.  With trait ``packed`` a
sample is filled with the last words of names, each a document of its own: positions count from its
start token 1, and attention sees nothing before that.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof.contract import CrossEntropy, LossTerm, MicroBatch, Role
from shardproof.workloads import data, mixture
from shardproof.workloads.base import Found, Picks, Region, Samples, Workload, WorkloadFamily
from shardproof.workloads.knobs import Knob, Params, WorkloadError
from shardproof.workloads.layers import (
    Embedding,
    Linear,
    Passed,
    Place,
    Span,
    Stack,
    bare,
    nested,
    tie,
)
from shardproof.workloads.traits import FLAGS, KEY_SHIFT, PLACES, CounterDropout, Oddities, oddities

#: Letters end at byte 90.
SMALLEST_VOCABULARY = 91
NORMS: Mapping[str, type[nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


class Embed(nn.Module):
    """Token plus position embedding: ``(samples, positions)`` of int64 -> ``(..., width)``.

    It takes whole samples, and embeds the positions that ``span`` names.
    """

    roles: ClassVar[Mapping[str, Role]] = {"token": "embedding", "position": "positions"}

    def __init__(self, vocab: int, seq: int, width: int, span: Span, place: Place) -> None:
        super().__init__()
        self.span = span
        self.token = Embedding(vocab, width, **place)
        self.position = Embedding(seq, width, **place)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens ``(samples, length)`` to ``(samples, length, width)``."""
        tokens = self.span.read(tokens)
        own, rows = self.span.cut(tokens)
        return self.token(own) + self.position(self.span.places(rows))


class CoreAttention(nn.Module):
    """Attention of queries ``(samples, heads, rows, size)`` over keys and values, of which there
    may be fewer heads; it has no parameters.

    A strategy that cuts positions replaces its forward by one that gets keys and values of others.
    """

    def __init__(self, span: Span) -> None:
        super().__init__()
        self.span = span

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The weighted values of each query, in its shape."""
        rows = self.span.held(query.shape[2], query.device)
        return self.attend((query, key, value), rows, rows)

    def attend(self, heads: tuple[Tensor, Tensor, Tensor], rows: Tensor, columns: Tensor) -> Tensor:
        """The same where queries are of positions ``rows``, keys and values of ``columns``."""
        query, key, value = heads
        if query.shape[1] > key.shape[1]:
            shared = query.shape[1] // key.shape[1]
            key, value = (part.repeat_interleave(shared, 1) for part in (key, value))
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return scores.masked_fill(self.span.hides(rows, columns), -math.inf).softmax(-1) @ value


class Attention(nn.Module):
    """Causal self-attention; the rows of ``qkv`` are all queries, all keys, all values.

    Only the size of a head and how many query heads share a key and value head are fixed.  How many
    there are follows from what ``qkv`` gives, so that a shard of its rows attends with its own
    heads: some KV heads with all their query heads, or one KV head with some of them.
    """

    roles: ClassVar[Mapping[str, Role]] = {
        "": "attention",
        "core": "core",
        "qkv": "heads",
        "out": "row",
    }

    def __init__(
        self, params: Params, span: Span, place: Place, *, is_rotary: bool = False
    ) -> None:
        super().__init__()
        width, heads, kv_heads = params["width"], params["heads"], _kv_heads(params)
        self.head_size, self.group = width // heads, heads // kv_heads
        self.span, self.is_rotary = span, is_rotary
        self.core = CoreAttention(span)
        self.qkv = Linear(width, width + 2 * kv_heads * self.head_size, **place)
        self.out = Linear(width, width, **place)

    def forward(self, hidden: Tensor) -> Tensor:
        """Causal attention over ``(samples, length, width)``; the same shape."""
        qkv = self.qkv(hidden)
        samples, length, rows = qkv.shape
        size = self.head_size
        kv_rows = max(1, rows // size // (self.group + 2)) * size
        query, key, value = (
            part.view(samples, length, part.shape[-1] // size, size).transpose(1, 2)
            for part in qkv.split([rows - 2 * kv_rows, kv_rows, kv_rows], -1)
        )
        if self.is_rotary:
            places = self.span.places(self.span.held(length, qkv.device))
            query, key = (_turned(part, places) for part in (query, key))
        mixed = self.core(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(samples, length, rows - 2 * kv_rows))


def _turned(part: Tensor, places: Tensor) -> Tensor:
    """``part`` ``(samples, heads, length, size)``, pairs of features turned by angles that grow
    with ``places``, ``(length,)`` or ``(samples, length)``: arXiv 2104.09864, section 3.4.2.
    """
    half = part.shape[-1] // 2
    # In float64: in a narrow dtype several late positions would share one angle.
    powers = torch.arange(half, device=part.device, dtype=torch.float64) / max(1, half)
    angles = (places[..., None] * 10000.0**-powers).to(torch.float64)
    if angles.dim() > 2:
        angles = angles[:, None]
    cos, sin = angles.cos().to(part.dtype), angles.sin().to(part.dtype)
    one, other, rest = part.split([half, half, part.shape[-1] - 2 * half], -1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos, rest], -1)


class Mlp(nn.Module):
    """``down(gelu(up(x)))`` over four times the width."""

    roles: ClassVar[Mapping[str, Role]] = {"up": "column", "down": "row"}

    def __init__(self, width: int, place: Place) -> None:
        super().__init__()
        self.up = Linear(width, 4 * width, **place)
        self.down = Linear(4 * width, width, **place)

    def forward(self, hidden: Tensor) -> Tensor:
        """Values ``(..., width)`` to values of the same shape."""
        return self.down(F.gelu(self.up(hidden)))


def _mlp(params: Params, place: Place) -> nn.Module:
    """The second half of a block: an MLP, or a mixture of them."""
    width, count = params["width"], params.get("experts", 0)
    if not count:
        return Mlp(width, place)
    shared = [Mlp(width, place) for _ in range(params["shared_experts"])]
    experts = mixture.Experts(count, width, 4 * width, mixture.two_layers, place)
    return mixture.Mixture(params, width, shared, experts, place)


def _in_columns(hidden: Tensor) -> Tensor:
    """The same values, feature by feature in memory."""
    return hidden.mT.contiguous().mT


class Block(nn.Module):
    """A mixer of positions, given with its name, and an MLP, each on the normed hidden state and
    added to it.
    """

    def __init__(
        self, mixer: tuple[str, nn.Module], params: Params, odd: Oddities | None, place: Place
    ) -> None:
        super().__init__()
        kind, module = mixer
        width, norm = params["width"], NORMS[params["norm"]]
        self._kind, self._layout = kind, params["layout"]
        self._is_nested = params["passes"] == "nested"
        self.norm1 = norm(width, **place)
        self.add_module(kind, module)
        self.norm2 = norm(width, **place)
        self.mlp = _mlp(params, place)
        self.odd = odd

    def forward(self, given: Passed) -> Passed:
        """The output of a block: ``(samples, length, width)``, bare or in a container."""
        hidden = bare(given)
        hidden = hidden + self.get_submodule(self._kind)(self.laid(self.norm1(hidden)))
        hidden = hidden + self.mlp(self.laid(self.norm2(hidden)))
        hidden = self.laid(hidden if self.odd is None else self.odd(hidden))
        return nested(hidden) if self._is_nested else hidden

    def laid(self, hidden: Tensor) -> Tensor:
        """``hidden`` in the layout that was asked for; under ``both`` its gradient, too."""
        if self._layout == "both" and hidden.requires_grad:
            hidden = hidden.view_as(hidden)
            hidden.register_hook(_in_columns)
        return hidden if self._layout == "rows" else _in_columns(hidden)


class CharnamesGPT(WorkloadFamily):
    """Samples are ``(positions,)`` tokens; outputs ``(samples, positions, vocab)`` logits."""

    name = "charnames_gpt"
    about = "byte-level GPT on Unicode 3.2 character names"
    digest = data.CHARACTER_NAMES_DIGEST
    knobs: ClassVar = {
        "vocab": Knob(128, SMALLEST_VOCABULARY),
        "width": Knob(32),
        "heads": Knob(4),
        "kv_heads": Knob(None),  # as many as heads
        "layers": Knob(3),
        "seq": Knob(16, 2),
        "tied": Knob(False, choices=(False, True)),
        "label_smoothing": Knob(0.0, choices=(0.0, 0.1, 0.3)),
        "confidence_penalty": Knob(0.0, choices=(0.0, 0.1)),
        "norm": Knob("layer", choices=tuple(NORMS)),
        "layout": Knob("rows", choices=("rows", "columns", "both")),
        "passes": Knob("tensor", choices=("tensor", "nested")),
        "first_step": Knob("all", choices=("all", "head")),
        **mixture.KNOBS,
    }

    sizes: ClassVar = {
        "1m": {"width": 128, "heads": 4, "layers": 5, "seq": 32},
        "3m": {"width": 216, "heads": 12, "layers": 5, "seq": 32},
        "20m": {"width": 576, "heads": 9, "layers": 5, "seq": 32},
    }

    def check(self, params: Params) -> None:
        """Refuse sizes that do not divide each other."""
        sizes = {**params, "kv_heads": _kv_heads(params)}
        for divided, by in (("width", "heads"), ("heads", "kv_heads")):
            if sizes[divided] % sizes[by]:
                whole = f"{divided} = {sizes[divided]}"
                raise WorkloadError(f"{self.name}: {whole} is not divisible by {by} = {sizes[by]}")
        mixture.check(self.name, params)
        if params["first_step"] == "head" and mixture.shows_scores(params):
            raise WorkloadError(
                f"{self.name}: first_step = 'head' trains only the head in step 0, but balance and "
                "z_loss would train all routers in that step; set first_step to 'all'"
            )

    def size(self) -> int:
        """Number of names."""
        return len(data.character_names())

    def model(self, params: Params, traits: Collection[str], place: Place) -> Stack:
        """A small GPT with the layers that traits ask for."""
        width, layers, keyed = params["width"], params["layers"], "dropout_counter" in traits
        span = Span(1 if "packed" in traits else None, int(keyed))
        odd: dict[str, Oddities | None]
        odd = {at: oddities(at, traits, width, -1, place) for at in PLACES}
        inner = [odd["inner"] if index == layers // 2 else None for index in range(layers)]
        kind = mixture.ScoringStack if mixture.shows_scores(params) else Stack
        stack = kind(
            embed=Embed(params["vocab"], params["seq"], width, span, place),
            blocks=[
                Block(self.mixer(params, traits, span, place), params, own, place) for own in inner
            ],
            norm=NORMS[params["norm"]](width, **place),
            head=Linear(width, params["vocab"], **place),
            odd=odd,
            flags=partial(_flags, keyed),
            is_nested=params["passes"] == "nested",
            alone=FLAGS["conditional_early_step"] if params["first_step"] == "head" else 0,
        )
        for part in stack.modules():
            if isinstance(part, CounterDropout):
                part.span = span
        if params["tied"] or "tied_over_units" in traits:
            tie(stack, "embed.token", "head")
        if "frozen" in traits:
            down = "experts.down" if params.get("experts") else "down.weight"
            stack.get_parameter(f"blocks.0.mlp.{down}").requires_grad_(False)
        return stack

    def mixer(
        self, params: Params, traits: Collection[str], span: Span, place: Place
    ) -> tuple[str, nn.Module]:
        """The part of a block that looks at other positions, under its name."""
        return "attention", Attention(params, span, place, is_rotary="rotary" in traits)

    def samples(self, params: Params, picks: Picks) -> Samples:
        """Tails of names, from word number ``draw`` (modulo their number) on; last, the key."""
        names, seq = data.character_names(), params["seq"]
        inputs, targets, valid = [], [], []
        for index, draw, flag in zip(picks.index, picks.draws, picks.flags, strict=True):
            words = names[index].split(" ")
            first = -1 if picks.packed else draw % len(words)
            text = list(" ".join(words[first:]).encode())
            target = [*text, 0]
            given = [1 + flag, *text]
            while picks.packed and len(target) < seq:
                index = (index + 1) % len(names)
                text = list(names[index].split(" ")[-1].encode())
                target, given = [*target, *text, 0], [*given, 1, *text]
            padding = [0] * (seq - len(target))
            inputs.append([*given[:seq], *padding])
            targets.append([*target[:seq], *padding])
            valid.append([True] * (seq - len(padding)) + [False] * len(padding))
        if picks.keys is not None:
            inputs = [[*tokens, key] for tokens, key in zip(inputs, picks.keys, strict=True)]
        return Samples(torch.tensor(inputs), torch.tensor(targets), torch.tensor(valid))

    def cross_entropy(self, params: Params) -> CrossEntropy | None:
        """None where the loss has another term."""
        alone = not params.get("confidence_penalty") and not mixture.shows_scores(params)
        return super().cross_entropy(params) if alone else None

    def terms(self, params: Params) -> Sequence[LossTerm]:
        """The load-balancing loss of a mixture of experts."""
        return mixture.balance(params, partial(_scores, params), params["layers"])

    def depends_on_cut(self, params: Params) -> bool:
        """Whether capacity or balance is that of a part of the batch."""
        return mixture.depends_on_cut(params)

    def loss(self, params: Params, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """The cross-entropy, the penalty on confidence, and the z-loss of routers."""
        weights, logits = micro.weights.reshape(-1), outputs
        penalty = params.get("confidence_penalty", 0.0)
        plain = {**params, "confidence_penalty": 0.0, "balance": "none", "z_loss": False}
        if mixture.shows_scores(params):
            logits = outputs[..., : params["vocab"]]
        loss = super().loss(plain, logits, micro)
        if params.get("z_loss"):
            scores = _scores(params, outputs.to(weights.dtype))
            loss = loss + (weights * mixture.z_loss(scores)).sum()
        if penalty:
            logs = logits.flatten(0, -2).to(weights.dtype).log_softmax(-1)
            loss = loss + penalty * (weights * (logs.exp() * logs).sum(-1)).sum()
        return loss

    def flags(self, params: Params, step: int) -> int:
        """That of the first step, where the head learns alone in it."""
        alone = params["first_step"] == "head" and step == 0
        return FLAGS["conditional_early_step"] if alone else 0

    def is_late(self, params: Params, traits: Collection[str], name: str) -> bool:
        """All but the head, or what it is tied to."""
        tied = params["tied"] or "tied_over_units" in traits
        own = name.startswith("head.") or (tied and name == "embed.token.weight")
        return params["first_step"] == "head" and not own

    def unfit(self, params: Params, lane: str) -> str:
        """In a narrow dtype a token near the border of two experts goes to the other one."""
        if lane != "working_precision" or not params.get("experts"):
            return ""
        return (
            f"{self.name}: with experts, rounding can send tokens to other experts, which changes "
            "the training; use lane fp64"
        )

    def unstaged(self, params: Params) -> str:
        """The last stage has no inputs, whose flags say what learns, and no scores of others."""
        if mixture.shows_scores(params):
            return (
                f"{self.name}: balance and z_loss need the scores of all routers, but a stage has "
                "only its own"
            )
        if params.get("first_step") != "head":
            return ""
        return (
            f"{self.name}: first_step = 'head' needs the inputs, which the last stage does not get"
        )

    def found(self, workload: Workload) -> Found:
        """As by the knobs; keys that turn have biases with a gradient."""
        return Found() if "rotary" in workload.traits else super().found(workload)

    def zero_gradient(self, params: Params) -> dict[str, list[Region]]:
        """The key part of every QKV bias: it adds the same to all scores of a query."""
        width = params["width"]
        keys = width, width + width // params["heads"] * _kv_heads(params)
        return {
            f"blocks.{index}.attention.qkv.bias": [(keys,)] for index in range(params["layers"])
        }


def _scores(params: Params, outputs: Tensor) -> Tensor:
    """The scores of all routers, ``(targets, layers, experts)``, behind the logits."""
    return outputs.flatten(0, -2)[:, params["vocab"] :].unflatten(-1, (-1, params["experts"]))


def _kv_heads(params: Params) -> int:
    return int(params["kv_heads"] or params["heads"])


def _flags(keyed: bool, tokens: Tensor) -> Tensor:
    """Flag bits from the start token, above them the dropout key if there is one."""
    flags = tokens[:, 0] - 1
    return flags + (tokens[:, -1] << KEY_SHIFT) if keyed else flags
