"""A workload of a user's own: a model, a loss and a function that makes batches.

    # my_package/tiny.py
    tiny = OwnWorkload(model=Net, loss=cross_entropy_of_each, batch=pairs)

Its name is its path, ``my_package.tiny:tiny``, in ``prove(workload=...)`` and in scenario files.

The model keeps its own initial values, drawn under one fixed seed of torch's global generator; what
a rank builds is perturbed, as for every workload.  What the oracle needs of a model, and no test of
shapes shows, is tried in ``trial.py`` before anything runs.
"""

from __future__ import annotations

import copy
import itertools
import re
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shardproof import by_path, contract
from shardproof.contract import CrossEntropy, LossTerm, MicroBatch, Role
from shardproof.workloads import layers
from shardproof.workloads.base import Found, Picks, Samples, Workload, WorkloadFamily
from shardproof.workloads.knobs import Params, WorkloadError
from shardproof.workloads.traits import TRAITS
from shardproof.workloads.wall import standing

#: Traits of the batch that need another model, loss or data than a user's.
_NEEDS_MORE = ("variable_lengths", "ignore_index", "short_epochs")
#: Traits that a model has or has not; they are found, not asked for.
FOUND = (
    *("tied", "tied_over_units", "frozen", "unused", "module_twice", "scalar", "one_element"),
    *("empty", "non_contiguous", "rebound_buffer", "dropout_stateful"),
)
#: Pattern of a module's name in the suite's own Transformers -> its role.
NAMED: Mapping[str, Role] = {
    r"embed\.token": "embedding",
    r"embed\.position": "positions",
    r"blocks\.\d+\.attention": "attention",
    r"blocks\.\d+\.attention\.qkv": "heads",
    r"blocks\.\d+\.(mlp\.)?up": "column",
    r"blocks\.\d+\.(attention\.out|(mlp\.)?down)": "row",
    r"head": "classes",
}
#: The one seed under which models are built.
_SEED = 0
#: torch's global generator is everybody's: ranks that are threads build one after the other.
_BUILDING = threading.Lock()
_OTHERS = (str(Path(torch.__file__).parent), str(Path(contract.__file__).parent))


#: Traits that any workload can carry.
HAD = tuple(
    name
    for name, trait in TRAITS.items()
    if trait.place in ("batch", "optimizer", "backend") and name not in _NEEDS_MORE
)


