"""Published models as data, and the model facts that cost models compute from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from shardproof import axes
from shardproof.contract import Options
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, TensorFacts, shape_key
from shardproof.errors import Problem, SelectionError, nearest

_FILES = Path(__file__).parent
#: A number of parameters in place of a model: ``7.5b``, ``1t``, ``350m``.
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kmbt])\Z", re.IGNORECASE)
#: Widths are a multiple of this, so that ranks can share them.
_SPLITS = 128
_POWERS = {"k": 3, "m": 6, "b": 9, "t": 12}
#: Limits far beyond any training: above them digits are lost and tuples of micro-batches grow long.
_MOST, _MOST_PARAMETERS = 1_000_000, 10**15


#: The implementation that trains a shape if none is named.
USUAL = "reference/fsdp"


@dataclass(frozen=True)
class MixtureShape:
    """Experts in place of the MLP, in each layer after the first ``dense`` ones.

    A token chooses ``top_k`` of ``experts`` gated MLPs of width ``ffn``; ``shared`` more take every
    token, as one MLP.  ``balanced``: a bias for each expert steers its load; it is a buffer
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """

    experts: int
    top_k: int
    ffn: int
    shared: int = 0
    dense: int = 0
    balanced: bool = False


@dataclass(frozen=True)
class LatentShape:
    """Attention whose queries, and whose keys and values, go through vectors of the widths
    ``query`` and ``kv`` (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A head's query and key have ``content`` elements of their own, and ``rotary`` elements, which
    all heads share in the key.  A head's value has ``value`` elements.
    """

    query: int
    kv: int
    content: int
    rotary: int
    value: int


@dataclass(frozen=True)
class ImageShape:
    """Images of ``side`` x ``side`` pixels, cut into squares of ``patch`` x ``patch``; one class
    for each.  ``vocab`` counts classes.  A position before the patches stands for the whole image.
    """

    side: int
    patch: int
    channels: int = 3


#: Keys of ``models.yaml`` whose values are mappings.
_NESTED = {"mixture": MixtureShape, "latent": LatentShape, "image": ImageShape}


@dataclass(frozen=True)
class Shape:
    """A Transformer; the keys of ``models.yaml``.

    ``parameters`` counts those of the published checkpoint, balancing biases among them.
    ``layers = 0``: only the number of parameters is known, as one tensor.  ``attention``: whether
    the matrix of scores is kept (``math``) or computed again (``flash``).
    """

    name: str
    parameters: int = 0
    layers: int = 0
    hidden: int = 1
    heads: int = 1
    vocab: int = 0
    seq: int = 1
    kv_heads: int = 0
    ffn: int = 0
    mlp: str = "gelu"
    norm: str = "layer"
    bias: str = "none"
    positions: int = 0
    tied: bool = False
    dropout: bool = False
    attention: str = "flash"
    rounded: bool = False
    mixture: MixtureShape | None = None
    latent: LatentShape | None = None
    image: ImageShape | None = None

    @property
    def kv(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        """Width of the MLP."""
        return self.ffn or 4 * self.hidden

    def mixture_of(self, layer: int) -> MixtureShape | None:
        """The mixture of experts of ``layer``, if it has one."""
        return self.mixture if self.mixture and layer >= self.mixture.dense else None


@dataclass(frozen=True)
class BatchSize:
    """The work of a step: samples of a micro-batch, positions, and micro-batches of each rank."""

    samples: int = 1
    positions: int = 0
    micro_batches: int = 1

    def __post_init__(self) -> None:
        for name, least in (("samples", 1), ("positions", 0), ("micro_batches", 1)):
            if type(value := getattr(self, name)) is not int or not least <= value <= _MOST:
                what = f"no number of {name.replace('_', '-')}"
                remedy = f"give a whole number from {least} to {_MOST:,}"
                raise SelectionError(Problem(what, remedy, str(value)))


@cache
def models() -> Mapping[str, Shape]:
    """Name -> model, as in ``models.yaml``."""
    given = yaml.safe_load((_FILES / "models.yaml").read_text(encoding="utf-8"))
    found = {
        str(name): Shape(str(name), **{k: _NESTED[k](**v) if k in _NESTED else v for k, v in keys})
        for name, keys in ((name, of.items()) for name, of in given.items())
    }
    return {name: _filled(shape) if shape.rounded else shape for name, shape in found.items()}


def _filled(shape: Shape) -> Shape:
    """A round model with MLPs as much wider as its number of parameters lets them be."""
    plain = elements(replace(shape, rounded=False, parameters=0))
    # One more of the MLP's width takes a row of one matrix and a column of the other.
    wider = (shape.parameters - plain) // (shape.layers * 2 * shape.hidden)
    return replace(shape, ffn=shape.inner + wider // _SPLITS * _SPLITS)


@cache
def accountings() -> Mapping[str, Mapping[str, Any]]:
    """The accountings of ``accountings.yaml`` by id."""
    found: Mapping[str, Mapping[str, Any]]
    found = yaml.safe_load((_FILES / "accountings.yaml").read_text(encoding="utf-8"))
    return found


def known(name: str, among: Mapping[str, Any], noun: str) -> Any:
    """``among[name]``.

    :raises SelectionError: there is none; the nearest is named.
    """
    if name not in among:
        remedy = nearest(str(name), among, f"{noun}s")
        raise SelectionError(Problem(f"unknown {noun}", remedy, str(name)))
    return among[name]


def model(name: str) -> Shape:
    """The model called ``name``, the round one of so many parameters (``7.0b``: ``7b``), or else so
    many parameters (``7.5b``) without layers.

    :raises SelectionError: neither; the nearest model is named.
    """
    if (count := _COUNT.match(name)) and name.lower() not in models():
        size = float(count[1]) * 10 ** _POWERS[count[2].lower()]
        if not 0.5 <= size <= _MOST_PARAMETERS:
            raise SelectionError(
                Problem("parameter count out of range", "write 7.5b, for example", name)
            )
        alike = (s for s in models().values() if s.rounded and s.parameters == round(size))
        return next(alike, Shape(name, parameters=round(size)))
    if name[:1].isdigit() and not get_close_matches(name.lower(), models(), 1):
        raise SelectionError(Problem("unknown model", "write a size such as 7.5b or 350m", name))
    found: Shape = known(name.lower(), models(), "model")
    return found


def elements(shape: Shape) -> int:
    """Elements of a checkpoint: parameters, and biases that balance experts."""
    parameters = sum(math.prod(size) for _, size, _, _ in _tensors(shape))
    return parameters + sum(b.numel for b in buffers(shape) if b.dtype in ITEMSIZE)


def tensors(shape: Shape, dtype: str, trains: bool = True) -> tuple[TensorFacts, ...]:
    """Every parameter of ``shape``, in the order of registration."""
    found = [
        TensorFacts(name, size, dtype, trains and bool(size[0]), owners, units=units)
        for name, size, owners, units in _tensors(shape)
    ]
    if shape.parameters and shape.layers:
        assert elements(shape) == shape.parameters, shape.name
    return tuple(found)


def buffers(shape: Shape) -> tuple[TensorFacts, ...]:
    """The load of experts and their biases, for each mixture that biases balance."""
    return tuple(
        TensorFacts(f"blocks.{index}.mlp.{name}", (mixture.experts,), dtype, False, units=(index,))
        for index in range(shape.layers)
        if (mixture := shape.mixture_of(index)) and mixture.balanced
        for name, dtype in (("load", "int64"), ("balancing_bias", "float32"))
    )


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], Any]]:
    if not shape.layers:
        yield "layers.weights", (shape.parameters,), ("layers",), (0,)
        return
    last = shape.layers - 1
    for name, size in _embedding(shape):
        owner, is_tied = name.rpartition(".")[0], shape.tied and name == "embed.token.weight"
        yield name, size, (owner, "head") if is_tied else (owner,), (0, last) if is_tied else (0,)
    # A round number of parameters: what the shape lacks, spread over the layers.
    lacking = shape.parameters - elements(replace(shape, rounded=False)) if shape.rounded else 0
    for index in range(shape.layers):
        for name, size in _layer(shape, index):
            full = f"blocks.{index}.{name}"
            yield full, size, (full.rpartition(".")[0],), (index,)
        if own := lacking // shape.layers + (index < lacking % shape.layers):
            yield f"blocks.{index}.rest", (own,), (f"blocks.{index}",), (index,)
    for name, size in _end(shape):
        yield name, size, (name.rpartition(".")[0],), (last,)


def _embedding(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    h = shape.hidden
    if image := shape.image:
        yield "embed.first", (h,)
        yield "embed.patch.weight", (h, image.channels, image.patch, image.patch)
        yield "embed.patch.bias", (h,)
    else:
        yield "embed.token.weight", (shape.vocab, h)
    yield "embed.position.weight", (shape.positions, h)


def _end(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from _norm(shape, "norm", shape.hidden)
    if not shape.tied:
        yield "head.weight", (shape.vocab, shape.hidden)
    if shape.image:
        yield "head.bias", (shape.vocab,)


def _norm(shape: Shape, name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    if shape.norm == "layer":
        yield f"{name}.bias", (width,)


def _layer(shape: Shape, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters of layer ``index``; a gated MLP has gate and up in one matrix, as Megatron-LM."""
    biased = {"none": (), "qkv": ("qkv",), "all": ("qkv", "out", "up", "down")}[shape.bias]
    mixture = shape.mixture_of(index)
    attend = _latent(shape, shape.latent) if shape.latent else _attention(shape)
    feed = _mixture(shape, mixture) if mixture else _mlp(shape, "mlp", shape.inner)
    for norm, parts in (("norm1", attend), ("norm2", feed)):
        yield from _norm(shape, norm, shape.hidden)
        for name, size in parts:
            yield name, size
            layer = name.removesuffix(".weight")
            if layer.rpartition(".")[2] in biased:
                yield f"{layer}.bias", size[:1]


def _attention(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    rows = (shape.heads + 2 * shape.kv) * (shape.hidden // shape.heads)
    yield "attention.qkv.weight", (rows, shape.hidden)
    yield "attention.out.weight", (shape.hidden, shape.hidden)


def _latent(shape: Shape, of: LatentShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, heads = shape.hidden, shape.heads
    yield "attention.query_down.weight", (of.query, h)
    yield from _norm(shape, "attention.query_norm", of.query)
    yield "attention.query_up.weight", (heads * (of.content + of.rotary), of.query)
    yield "attention.kv_down.weight", (of.kv + of.rotary, h)
    yield from _norm(shape, "attention.kv_norm", of.kv)
    yield "attention.kv_up.weight", (heads * (of.content + of.value), of.kv)
    yield "attention.out.weight", (h, heads * of.value)


def _mlp(shape: Shape, name: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.up.weight", (width * (2 if shape.mlp == "swiglu" else 1), shape.hidden)
    yield f"{name}.down.weight", (shape.hidden, width)


def _mixture(shape: Shape, of: MixtureShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "mlp.router.weight", (of.experts, shape.hidden)
    for name, size in _mlp(shape, "mlp.experts", of.ffn):
        yield name.removesuffix(".weight"), (of.experts, *size)
    if of.shared:
        yield from _mlp(shape, "mlp.shared", of.shared * of.ffn)


def facts_of(
    shape: Shape, axes: Mapping[str, int], options: Options, accounting: str, batch: BatchSize
) -> ModelFacts:
    """The facts of ``shape`` for cost models on a mesh; ``options``: an implementation's."""
    about = known(accounting, accountings(), "accounting")
    # A size without layers is one unit: what is sent does not depend on how many there are.
    blocks = [f"blocks.{index}" for index in range(shape.layers)] or ["layers"]
    owners = {name for found in _tensors(shape) for name in found[2]}
    modules = {"": "Model", "blocks": "ModuleList", **dict.fromkeys(blocks, "Block")}
    modules |= {name: "Linear" for name in sorted(owners) if name not in modules}
    roles = {"embed.position": "positions"}
    if not shape.image:
        roles |= {"embed.token": "embedding", "head": "classes"}
    kinds = {"qkv": "heads", "out": "row", "up": "column", "down": "row"}
    kinds |= {"experts": "expert", "router": "router"}
    if shape.latent:
        # All heads share a part of the key, so no rule splits this attention over ranks.
        del kinds["out"]
    layers = (found[2][0] for found in _tensors(shape))
    roles |= {name: kinds[kind] for name in layers if (kind := name.rpartition(".")[2]) in kinds}
    given = (batch.samples, batch.positions or shape.seq)
    facts = ModelFacts(
        axes=axes,
        options=dict(options),
        parameters=tensors(shape, about["built"], about.get("trains", True)),
        buffers=buffers(shape),
        modules=modules,
        units=tuple(blocks),
        roles=roles,
        heads={f"{b}.attention": (shape.heads, shape.kv) for b in blocks if not shape.latent},
        label_smoothing=0.0,
        hidden={shape_key(given): (given[0] * given[1] * shape.hidden,) * (shape.layers - 1)}
        if shape.layers
        else {},
    )
    return in_accounting(facts, accounting, batch.micro_batches, given)


def in_accounting(
    facts: ModelFacts, accounting: str, micro_batches: int, given: tuple[int, ...] = ()
) -> ModelFacts:
    """``facts`` with the precision and optimizer of an accounting, and so many micro-batches."""
    about = known(accounting, accountings(), "accounting")
    policy = {name: about[name] for name in ("parameters", "reduce") if name in about}
    shares = axes.size(facts.axes, axes.sharing(facts.axes))
    return replace(
        facts,
        options={**facts.options, **({"precision": policy} if policy else {})},
        optimizer=about.get("optimizer", "adamw"),
        momentum=0.0,
        micro_batches=(micro_batches,) * shares,
        inputs=((((given,) * micro_batches,),) * shares,) if given else (),
    )


def itemsize(facts: ModelFacts) -> int:
    """Bytes of an element that is computed with."""
    trained = facts.trainable or facts.parameters
    return ITEMSIZE[facts.compute(trained[0].dtype)]
