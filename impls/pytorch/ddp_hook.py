"""PyTorch's ``DistributedDataParallel`` with any communication hook.

    step     as ``pytorch/ddp``; what becomes of a bucket is the hook's affair

``hook`` is ``package.module:name`` of a function ``hook(state, bucket) -> Future[Tensor]``, as
``register_comm_hook`` takes it.  ``state`` is the path of a function that makes its first argument
of the process group, once per rank; unless given, the state is the process group, which torch's own
hooks take.

DDP multiplies no gradient where a hook is registered: the hook divides by N itself.  The loss is
multiplied by N, as for plain DDP, so a hook that sums without dividing is N times off.

A hook that sends in a narrower dtype is held to that: ``precision.reduce`` names it, and the lane
``working_precision`` asks no more of it than of one device that adds up in that dtype.

Cost: between the bounds of its family.  Numbers: sums over ranks in the hook's order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardproof.contract import Capabilities, Refused
from shardproof.impls.pytorch.ddp import Options as DDPOptions
from shardproof.impls.pytorch.ddp import PyTorchDDP
from shardproof.impls.reference.engine.options import own_function_of, parse_options, written_at
from shardproof.impls.reference.engine.precision import Precision

#: How torch calls a hook, and what it gives.
TAKEN = ("state", "bucket")
GIVEN = (
    "a torch.futures.Future of the reduced bucket (for a call with async_op=True: .get_future() "
    "and .then(lambda done: done.value()[0]))"
)
ANNOTATIONS = (
    " (torch compares annotations with classes, but finds texts: remove `from __future__ import "
    "annotations` from the hook's file)"
)


@dataclass(frozen=True)
class Options(DDPOptions):
    """DDP's options, the paths of the hook and of the function that makes its state, and the dtype
    of messages.
    """

    hook: str = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:allreduce_hook"
    bucket_cap_mb: float | None = 0.02  # small, so that a hook sees several buckets
    state: str | None = None
    precision: Precision = field(default_factory=Precision)

    def __post_init__(self) -> None:
        super().__post_init__()
        others = (self.precision.parameters, self.precision.output, self.precision.buffers)
        if any(dtype is not None for dtype in others):
            raise Refused(
                "option 'precision': with 'hook', only 'precision.reduce' may be set; leave the "
                "other keys out"
            )

    def callables(self) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        """The hook and the function that makes its state; refused if they take other arguments."""
        hook = own_function_of("hook", self.hook, *TAKEN, gives=GIVEN)
        if self.state is None:
            return hook, None
        gives = "the first argument of the hook, once per rank"
        return hook, own_function_of("state", self.state, "group", gives=gives)


class DDPWithHook(PyTorchDDP):
    """The adapter for DDP with a registered hook."""

    depth = "family"
    options_type: ClassVar[type[Options]] = Options
    options: Options

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """DDP's capabilities; the hook can be imported."""
        chosen = parse_options(Options, options)
        chosen.callables()
        exact = chosen.precision.reduce is None
        declared = super().capabilities(options)
        return replace(declared, exactness="reordered-sum" if exact else "lower-precision")

    def wrap(self, module: nn.Module) -> DistributedDataParallel:
        """DDP with the hook."""
        ddp = super().wrap(module)
        hook, make = self.options.callables()
        state = self.comm.group if make is None else make(self.comm.group)
        checked: Any = self._checked(hook)
        try:
            ddp.register_comm_hook(state, checked)
        except (TypeError, ValueError) as error:  # of its annotations, or of this machine
            raise Refused(
                f"option 'hook' = {self.options.hook!r}: torch rejects the hook: {error}"
                + (ANNOTATIONS if "annotation" in str(error) else "")
            ) from error
        return ddp

    def _checked(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """``hook``; refused if it returns no Future, because torch would crash."""

        @functools.wraps(hook)
        def checked(state: Any, bucket: Any) -> Any:
            given = hook(state, bucket)
            what = _kind(given)
            if isinstance(given, torch._C.Future):  # what calls give is of that class alone
                value = given.value() if given.done() else None
                if not given.done() or _is_reduced(value):
                    return given
                what = f"a Future of {_kind(value)}"
            raise Refused(
                f"option 'hook' = {self.options.hook!r}{written_at(hook)}: the hook returned "
                f"{what}; a hook is called with ({', '.join(TAKEN)}) and must return {GIVEN}"
            )

        return checked


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _is_reduced(value: Any) -> bool:
    """Whether torch accepts ``value`` as a bucket: a tensor, or a list of one."""
    parts = value if isinstance(value, list | tuple) and value else [value]
    return all(isinstance(one, Tensor) for one in parts)


IMPLEMENTATION = DDPWithHook
#: Argument of ``prove`` that this adapter takes as the option of that name.
TAKES = "hook"
