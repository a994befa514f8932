"""Closed forms of the named pipeline schedules: bubbles, and micro-batches in flight.

    p ranks, m micro-batches, v chunks a rank; T_F, T_B, T_W a rank's time for the forward of a
    micro-batch, for the gradient of its input and of its weights

    span bubble       what the rank with the longest span, from the begin of its first computation
                      to the end of its last one, idles within it: the cost of a step in a run
                      without end, where nothing makes ranks wait for each other between steps
    makespan bubble   what every rank idles between the first computation of any rank and the last
                      one: the cost where all ranks wait for each other between steps
    ideal             m (T_F + T_B + T_W), a rank's work; total = ideal + makespan bubble

"(p-1)/m" is bubble over ideal, "(p-1)/(m+p-1)" bubble over total: the same bubble.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import partial


@dataclass(frozen=True)
class Setting:
    """The input of the closed forms; times are those of a rank's work on one micro-batch."""

    ranks: int
    micro_batches: int
    chunks: int = 1
    forward: Fraction = Fraction(1)
    input_backward: Fraction = Fraction(1)
    weight_backward: Fraction = Fraction(1)

    @property
    def work(self) -> Fraction:
        """A rank's work on one micro-batch."""
        return self.forward + self.input_backward + self.weight_backward

    @property
    def ideal(self) -> Fraction:
        """A rank's work in a window."""
        return self.micro_batches * self.work

    @property
    def equal(self) -> bool:
        """Whether forward and both parts of backward take one unit of time each."""
        return self.forward == self.input_backward == self.weight_backward


@dataclass(frozen=True)
class ClosedForm:
    """The published formulas of one schedule; ``None``: there are none for this setting.

    ``held(setting, rank)`` counts micro-batches in flight, once for each chunk that holds one.
    """

    source: str
    span: Callable[[Setting], Fraction | None]
    makespan: Callable[[Setting], Fraction | None]
    held: Callable[[Setting, int], int | None]


def _lockstep(setting: Setting) -> Fraction:
    """GPipe and 1F1B; with chunks the ramps are shorter by as much as a chunk is."""
    #     rank 0   F0 F1 .  .  B0 B1      GPipe, p = 2, m = 2, T_F = T_B + T_W: rank 0 idles for
    #     rank 1   .  F0 F1 B0 B1 .       (p - 1) (T_F + T_B + T_W) between its F1 and its B0
    return (setting.ranks - 1) * setting.work / setting.chunks


def _filled(setting: Setting, times: int) -> Fraction | None:
    """``(p-1)(T_F+T_B)`` less up to ``times (p-1)`` T_W, where none is longer than T_F, T_B.

    With fewer micro-batches there are fewer W to fill it with [derived].
    """
    if setting.weight_backward > min(setting.forward, setting.input_backward):
        return None
    others = setting.ranks - 1
    ramps = others * (setting.forward + setting.input_backward)
    return ramps - min(setting.micro_batches - 1, times * others) * setting.weight_backward


_h1, _h2 = partial(_filled, times=1), partial(_filled, times=2)


def _h2_makespan(setting: Setting) -> Fraction | None:
    """The ranks begin one T_F after the other; nothing fills that before the first forward."""
    span = _h2(setting)
    if span is None or setting.micro_batches < 2 * setting.ranks - 1:
        return None
    return max(span, (setting.ranks - 1) * setting.forward)


def _is_full_v(setting: Setting) -> bool:
    return setting.equal and setting.micro_batches >= 2 * setting.ranks - 1


def _interleaved_held(setting: Setting, rank: int) -> int:
    """``p - r + (p-1)/v`` full stages at v = 2: a rank further on holds two chunks less."""
    p, v = setting.ranks, setting.chunks
    return min(setting.micro_batches * v, p * v + p - 1 - 2 * rank)


_GPIPE = "GPipe, arXiv 1811.06965, section 2.3"
_NARAYANAN = "Narayanan et al., arXiv 2104.04473, section 2.2"
_ZERO_BUBBLE = "Qi et al., arXiv 2401.10241"

#: Schedule -> its closed forms.
FORMS: dict[str, ClosedForm] = {
    "gpipe": ClosedForm(_GPIPE, _lockstep, _lockstep, lambda s, rank: s.micro_batches),
    "1f1b": ClosedForm(
        f"{_NARAYANAN}.1",
        _lockstep,
        _lockstep,
        lambda s, rank: min(s.micro_batches, s.ranks - rank),
    ),
    # Counted in chunks: at v = 2 the first rank holds up to 3 p - 1 of them.
    "interleaved": ClosedForm(f"{_NARAYANAN}.2", _lockstep, _lockstep, _interleaved_held),
    "zb_h1": ClosedForm(
        f"{_ZERO_BUBBLE}, section 2", _h1, _h1, lambda s, rank: min(s.micro_batches, s.ranks)
    ),
    # Its makespan differs from its span: ranks start one T_F apart, and no work fills that.
    "zb_h2": ClosedForm(
        f"{_ZERO_BUBBLE}, section 2",
        _h2,
        _h2_makespan,
        lambda s, rank: min(s.micro_batches, 2 * s.ranks - 1),
    ),
    "zb_v": ClosedForm(
        # Section 6 gives 2p for many micro-batches; with few [derived]: the last stages of a rank
        # come back after all m forwards, or rank + 1 of the second half are under way.
        f"{_ZERO_BUBBLE}, section 6; less than 2p with few micro-batches [derived]",
        lambda s: Fraction(0) if _is_full_v(s) else None,
        lambda s: (s.ranks - 1) * s.forward / 2 if _is_full_v(s) else None,
        lambda s, rank: min(2 * s.micro_batches, s.micro_batches + 1 + rank, 2 * s.ranks),
    ),
}
