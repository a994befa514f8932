"""A model of the user's own, which simulated ranks train.

    # mypackage/model.py
    def build():
        return Net()                                            # with --seq N: it takes tokens
        return Net(), torch.empty(8, 3, 224, 224)               # the inputs of one micro-batch
        return OwnWorkload(model=Net, loss=loss, batch=pairs)   # as for `shardproof check`

``build`` is called on fake tensors, so values take no memory.  It is called several times for each
rank, and for a trial before the first one.  Unless an ``OwnWorkload`` says otherwise, the loss is
the cross-entropy over the last dimension of the outputs, and units are the repeated blocks of the
module.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn import functional as F

from shardproof import axes, by_path
from shardproof.contract import (
    Batch,
    Build,
    CrossEntropy,
    LossTerm,
    MicroBatch,
    OptimizerSpec,
    Options,
    Role,
)
from shardproof.costs.shapes import BatchSize
from shardproof.errors import Problem, SelectionError
from shardproof.simulate.fakes.known import known_integers
from shardproof.simulate.sources import Undisturbed, Watch, state_of, valueless
from shardproof.workloads.own import OwnWorkload

_SUITE = Path(__file__).parents[1]
_FORMS = "a module, (module, inputs), or a shardproof.OwnWorkload"


def refusal(subject: str, error: Exception, remedy: str) -> Problem:
    """Why ``subject`` does not run on tensors without values: the operator and the line.

    The line is the innermost one of an implementation or of the user's code.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_ours(Path(frame.filename))]
    last = (own or frames)[-1]
    operator = getattr(error, "func", None)
    name = f"operator {operator}" if operator is not None else type(error).__name__
    what = f"{subject} cannot run on tensors without values: {name} in {last.name}"
    said = "" if operator is not None else (str(error).splitlines() or [""])[0]
    return Problem(what, remedy, said or None, file=Path(last.filename).name, line=last.lineno)


def _is_ours(file: Path) -> bool:
    """Whether ``file`` is torch's, or the suite's but no implementation's."""
    is_suite = file.is_relative_to(_SUITE) and not file.is_relative_to(_SUITE / "impls")
    return is_suite or "torch" in file.parts


# ------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class OwnModel:
    """A model: ``make``, called on fake tensors, returns one of :data:`_FORMS`.

    ``inputs``: the inputs of one micro-batch, if ``make`` returns none.
    """

    name: str
    make: Callable[[], Any]
    inputs: Tensor | None = None

    def given(self) -> tuple[Any, OwnWorkload | None, Tensor | None]:
        """A fresh module, its workload if it has one, and the inputs that ``make`` returned.

        :raises SelectionError: ``make`` returns something else.
        """
        made, inputs = self.make(), self.inputs
        if isinstance(made, OwnWorkload):
            return made._model(), made, None
        if isinstance(made, (tuple, list)) and len(made) == 2:
            made, inputs = made
        if isinstance(inputs, (tuple, list)) and len(inputs) == 1:
            (inputs,) = inputs
        if not isinstance(made, nn.Module):
            what = f"{self.name} returned neither a module nor a workload"
            raise SelectionError(Problem(what, f"return {_FORMS}", f"{made!r:.60}"))
        if inputs is not None and not isinstance(inputs, Tensor):
            what = f"{self.name} returned inputs that are not a tensor"
            remedy = "let forward take one tensor, and return (module, TENSOR)"
            raise SelectionError(Problem(what, remedy, type(inputs).__name__))
        return made, None, inputs


def model_at(path: str, inputs: Any = None) -> OwnModel:
    """The model at ``package.module:name`` or ``file.py:name``; ``inputs``: of one micro-batch.

    :raises SelectionError: it cannot be imported, or is not a model.
    """
    try:
        found = by_path.at_path(path)
    except by_path.CannotImport as error:
        remedy = "name a function that returns a module: package.module:build"
        raise SelectionError(Problem(f"{path} {error}", remedy)) from error
    return own_model(found, path, inputs)


