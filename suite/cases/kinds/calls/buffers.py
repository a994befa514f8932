"""The tensors of one judged call: values whose answer is exact in any order, guards, poison.

Every tensor is a view into a base storage that has more elements before, between or behind: guards,
which nobody may write.  A result buffer is filled with poison first.  After the call the whole base
is compared, so a wrong element and one that is written beyond the result show alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: Elements of guard on each side.
GUARD = 3
#: Rows and columns of a part, unless its layout says otherwise.
ROWS, COLUMNS = 3, 5
#: Elements of a row of the layout ``long``.
LONG = 1400
_FOLDS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
#: Sums, and each operand, stay below it: exact in every dtype.
LARGEST = 255
#: Multiplied by it, they take all bits of a wide integer, and no floating-point number holds them.
SPREAD: Mapping[torch.dtype, int] = {torch.int64: 2**54 + 1, torch.int32: 2**23 + 1}


def dtype_of(name: str) -> torch.dtype:
    """torch's dtype of that name."""
    found: torch.dtype = getattr(torch, name)
    return found


def shape_of(layout: str, parts: int | None = None) -> tuple[int, ...]:
    """Shape of one part, or of ``parts`` of them side by side (dimension 0)."""
    if layout == "zero_dim" and parts is None:
        return ()
    if layout in ("zero_dim", "one"):
        return (parts or 1,)
    rows = {"empty": 0, "long": 2}.get(layout, ROWS)
    return rows * (parts or 1), LONG if layout == "long" else COLUMNS


@functools.lru_cache(maxsize=1 << 10)
def pattern(
    dtype: torch.dtype, shape: tuple[int, ...], member: int, salt: int, limit: int
) -> Tensor:
    """The input of ``member``: integers in 0..limit-1 that differ by element, member and salt.

    One tensor for all who ask: to be read only.
    """
    count = math.prod(shape)
    at = torch.arange(count, dtype=torch.int64) + 1
    mixed = (at * 2654435761 + (member + 1) * 40503 * 97 + (salt + 1) * 69069 * 31) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 15)) * 2246822519) & 0xFFFFFFFF
    numbers = ((mixed ^ (mixed >> 13)) % limit).reshape(tuple(shape))
    if dtype.is_complex:
        other = ((mixed >> 7) % limit).reshape(tuple(shape))
        return torch.complex(numbers.double(), other.double()).to(dtype)
    return numbers.to(dtype)


