"""PyTorch's tensor parallelism under any plan of ``parallelize_module``.

``tensor_plan`` is ``package.module:name`` of a mapping from names of modules (with torch's
wildcards) to styles, or of a function that makes one of the model.  Tied and frozen parameters stay
so.  What the plan does not name is a plain tensor on every rank, and must get the same gradient on
all of them.  Gradients that the styles leave as partial sums are reduced before clipping, and
outputs that are DTensors are made whole for the loss.

Cost: between the bounds of its family.  Numbers: as ``pytorch/tensor_parallel``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from shardproof.contract import Capabilities, Depth, MicroBatch, Refused
from shardproof.impls.pytorch.checkpoint.options import NO_DTENSOR, Saved, offered
from shardproof.impls.pytorch.tensor_parallel import PyTorchTensorParallel, check_scaler
from shardproof.impls.pytorch.tensor_styles import parallelize
from shardproof.impls.reference.engine.choices import declared
from shardproof.impls.reference.engine.options import own_function_of, own_thing, parse_options

Plan = Mapping[str, ParallelStyle]


def feed_forward(model: nn.Module) -> Plan:
    """The pairs of layers of the suite's GPT without attention: up and down."""
    names = [name for name, _ in model.named_modules()]
    ups = {n: ColwiseParallel() for n in names if n.endswith("mlp.up")}
    return {**ups, **{n: RowwiseParallel() for n in names if n.endswith("mlp.down")}}


@dataclass(frozen=True)
class Options(Saved):
    """The path of the plan."""

    tensor_plan: str = "shardproof.impls.pytorch.tensor_plan:feed_forward"

    def plan(self) -> Plan | Callable[[nn.Module], Plan]:
        """The object at the path; :class:`Refused` for anything that is not a plan."""
        found = own_thing("tensor_plan", self.tensor_plan)
        if callable(found):
            gives = "a plan that maps names of modules to their styles"
            return own_function_of("tensor_plan", self.tensor_plan, "model", gives=gives)
        self.check(found)
        return found

    def check(self, plan: object) -> None:
        """:class:`Refused` unless ``plan`` maps names to styles."""
        styles = plan.values() if isinstance(plan, Mapping) else [plan]
        wrong = [style for style in styles if not isinstance(style, ParallelStyle)]
        if wrong or not styles:
            what = (
                f"{wrong[0]!r:.60} is not a ParallelStyle"
                if wrong
                else "the plan names no module of this model; write a plan {NAME: ParallelStyle}"
            )
            raise Refused(f"option 'tensor_plan' = {self.tensor_plan!r}: {what}")


class TensorPlan(PyTorchTensorParallel):
    """The adapter for any plan."""

    depth: ClassVar[Depth] = "family"
    options_type: ClassVar[type[Any]] = Options

    @classmethod
    def capabilities(cls, options: Mapping[str, Any]) -> Capabilities:
        """The capabilities of torch's own styles."""
        chosen = parse_options(Options, options)
        chosen.plan()
        saves = offered(chosen.checkpoint, denies=NO_DTENSOR)
        return declared("tensor", axes=("tensor",), **saves)

    def shard(self, module: nn.Module) -> nn.Module:
        """Put every module that the plan names under its style."""
        plan: Any = self.options.plan()
        if callable(plan):
            plan = plan(module)
            self.options.check(plan)
        names = [name for name, _ in module.named_modules()]
        for key in plan:
            if not any(_matches(name, key) for name in names):
                path = self.options.tensor_plan
                raise Refused(f"option 'tensor_plan' = {path!r}: the model has no module {key!r}")
        parallelize(module, plan, self.mesh.device_mesh["tensor"])
        self.orders = {}
        self.named = dict(module.named_parameters())
        check_scaler(self.spec, self.updated())
        return module

    def loss(self, micro: MicroBatch) -> Tensor:
        """The loss of whole outputs."""
        outputs = self.module(micro.inputs)
        whole = outputs.full_tensor() if isinstance(outputs, DTensor) else outputs
        return self.build.loss(whole, micro)

    def accumulating(self, is_last: bool) -> AbstractContextManager[object]:
        """An empty context."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Nothing special: no option leaves logits cut."""
        loss.backward()


def _matches(name: str, key: str) -> bool:
    """torch's rule: part by part, with wildcards."""
    parts, wanted = name.split("."), key.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


IMPLEMENTATION = TensorPlan
#: Argument of ``prove`` that this adapter takes as the option of that name.
TAKES = "tensor_plan"
