"""Tensors inside of containers: each is found and exchanged, and containers keep what they are."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import torch

from shardproof.impls.reference.parts.nested import mapped, tensors_in


class Pair(NamedTuple):
    hidden: Any
    told: Any


class Output(OrderedDict[str, Any]):
    """As libraries of models have: with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


def nested() -> tuple[Any, list[torch.Tensor]]:
    tensors = [torch.full((1,), float(n)) for n in range(5)]
    first, second, third, fourth, fifth = tensors
    output = Output(hidden=second, rest=[third, 7, None])
    return (first, output, Pair(fourth, {"a": (fifth,)}), "word"), tensors


def test_each_tensor_is_found_once_and_in_order() -> None:
    value, tensors = nested()
    assert [float(t) for t in tensors_in(value)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert all(found is own for found, own in zip(tensors_in(value), tensors, strict=True))


def test_tensors_are_exchanged_and_containers_keep_their_types() -> None:
    value, _ = nested()
    made = mapped(value, lambda tensor: tensor + 10)
    assert [float(t) for t in tensors_in(made)] == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert [float(t) for t in tensors_in(value)] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert type(made[1]) is Output and float(made[1].hidden) == 11.0
    assert made[1].rest[1:] == [7, None] and made[3] == "word"
    assert type(made[2]) is Pair and float(made[2].hidden) == 13.0


def test_what_does_not_change_is_the_same_object() -> None:
    """A module may write into a list or a dictionary that it is given."""
    cache: list[torch.Tensor] = []
    value = (torch.ones(1), cache, {"cache": cache})
    same = mapped(value, lambda tensor: tensor)
    assert same is value
    made = mapped(value, lambda tensor: tensor + 1)
    assert made is not value and made[1] is cache and made[2] is value[2]
