"""Typed values and their JSON forms: what travels to leaders, and what is stored."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter

T = TypeVar("T")

_adapters: dict[object, TypeAdapter[Any]] = {}


class StoredModel(BaseModel):
    """Part of a line of ``cases.jsonl``: a field that was neither given nor read is not written,
    and what other versions wrote besides is passed over.
    """

    model_config = ConfigDict(frozen=True)

    def to_dict(self) -> dict[str, Any]:
        """The JSON form; ``model_validate`` reads it."""
        return self.model_dump(exclude_unset=True)


class NoFigures(StoredModel):
    """Why there are no figures, where they would stand."""

    problem: str


def from_plain(cls: type[T], data: object) -> T:
    """An instance of the dataclass ``cls`` from its JSON form, nested dataclasses included.

    :raises ValueError: data that does not fit.
    """
    if cls not in _adapters:
        _adapters[cls] = TypeAdapter(cls)
    value: T = _adapters[cls].validate_python(data)
    return value


def to_json(value: object) -> str:
    """JSON of nested plain data and dataclasses; :func:`from_plain` reads it back."""
    return json.dumps(value, default=asdict)