class OwnWorkload(WorkloadFamily):
    """``model(**params)`` makes an ``nn.Module``; ``params`` are those of the scenario.

    ``loss(outputs, targets)`` gives the loss of each target, not reduced: a tensor of the shape of
    ``targets``, or of their first dimensions.  The suite weighs and sums it.
    ``batch(size, generator)`` gives ``size`` inputs and targets on the first dimension, drawn with
    ``generator`` alone, and maybe which targets count (bool, of their shape).  The model is called
    with the inputs, one tensor, and gives one tensor.

    ``units`` are dotted names of its repeated blocks, in forward order; unless given, the children
    of an ``nn.Sequential``, or of the ``nn.ModuleList`` or ``nn.Sequential`` with most parameters.
    ``stages(model, start, stop)`` gives the part of ``model`` with units ``start`` to ``stop - 1``,
    for pipelines (:meth:`shardproof.contract.Build.stage`); an ``nn.Sequential`` needs none.
    ``roles`` says what modules or parameters are for (:data:`shardproof.contract.Role`), by dotted
    name, for strategies that split layers; unless given, by the names of the suite's own GPT.
    """

    has_values: ClassVar[bool] = True
    knobs: ClassVar = {}
    digest = ""

    def __init__(
        self,
        model: Callable[..., nn.Module],
        loss: Callable[[Tensor, Tensor], Tensor],
        batch: Callable[[int, torch.Generator], Sequence[Tensor]],
        *,
        units: Sequence[str] = (),
        stages: Callable[[nn.Module, int, int], nn.Module] | None = None,
        roles: Mapping[str, Role] | None = None,
        about: str = "a model of a user's own",
    ) -> None:
        self.name, self.about = "an OwnWorkload", about
        self._model, self._loss, self._batch = model, loss, batch
        self._units, self._stages, self._roles = tuple(units), stages, roles
        self._terms: tuple[LossTerm, ...] = ()

    def with_terms(self, *terms: LossTerm) -> OwnWorkload:
        """This one with parts of the loss that are no sums over targets."""
        more = copy.copy(self)
        more._terms = terms
        return more

    # ------------------------------------------------------------------------------- what it is

    def resolve(self, given: Params) -> Params:
        """Arguments of ``model``, which checks them itself."""
        return dict(given)

    def carriers(self, trait: str) -> Collection[str]:
        """This one, where a model need not be changed for ``trait``."""
        return (self.name,) if trait in (*HAD, *FOUND) else TRAITS[trait].applies_to

    def size(self) -> int:
        """Samples are made, not taken from a set: any number serves as one."""
        return 1024

    def model(self, params: Params, traits: Collection[str], place: layers.Place) -> nn.Module:
        """A fresh model with its own initial values, cast and placed."""
        with _BUILDING, torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            with self.told("model(...)"):
                module = self._model(**params)
        if not isinstance(module, nn.Module):
            raise WorkloadError(f"{self.name}: model() returned {module!r:.80}, expected nn.Module")
        module = module.to(place["dtype"])
        return _on_meta(module) if place["device"] == "meta" else module.to(place["device"])

    def units(self, model: nn.Module) -> tuple[str, ...]:
        """As given, or found."""
        names = dict(model.named_modules())
        if lacking := [name for name in self._units if name not in names]:
            raise WorkloadError(f"{self.name}: units: the model has no module {lacking[0]!r}")
        return self._units or _repeated(model)

    def roles(self, model: nn.Module) -> Mapping[str, Role]:
        """As given, or looked up under its name."""
        names = [name for name, _ in (*model.named_modules(), *model.named_parameters())]
        if self._roles is None:
            pairs = itertools.product(names, NAMED.items())
            return {name: role for name, (form, role) in pairs if re.fullmatch(form, name)}
        for name, role in self._roles.items():
            if name not in names:
                message = f"{self.name}: roles: no module or parameter {name!r} in the model"
                raise WorkloadError(message)
            if role not in get_args(Role):
                valid = ", ".join(get_args(Role))
                message = f"{self.name}: roles: unknown role {role!r} of {name!r}; valid: {valid}"
                raise WorkloadError(message)
        return self._roles

    def stage(self, model: nn.Module, start: int, stop: int) -> nn.Module:
        """By ``stages``, or a part of the chain that an ``nn.Sequential`` is."""
        if self._stages is not None:
            return self._stages(model, start, stop)
        units, children = self.units(model), list(model.named_children())
        at = [number for number, (name, _) in enumerate(children) if name in units]
        bounds = [0, *at[1:], len(children)]  # what is before the first unit belongs to it
        return nn.Sequential(OrderedDict(children[bounds[start] : bounds[stop]]))

    def unstaged(self, params: Params) -> str:
        """A chain can be cut, anything else by ``stages`` only."""
        place = {"device": "meta", "dtype": torch.float64}
        model = self.model(params, (), place)
        chain = type(model) is nn.Sequential and set(self.units(model)) <= set(model._modules)
        if self._stages is not None or chain:
            return ""
        kind = type(model).__name__
        return f"{self.name} is a {kind}, which cannot be cut into stages: give a function stages="

    def initial(self, seed: str, name: str, tensor: Tensor, owner: nn.Module) -> Tensor:
        """``tensor``, perturbed where it is of floating point."""
        if not tensor.is_floating_point():
            return tensor
        generator = torch.Generator().manual_seed(layers.seed_number(f"{seed}/{name}"))
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        return tensor.detach().cpu().to(torch.float64) + 0.1 * noise

    def terms(self, params: Params) -> Sequence[LossTerm]:
        """As given."""
        return self._terms

    def depends_on_cut(self, params: Params) -> bool:
        """Whether there is a batch norm, or a loss term over a part of the batch."""
        if any(term.scope != "global" for term in self._terms):
            return True
        model = self.model(params, (), {"device": "meta", "dtype": torch.float64})
        return any(isinstance(part, _BatchNorm) for part in model.modules())

    def cross_entropy(self, params: Params) -> CrossEntropy | None:
        """It may be one, but it is not declared."""
        return None

    # ---------------------------------------------------------------------------- what it gives

    def samples(self, params: Params, picks: Picks) -> Samples:
        """One call of ``batch``; its generator is seeded by seed and step."""
        size, seed = len(picks.draws), ",".join(map(str, picks.draws))
        generator = torch.Generator().manual_seed(layers.seed_number(seed))
        with self.told(f"batch({size}, generator)"):
            given = self._batch(size, generator)
        parts = tuple(given) if isinstance(given, tuple | list) else (given,)
        if len(parts) not in (2, 3) or not all(isinstance(part, Tensor) for part in parts):
            kinds = ", ".join(type(part).__name__ for part in parts)
            raise self._wrong(size, f"({kinds})", "2 or 3 tensors: inputs, targets, optional mask")
        if odd := [tuple(part.shape) for part in parts if part.shape[:1] != (size,)]:
            asked = f"{size} samples on the first dimension of each"
            raise self._wrong(size, f"a tensor of shape {odd[0]}", asked)
        inputs, targets, *rest = parts
        valid = rest[0] if rest else torch.ones(targets.shape, dtype=torch.bool)
        if valid.shape != targets.shape or valid.dtype != torch.bool or not bool(valid.any()):
            shape = f"a {valid.dtype} mask of shape {tuple(valid.shape)}"
            raise self._wrong(size, shape, f"bool of shape {tuple(targets.shape)}, with a True")
        if inputs.is_floating_point():
            inputs = inputs.to(picks.dtype)
        if targets.is_floating_point():
            targets = targets.to(picks.dtype if picks.dtype.itemsize >= 4 else torch.float32)
        return Samples(inputs.detach(), targets.detach(), valid)

    def _wrong(self, size: int, given: str, asked: str) -> WorkloadError:
        return WorkloadError(f"{self.name}: batch({size}, ...) returned {given}, expected {asked}")

    def loss(self, params: Params, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """The weighted sum of what ``loss`` gives."""
        if not isinstance(outputs, Tensor):
            kind = f"a {type(outputs).__name__}: return the tensor that the loss takes"
            raise WorkloadError(f"{self.name}: the model returned {kind}")
        if outputs.is_floating_point():
            outputs = outputs.to(micro.weights.dtype)
        losses, weights = self._loss(outputs, micro.targets), micro.weights
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if not isinstance(losses, Tensor) or not shape or shape != weights.shape[: losses.dim()]:
            what = f"returned {shape or 'one number'} for targets {tuple(weights.shape)}"
            remedy = "return the loss of each target (reduction='none')"
            raise WorkloadError(f"{self.name}: loss(outputs, targets) {what}: {remedy}")
        return (weights.reshape(*losses.shape, -1).sum(-1) * losses).sum()

    def found(self, workload: Workload) -> Found:
        """The result of a trial."""
        from shardproof.workloads import trial

        return trial.run(self, workload)

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Tell what the user's own code raises, with its place."""
        try:
            yield
        except WorkloadError:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            own = [frame for frame in frames if not frame.filename.startswith(_OTHERS)]
            where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
            text = f"{type(error).__name__}: {error}"
            raise WorkloadError(f"{self.name}: {what} raised {text}{where}") from error


@cache
def load(path: str) -> OwnWorkload:
    """The workload at ``path`` (``package.module:name``).

    :raises WorkloadError: it cannot be imported, or is none.
    """
    try:
        with standing(path):
            found = by_path.at_path(path)
    except by_path.CannotImport as error:
        raise WorkloadError(f"workload {path!r} {error}") from error
    if not isinstance(found, OwnWorkload):
        remedy = "write shardproof.OwnWorkload(model=..., loss=..., batch=...)"
        raise WorkloadError(f"workload {path!r} is {found!r:.80}, not an OwnWorkload: {remedy}")
    named = copy.copy(found)
    named.name = path
    return named


def check_name(path: str, traits: Collection[str]) -> None:
    """The properties of ``path`` and ``traits`` that are known without an import.

    :raises WorkloadError: no such package, or a trait that needs another model.
    """
    module, _, name = path.partition(":")
    if not name or not by_path.is_module(module):
        raise WorkloadError(f"unknown workload {path!r}: {by_path.no_module(module)}")
    for name in traits:
        if name not in (*HAD, *FOUND):
            have = ", ".join(HAD)
            message = f"{path} has its own model, and trait {name!r} would change it; valid: {have}"
            raise WorkloadError(message)


def _repeated(model: nn.Module) -> tuple[str, ...]:
    """Names of the blocks that are most of ``model``."""
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList | nn.Sequential)}
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in lists.items()}
    whole = max(sizes, key=lambda name: (sizes[name], -len(name)), default="")
    children = model.get_submodule(whole).named_children()
    return tuple(f"{whole}.{name}".strip(".") for name, child in children if [*child.parameters()])


def _on_meta(module: nn.Module) -> nn.Module:
    """``module`` without values; a tensor in two places stays one."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                like = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
                part._parameters[name] = made.setdefault(id(parameter), like)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = made.setdefault(id(buffer), buffer.to("meta"))
    return module
