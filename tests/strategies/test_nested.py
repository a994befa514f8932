"""Tensors inside of containers: each is found and exchanged, and containers keep what they are."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from shardproof.impls.reference.parts.nested import Copies, alike, mapped, tensors_in


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


@dataclass(frozen=True)
class Record:
    hidden: torch.Tensor
    rest: list[Any]


def test_dataclasses_are_containers() -> None:
    value = Record(torch.zeros(1), [torch.ones(1), 7])
    assert [float(t) for t in tensors_in(value)] == [0.0, 1.0]
    made = mapped(value, lambda tensor: tensor + 10)
    assert type(made) is Record and [float(t) for t in tensors_in(made)] == [10.0, 11.0]
    assert [float(t) for t in tensors_in(value)] == [0.0, 1.0] and made.rest[1] == 7


class Notes(list[Any]):
    """With a constructor and an attribute of its own."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self.title = title


def test_a_copy_of_containers_in_which_nothing_changes() -> None:
    notes = Notes("a")
    notes += [torch.zeros(1), 7]
    value = (notes, {"notes": notes}, (1, 2))
    made = mapped(value, lambda tensor: tensor, keep=False)
    assert made[0] is not notes and made[0] == notes and made[0].title == "a"
    assert made[1] is not value[1] and made[2] is value[2]


def test_containers_are_alike_by_type_keys_and_items() -> None:
    def same(one: torch.Tensor, other: torch.Tensor) -> bool:
        return bool(torch.equal(one, other))

    zero, one = torch.zeros(1), torch.ones(1)
    value = {"a": (zero, [one]), "b": 3}
    assert alike(value, {"a": (torch.zeros(1), [torch.ones(1)]), "b": 3}, same)
    for other in (
        {"b": 3, "a": (zero, [one])},
        {"a": (zero, [one]), "b": True},
        {"a": [zero, [one]], "b": 3},
        {"a": (zero, [one, one]), "b": 3},
        {"a": (zero, [1.0]), "b": 3},
        {"a": Pair(zero, [one]), "b": 3},
        OrderedDict(value),
    ):
        assert not alike(other, value, same), other


def test_what_was_written_into_copies_is_told() -> None:
    value: tuple[Any, ...] = ([torch.zeros(1)], {"old": torch.ones(1)}, [7])
    made = mapped(value, lambda tensor: tensor + 1)
    copies = Copies(value, made)
    made[2].append(8)  # the caller's own
    assert made[2] is value[2] and not copies.changed()
    made[1]["new"] = made[1].pop("old")
    assert copies.changed()