def limit_for(dtype: torch.dtype, reduce: str | None, size: int) -> int:
    """Operands below it have exact results in any order."""
    if dtype == torch.bool:
        return 2
    if reduce == "sum":
        return max(2, LARGEST // size)
    if reduce == "avg":  # each operand is a multiple of the size
        return max(2, LARGEST // size // size)
    return 2 if reduce == "product" else LARGEST


def operand(
    dtype: torch.dtype, shape: Sequence[int], member: int, salt: int, reduce: str | None, size: int
) -> Tensor:
    """The input that ``member`` of ``size`` gives to a call."""
    values = pattern(dtype, tuple(shape), member, salt, limit_for(dtype, reduce, size))
    if reduce == "product":
        return values + 1
    factor = SPREAD.get(dtype, 1) * (size if reduce == "avg" else 1)
    return values if factor == 1 else values * factor


def reduced(reduce: str, values: Sequence[Tensor]) -> Tensor:
    """``values`` combined, exactly."""
    wide = [v.to(torch.complex128 if v.is_complex() else torch.int64) for v in values]
    total = functools.reduce(_FOLDS[reduce], wide)
    return (total // len(values) if reduce == "avg" else total).to(values[0].dtype)


@dataclass
class Buffer:
    """A tensor that a call is given, and what must be in its storage afterwards.

    ``role``: what it is to the call, in words.  ``expected`` is the whole base as it must be;
    ``None`` until :meth:`expect`.  ``stories``: other contents and what each of them would mean.
    """

    role: str
    base: Tensor
    view: Tensor
    before: Tensor = field(init=False)
    expected: Tensor | None = None
    stories: list[tuple[str, Tensor]] = field(default_factory=list)
    #: Views of ``base`` that are given to the call in place of ``view``.
    undefined: bool = False

    def fill(self, values: Tensor | None) -> None:
        """Put ``values`` in, or poison."""
        if values is None:
            self.view.copy_(poison_of(self.view))
        elif self.view.numel():
            self.view.copy_(values.reshape(self.view.shape))
        self.before = self.base.clone()

    def expect(self, values: Tensor | None) -> None:
        """The view must hold ``values`` afterwards (``None``: what it held), the rest as before."""
        self.expected = self.before.clone()
        if values is not None and self.view.numel():
            like(self.expected, self.view).copy_(values.reshape(self.view.shape))

    def problem(self) -> tuple[int, str]:
        """How many elements are wrong, and the sentence that says so; 0: none."""
        assert self.expected is not None
        expected = self.expected
        if self.undefined and self.view.numel():  # but the guards are not
            like(expected, self.view).copy_(self.view)
        wrong = differing(self.base, expected)
        if not bool(wrong.any()):
            return 0, ""
        inside = torch.zeros_like(self.base, dtype=torch.bool)
        if self.view.numel():
            like(inside, self.view).fill_(True)
        if bool((wrong & ~inside).any()):
            at = int((wrong & ~inside).nonzero()[0])
            what = f"memory beyond {self.role} was written, {at} elements into its storage"
            return int(wrong.sum()), what
        got, right = self.view, like(expected, self.view)
        places = differing(got, right)
        place = tuple(places.nonzero()[0].tolist())
        index = f"[{', '.join(map(str, place))}]" if place else ""
        held, due = _shown(got[place]), _shown(right[place])
        count, cause = int(places.sum()), self._cause(got)
        of = f"({count} of {got.numel()} elements)"
        text = f"{self.role}{index} is {held}, expected {due} {of}"
        return count, f"{text}: {cause}" if cause else text

    def _cause(self, got: Tensor) -> str:
        poisoned = poison_of(got)
        if not bool(differing(got, poisoned).any()):
            return "nothing was written"
        for text, content in self.stories:
            if content.shape == got.shape and not bool(differing(got, content.to(got.dtype)).any()):
                return text
        if bool((~differing(got, poisoned)).any()):
            return "a part was not written"
        was = like(self.before, self.view)
        return "it holds what it held before" if not bool(differing(got, was).any()) else ""


def poison_of(tensor: Tensor) -> Tensor:
    """The value that no operation may leave: NaN, or for integers the smallest number but one."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        return torch.full_like(tensor, float("nan"))
    if tensor.dtype == torch.bool:
        return torch.ones_like(tensor)
    return torch.full_like(tensor, torch.iinfo(tensor.dtype).max - 1)


def like(base: Tensor, view: Tensor) -> Tensor:
    """The part of ``base`` that lies in it as ``view`` lies in a base of the same size."""
    return base.as_strided(view.shape, view.stride(), view.storage_offset())


def differing(one: Tensor, other: Tensor) -> Tensor:
    """Where elements differ; NaN equals NaN."""
    return ~((one == other) | (one.ne(one) & other.ne(other)))


def _shown(value: Tensor) -> str:
    return f"{value.item():g}" if value.dtype.is_floating_point else str(value.item())


def made(role: str, dtype: torch.dtype, layout: str, shape: tuple[int, ...]) -> Buffer:
    """A buffer of ``shape`` in ``layout``, guards around it; :meth:`Buffer.fill` comes next."""
    count = math.prod(shape)
    if layout == "strided":
        base = torch.empty(GUARD + 2 * count + GUARD, dtype=dtype)
        view = base[GUARD : GUARD + 2 * count : 2].view(shape)
    elif layout == "transposed" and len(shape) == 2:
        base = torch.empty(GUARD + count + GUARD, dtype=dtype)
        view = base[GUARD : GUARD + count].view(shape[1], shape[0]).t()
    else:
        start = 0 if layout == "contiguous" else GUARD
        base = torch.empty(start + count + GUARD, dtype=dtype)
        view = base[start : start + count].view(shape)
    base.copy_(pattern(dtype, tuple(base.shape), 11, 5, limit_for(dtype, None, 1)))
    return Buffer(role, base, view)
