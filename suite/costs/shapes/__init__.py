"""Published models as data, and the model facts that cost models compute from."""

from __future__ import annotations

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
#: What widths are a multiple of, so that ranks can share them.
_SPLITS = 128
_POWERS = {"k": 3, "m": 6, "b": 9, "t": 12}
#: What no training comes near to: beyond it digits are lost, and tuples of micro-batches are long.
_MOST, _MOST_PARAMETERS = 1_000_000, 10**15


#: The implementation that trains a shape where none is named.
USUAL = "reference/fsdp"


@dataclass(frozen=True)
class Shape:
    """A GPT-like model; the keys of ``models.yaml``.

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

    @property
    def kv(self) -> int:
        """Key and value heads."""
        return self.kv_heads or self.heads

    @property
    def inner(self) -> int:
        """Width of the MLP."""
        return self.ffn or 4 * self.hidden


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
    found = {str(name): Shape(str(name), **keys) for name, keys in given.items()}
    return {name: _filled(shape) if shape.rounded else shape for name, shape in found.items()}


def _filled(shape: Shape) -> Shape:
    """A round model with MLPs as much wider as its number of parameters lets them be."""
    plain = sum(t.numel for t in tensors(replace(shape, rounded=False, parameters=0), "float32"))
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


def tensors(shape: Shape, dtype: str, trains: bool = True) -> tuple[TensorFacts, ...]:
    """Every parameter of ``shape``, in the order of registration."""
    found = [
        TensorFacts(name, size, dtype, trains and bool(size[0]), owners, units=units)
        for name, size, owners, units in _tensors(shape)
    ]
    if shape.parameters and shape.layers:
        assert sum(t.numel for t in found) == shape.parameters, shape.name
    return tuple(found)


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], Any]]:
    if not shape.layers:
        yield "layers.weights", (shape.parameters,), ("layers",), (0,)
        return
    h, last = shape.hidden, shape.layers - 1
    ends = ("embed.token", "head") if shape.tied else ("embed.token",)
    yield "embed.token.weight", (shape.vocab, h), ends, (0, last) if shape.tied else (0,)
    yield "embed.position.weight", (shape.positions, h), ("embed.position",), (0,)
    inside = [*_layer(shape)]
    ends_numel = shape.vocab * h * (1 if shape.tied else 2) + shape.positions * h
    ends_numel += h * (2 if shape.norm == "layer" else 1)
    layer = sum(size[0] * (size[1] if len(size) > 1 else 1) for _, size in inside)
    # A round number of parameters: what the shape lacks, spread over the layers.
    lacking = shape.parameters - ends_numel - shape.layers * layer if shape.rounded else 0
    for index in range(shape.layers):
        for name, size in inside:
            full = f"blocks.{index}.{name}"
            yield full, size, (full.rpartition(".")[0],), (index,)
        if own := lacking // shape.layers + (index < lacking % shape.layers):
            yield f"blocks.{index}.rest", (own,), (f"blocks.{index}",), (index,)
    yield "norm.weight", (h,), ("norm",), (last,)
    if shape.norm == "layer":
        yield "norm.bias", (h,), ("norm",), (last,)
    if not shape.tied:
        yield "head.weight", (shape.vocab, h), ("head",), (last,)


def _layer(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parameters of one layer; a gated MLP has gate and up in one matrix, as Megatron-LM."""
    h, head = shape.hidden, shape.hidden // shape.heads
    biased = {"none": (), "qkv": ("qkv",), "all": ("qkv", "out", "up", "down")}[shape.bias]
    rows = (shape.heads + 2 * shape.kv) * head
    up = shape.inner * (2 if shape.mlp == "swiglu" else 1)
    linear = {"attention.qkv": (rows, h), "attention.out": (h, h), "mlp.up": (up, h)}
    linear["mlp.down"] = (h, shape.inner)
    for name, before in (("norm1", "attention"), ("norm2", "mlp")):
        yield f"{name}.weight", (h,)
        if shape.norm == "layer":
            yield f"{name}.bias", (h,)
        for layer, size in linear.items():
            if layer.startswith(before):
                yield f"{layer}.weight", size
                if layer.rpartition(".")[2] in biased:
                    yield f"{layer}.bias", size[:1]


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
    roles = {"embed.token": "embedding", "embed.position": "positions", "head": "classes"}
    kinds = {"qkv": "heads", "out": "row", "up": "column", "down": "row"}
    layers = (found[2][0] for found in _tensors(shape))
    roles |= {name: kinds[kind] for name in layers if (kind := name.rpartition(".")[2]) in kinds}
    given = (batch.samples, batch.positions or shape.seq)
    facts = ModelFacts(
        axes=axes,
        options=dict(options),
        parameters=tensors(shape, about["built"], about.get("trains", True)),
        modules=modules,
        units=tuple(blocks),
        roles=roles,
        heads={f"{block}.attention": (shape.heads, shape.kv) for block in blocks},
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
