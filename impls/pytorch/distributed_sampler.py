"""PyTorch's ``DistributedSampler``, or your own sampler with the same interface.

    epoch    set_epoch, then all that it gives
    stop     state_dict, where the sampler has one
    resume   load_state_dict on fresh ranks, then set_epoch

``sampler`` is ``package.module:name`` of a class, or a function, that is called as torch's is:
``(dataset, num_replicas=, rank=, shuffle=, seed=, drop_last=)``.  ``dataset`` is a range of the
samples.  torch's own has no state: its epoch begins anew.  One with ``state_dict`` and
``load_state_dict`` is asked at a stop, when all that was taken from it was trained on; ``resume``
says whether it can then go on in ``any_world``, in the ``same_world`` only, or ``never``.

Cost: nothing is sent.  Numbers: exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shardproof.axes import names
from shardproof.contract import Capabilities, Refused, SamplerSpec, Sampling
from shardproof.contract import Options as Given
from shardproof.impls.reference.engine.options import own_function_of, parse_options

#: What a sampler is made with beside the data set.
MADE_WITH = ("num_replicas", "rank", "shuffle", "seed", "drop_last")
#: What is asked of every sampler, and of one that can be resumed.
ASKED, STATE = ("set_epoch", "__iter__"), ("state_dict", "load_state_dict")


@dataclass(frozen=True)
class Options:
    """The path of the sampler, and whether it can resume."""

    sampler: str = "torch.utils.data.distributed:DistributedSampler"
    resume: Literal["any_world", "same_world", "never"] = "any_world"

    def maker(self) -> Callable[..., Any]:
        """The function that makes the sampler; refused if it takes other arguments."""
        gives = f"a sampler with {' and '.join(ASKED)}"
        return own_function_of("sampler", self.sampler, "dataset", named=MADE_WITH, gives=gives)


class TorchSampler(Sampling):
    """The adapter."""

    depth = "layout"

    @classmethod
    def capabilities(cls, options: Given) -> Capabilities:
        chosen = parse_options(Options, options)
        maker = chosen.maker()
        declines = {
            "uneven": "the sampler pads, or drops the last samples",
            "read_ahead": "the sampler's state counts the samples that were taken, not those "
            "that were trained on",
        }
        if chosen.resume == "never" or (
            isinstance(maker, type) and not all(hasattr(maker, name) for name in STATE)
        ):
            declines["resume"] = (
                f"the sampler has no {' and '.join(STATE)}, so a resumed epoch starts again"
            )
        elif chosen.resume == "same_world":
            declines["other_world"] = "the sampler's state counts the samples of one rank"
        return Capabilities(axes=names(), needs=("cpu",), declines=declines)

    def start(self, spec: SamplerSpec, options: Given) -> None:
        self.chosen = parse_options(Options, options)
        self.sampler = self.chosen.maker()(
            range(spec.samples),
            num_replicas=spec.world,
            rank=spec.rank,
            shuffle=spec.shuffle,
            seed=spec.seed,
            drop_last=spec.tail == "drop",
        )
        self._must_have(ASKED)

    def epoch(self, number: int) -> Iterator[int]:
        self.sampler.set_epoch(number)
        return iter(self.sampler)

    def state(self, taken: int) -> Mapping[str, Any]:
        self._must_have(STATE)
        state: Mapping[str, Any] = self.sampler.state_dict()
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.sampler.load_state_dict(state)

    def _must_have(self, names: Iterable[str]) -> None:
        for name in names:
            if not hasattr(self.sampler, name):
                what = f"{type(self.sampler).__name__} has no {name}"
                remedy = "; set resume: never" if name in STATE else ""
                raise Refused(f"option 'sampler' = {self.chosen.sampler!r}: {what}{remedy}")


IMPLEMENTATION = TorchSampler
#: Argument of ``prove`` that this adapter takes as the option of that name.
TAKES = "sampler"