def own_model(found: Any, name: str = "", inputs: Any = None) -> OwnModel:
    """The model ``found``: a module, a workload, or a function or class that returns one.

    :raises SelectionError: ``found`` is none of these.
    """
    name = name or getattr(found, "__name__", type(found).__name__)
    if isinstance(inputs, (tuple, list)) and len(inputs) == 1:
        (inputs,) = inputs
    if inputs is not None and not isinstance(inputs, Tensor):
        what, remedy = "inputs= is not a tensor", "let forward take one tensor: inputs=TENSOR"
        raise SelectionError(Problem(what, remedy, type(inputs).__name__))
    if isinstance(found, nn.Module):
        # A compiled module keeps the original one, which runs on fake tensors.
        original = getattr(found, "_orig_mod", found)
        return OwnModel(name, lambda: _without_values(original), inputs)
    if isinstance(found, OwnWorkload):
        return OwnModel(name, lambda: found)
    if not callable(found):
        what, remedy = f"{name} is not a model", f"name a function that returns {_FORMS}"
        raise SelectionError(Problem(what, remedy, f"{found!r:.60}"))
    return OwnModel(name, found, inputs)


def _without_values(module: nn.Module) -> nn.Module:
    """A copy of ``module`` on fake tensors."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        held: Sequence[Mapping[str, Any]] = (part._parameters, part._buffers, vars(part))
        for tensor in (t for each in held for t in each.values() if isinstance(t, Tensor)):
            memo.setdefault(id(tensor), _like(tensor, tensor.dtype, "cpu"))
    return copy.deepcopy(module, memo)


def _like(tensor: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(twin, requires_grad=tensor.requires_grad) if is_parameter else twin


def _placed(module: nn.Module, dtype: torch.dtype, device: str) -> nn.Module:
    """``module`` with floating-point tensors of ``dtype``, on ``device``; ties are kept."""
    # Each entry keeps the old tensor: if that were freed, another one could get its id.
    made: dict[int, tuple[Tensor, Tensor]] = {}
    for part in module.modules():
        both: tuple[dict[str, Any], ...] = part._parameters, part._buffers
        for held in both:
            for name, tensor in held.items():
                if tensor is None:
                    continue
                wanted = dtype if tensor.is_floating_point() else tensor.dtype
                if (tensor.dtype, tensor.device.type) == (wanted, device):
                    continue
                known = made.setdefault(id(tensor), (tensor, _like(tensor, wanted, device)))
                held[name] = known[1]
    return module


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of each target; classes are the last dimension of ``outputs``."""
    losses = F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


class OwnBuild:
    """The contract's ``Build`` of an own model, its floating-point tensors in ``dtype``."""

    terms: Sequence[LossTerm] = ()

    def __init__(self, model: OwnModel, dtype: torch.dtype, watch: Any = None) -> None:
        self.model, self.dtype, self._watch = model, dtype, watch
        module, own, _ = model.given()
        #: A module without a workload has this loss.
        self.cross_entropy: CrossEntropy | None = None if own else CrossEntropy()
        self.workload = own or OwnWorkload(type(module), cross_entropy, _nothing)
        self.workload.name = model.name
        self.units: Sequence[str] = self.workload.units(module)
        self.roles: Mapping[str, Role] = self.workload.roles(module)

    def __call__(self, device: str = "cpu") -> nn.Module:
        module = _placed(self.model.given()[0], self.dtype, device)
        if self._watch is not None:
            self._watch(module, self.units)
        return module

    def stage(self, module: nn.Module, start: int, stop: int) -> nn.Module:
        """The part of ``module`` with units ``start`` to ``stop - 1``."""
        return self.workload.stage(module, start, stop)

    def loss(self, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """The weighted sum of the losses of all targets."""
        return self.workload.loss({}, outputs, micro)

    def can_be_cut(self, module: nn.Module) -> bool:
        """Whether :meth:`stage` knows how to cut ``module``."""
        return self.workload._stages is not None or type(module) is nn.Sequential


def _nothing(*_: Any) -> Any:
    """Stand for the data of a model without a workload."""


# ------------------------------------------------------------------------------------ the source


@dataclass(frozen=True)
class OwnSource(Undisturbed):
    """An own ``model``, its floating-point parameters and inputs in ``dtype``; two steps."""

    model: OwnModel
    implementation: str
    axes: Mapping[str, int]
    optimizer: OptimizerSpec
    options: Options = field(default_factory=dict)
    work: BatchSize = field(default_factory=BatchSize)
    dtype: torch.dtype = torch.float32
    steps: int = 2

    @property
    def name(self) -> str:
        """The path of the model, or the name of its function or class."""
        return self.model.name

    def build(self, rank: int, watch: Watch) -> Build:
        """The build of the model."""
        return OwnBuild(self.model, self.dtype, watch)

    def state(self) -> dict[str, Tensor]:
        """Its parameters and buffers."""
        return state_of(OwnBuild(self.model, self.dtype)())

    def batch(self, rank: int, step: int) -> Batch:
        """Micro-batches of full samples, every target with the same weight."""
        build = OwnBuild(self.model, self.dtype)
        micro = self._micro(build, build(), self.model.given()[2])
        return Batch(step, ((micro,) * self.micro_batches(step),))

    def _micro(self, build: OwnBuild, module: nn.Module, inputs: Tensor | None) -> MicroBatch:
        """A micro-batch; ``inputs``: those of the module, if it has no workload.

        :raises SelectionError: the inputs of the module are not known.
        """
        if build.cross_entropy is None:
            samples = self.work.samples
            with unset_fake_temporarily():
                given = build.workload._batch(samples, torch.Generator().manual_seed(0))
            inputs, targets = (self._cast(valueless(part)) for part in given[:2])
        elif inputs is None and not self.work.positions:
            what = f"the inputs of {self.name} are not known"
            remedy = "return (module, inputs), or say how long samples of tokens are: --seq N"
            raise SelectionError(Problem(what, remedy))
        else:
            shape = (self.work.samples, self.work.positions)
            tokens = torch.empty(shape, dtype=torch.int64) if inputs is None else inputs
            inputs = self._cast(valueless(tokens))
            with torch.no_grad():
                targets = torch.empty(module(inputs).shape[:-1], dtype=torch.int64)
        ids = torch.empty(len(inputs), dtype=torch.int64)
        return MicroBatch(inputs, targets, torch.empty(targets.shape), ids)

    def _cast(self, tensor: Tensor) -> Tensor:
        is_cast = tensor.is_floating_point() and tensor.dtype != self.dtype
        return _like(tensor, self.dtype, "cpu") if is_cast else tensor

    def about(self) -> list[str]:
        """The model and a micro-batch, in words."""
        with known_integers():
            build = OwnBuild(self.model, self.dtype)
            count = sum(p.numel() for p in build().parameters())
            (micro, *_) = self.batch(0, 0).micro_batches
            shape = " x ".join(f"{size:,}" for size in micro.inputs.shape)
        blocks = f"{len(build.units)} repeated blocks"
        return [f"{count:,} parameters, {blocks}, inputs of {shape} a micro-batch"]

    def require_shared(self, accounting: str) -> None:
        """Build the model alone, and run forward, loss and backward as a trial.

        :raises SelectionError: the trial fails, or stages cannot share the model.
        """
        try:
            with known_integers():
                build = OwnBuild(self.model, self.dtype)
                module = build()
                (micro, *_) = self.batch(0, 0).micro_batches
                build.loss(module(micro.inputs), micro).backward()
        except SelectionError:
            raise
        except Exception as error:
            remedy = "rewrite it to read no tensor values: no item(), tolist() or `if` on a tensor"
            raise SelectionError(refusal(self.name, error, remedy)) from error
        stages, along = axes.parts(self.axes, "layers"), axes.cutting("layers")
        if stages > 1 and not build.can_be_cut(module):
            what = f"{self.name} is a {type(module).__name__}, which cannot be cut into stages"
            remedy = "return an nn.Sequential, or an OwnWorkload with a function stages="
            raise SelectionError(Problem(what, remedy, f"{along}={stages}"))
        if stages > len(build.units):
            what = f"the model has {len(build.units)} repeated blocks, too few for {stages} stages"
            raise SelectionError(Problem(what, "write fewer stages", f"{along}={stages}"))
