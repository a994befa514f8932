"""The facts that a cost model may know: shapes, options, mesh, optimizer, precision. Plain data.

A :class:`ModelFacts` is made from the case and the workload's own model, never from the
implementation that is judged; it travels with the facts of a case, so that a stored run is judged
from the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from shardproof import axes
from shardproof.axes import Cut
from shardproof.contract import Options
from shardproof.files import Stored

if TYPE_CHECKING:
    from torch import nn

    from shardproof.case import Case
    from shardproof.workloads import Workload

#: The shapes of the inputs of each micro-batch of each window.
Windows = tuple[tuple[tuple[int, ...], ...], ...]

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class TensorFacts:
    """A parameter or buffer; tied parameters once, under their first name.

    ``owners`` are the modules that it is registered in, ``first_use`` the first step in which some
    rank gives it a gradient (``None``: none ever does), ``last_use`` the last one (``None``: there
    is no last).  ``strided``: its elements do not lie in row-major order.  ``units``: which units
    a pipeline's stage must have to hold it (what comes before the first unit goes with that, what
    comes after the last with that one); only told where there is a pipe axis.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True
    owners: tuple[str, ...] = ()
    first_use: int | None = 0
    last_use: int | None = None
    strided: bool = False
    units: tuple[int, ...] = ()
    #: Whether an update has used it, if any step did.
    is_updated: ClassVar[bool] = True

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def always_used(self) -> bool:
        """Whether every step gives it a gradient."""
        return self.first_use == 0 and self.last_use is None

    @property
    def is_conditional(self) -> bool:
        """Whether it depends on the micro-batch, the rank or the step whether it is used."""
        return ".conditional_" in f".{self.name}"

    def only_in(self, steps: Collection[int]) -> bool:
        """Whether some of ``steps`` give it a gradient, and no other step does."""
        if self.first_use is None or self.last_use is None:
            return False
        return {*range(self.first_use, self.last_use + 1)} <= {*steps}

    @property
    def in_every_backward(self) -> bool:
        """Whether every micro-batch gives it a gradient."""
        return self.always_used and not self.is_conditional

    @property
    def nbytes(self) -> int:
        """Bytes as built."""
        return self.numel * ITEMSIZE.get(self.dtype, 8)


class NeverUpdated(TensorFacts):
    """A parameter that only skipped steps used: it had gradients, and has no state."""

    is_updated: ClassVar[bool] = False


@dataclass(frozen=True)
class ModelFacts(Stored):
    """One case, as far as its costs depend on it.

    ``modules`` maps every module's dotted name to its class; ``units`` are the repeated blocks.
    ``micro_batches`` counts those of each data coordinate in step 0, and in all steps unless shares
    are ``rotating``; ``groups`` are the names of each parameter group that the optimizer makes
    (empty: all trained ones in one).  ``scaled``: losses are scaled; ``skipped``: the step in
    question overflowed and is no update; ``evaluated``: an evaluation came right before it.
    ``calls``: how often one forward calls a module, where
    that is not once.

    Where activations travel along an axis, ``inputs`` are the shapes of all micro-batches by step,
    data coordinate and window; ``step`` is the step in question.  ``roles`` are those of
    ``Build``.  ``heads`` maps modules that
    attend to their numbers of query and of KV heads, ``label_smoothing`` is that of the loss
    (``None``: it is no cross-entropy).  Where there is a pipe axis, ``hidden`` maps such a shape
    (``"4x16"``) to the elements of what each unit but the last one gives for it.

    ``terms``: bytes of the statistics of each loss term that spans the global batch.
    ``completed``: trained parameters in the order in which backward completes their gradients
    (empty: the reverse of their registration).
    ``routed``: by step and data coordinate, and by part of the positions where ranks cut them, how
    many choices each expert of a layer carried out in the oracle; empty: there is no such layer, or
    there are no numbers.
    """

    axes: Mapping[str, int]
    options: Options
    parameters: tuple[TensorFacts, ...]
    buffers: tuple[TensorFacts, ...] = ()
    modules: Mapping[str, str] = field(default_factory=dict)
    units: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = (1,)
    rotating: bool = False
    groups: tuple[tuple[str, ...], ...] = ()
    optimizer: str = "sgd"
    momentum: float = 0.9
    clipped: bool = False
    scaled: bool = False
    skipped: bool = False
    steps: int = 1
    calls: Mapping[str, int] = field(default_factory=dict)
    inputs: tuple[tuple[Windows, ...], ...] = ()
    hidden: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    step: int = 0
    roles: Mapping[str, str] = field(default_factory=dict)
    heads: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    label_smoothing: float | None = None
    evaluated: bool = False
    terms: tuple[int, ...] = ()
    completed: tuple[str, ...] = ()
    #: Most bytes of integers by which a model may know documents and positions between steps.
    noted: int = 0
    routed: tuple[tuple[Mapping[str, tuple[int, ...]], ...], ...] = ()

    @property
    def world(self) -> int:
        """Number of ranks: the product of the axes."""
        return math.prod(self.axes.values())

    def after_skips(self, updates: Collection[int]) -> ModelFacts:
        """The same where the ``updates`` of these steps were left out."""
        if not updates:
            return self
        told = tuple(NeverUpdated(**vars(t)) if t.only_in(updates) else t for t in self.parameters)
        return replace(self, parameters=told)

    def size(self, axis: str) -> int:
        """Ranks along ``axis``, or along several joined by ``+``; absent ones count 1."""
        return math.prod(self.axes.get(name, 1) for name in axis.split("+"))

    def parts(self, what: Cut) -> int:
        """Ranks over which the mesh cuts ``what`` (1: it does not)."""
        return axes.parts(self.axes, what)

    def group(self, tensor: TensorFacts | None = None) -> str:
        """The axes over which the gradient of ``tensor`` is summed (``None``: a dense one)."""
        return axes.joined(self.axes, axes.summing(self.axes, self.role(tensor) if tensor else ""))

    def role(self, tensor: TensorFacts) -> str:
        """The role of ``tensor``, or of the layer in its name; empty: none given."""
        return self.roles.get(tensor.name) or self.roles.get(tensor.name.rpartition(".")[0], "")

    @property
    def sharded(self) -> str:
        """The axes along which ranks hold different shards; empty: nothing is sharded."""
        return axes.joined(self.axes, axes.sharded(self.axes))

    @property
    def replicated(self) -> str:
        """The axes along which gradients are summed and ranks hold copies."""
        return axes.joined(self.axes, axes.replicated(self.axes))

    @property
    def shards(self) -> int:
        """Ranks that together hold the state once."""
        return self.size(self.sharded)

    @property
    def replicas(self) -> int:
        """Ranks that hold copies of a shard."""
        return self.size(self.replicated)

    @property
    def data_axes(self) -> dict[str, int]:
        """The part of the mesh along which gradients are summed."""
        return {name: self.axes[name] for name in axes.summing(self.axes)}

    def without(self, what: Cut) -> ModelFacts:
        """The same on the part of the mesh that does not cut ``what``."""
        left = {name: size for name, size in self.axes.items() if name != axes.cutting(what)}
        return replace(self, axes=left)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Place of global ``rank`` on the mesh, the last axis innermost."""
        place = {}
        for axis, size in reversed(list(self.axes.items())):
            rank, place[axis] = divmod(rank, size)
        return place

    def place(self, rank: int, axis: str) -> int:
        """Place of global ``rank`` along ``axis`` or several joined by ``+`` (0 if absent)."""
        at, number = self.coordinate(rank), 0
        for name in axis.split("+"):
            number = number * self.axes.get(name, 1) + at.get(name, 0)
        return number

    def shard_of(self, rank: int) -> int:
        """Number of the shard that global ``rank`` holds."""
        return self.place(rank, self.sharded)

    def data_coordinate(self, rank: int) -> int:
        """Which share of the batch global ``rank`` gets."""
        along = axes.sharing(self.axes)
        return self.place(rank, "+".join(name for name in self.axes if name in along))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the inputs of every micro-batch of the step, over all data coordinates."""
        shares = self.inputs[self.step] if self.inputs else ()
        return [shape for windows in shares for window in windows for shape in window]

    def called(self, name: str) -> int:
        """How often one forward calls the module ``name``."""
        return math.prod(n for part, n in self.calls.items() if f"{name}.".startswith(f"{part}."))

    def micro_batches_of(self, coordinate: int, step: int) -> int:
        """How many a data coordinate has in ``step``."""
        share = coordinate + step if self.rotating else coordinate
        return self.micro_batches[share % len(self.micro_batches)]

    @property
    def rounds(self) -> int:
        """Forward and backward passes that the group makes in a step: those of its busiest rank."""
        return max(self.micro_batches, default=0)

    @property
    def trainable(self) -> tuple[TensorFacts, ...]:
        """Parameters that are trained, in registration order."""
        return tuple(p for p in self.parameters if p.trainable)

    @property
    def float_buffer_bytes(self) -> int:
        """Bytes of the buffers that hold floating-point numbers."""
        return sum(b.nbytes for b in self.buffers if b.dtype in ITEMSIZE)

    @property
    def grouped(self) -> list[list[TensorFacts]]:
        """Trained parameters by parameter group, in the order in which an optimizer has them."""
        if not self.groups:
            return [list(self.trainable)]
        by_name = {t.name: t for t in self.trainable}
        return [[by_name[name] for name in names] for names in self.groups]

    def is_reached(self, name: str) -> bool:
        """Whether a backward of the step comes to the module ``name``: not if it trains parameters
        in other steps only.
        """
        own = [t for t in self.trainable if any(f"{o}.".startswith(f"{name}.") for o in t.owners)]
        return not own or bool(used(own, self.step))

    def option(self, name: str, default: Any) -> Any:
        """The value of option ``name``, or ``default`` where it is missing or ``None``."""
        value = self.options.get(name)
        return default if value is None else value

    def precision(self, name: str) -> str | None:
        """The dtype that ``precision.<name>`` names; ``None``: as built."""
        value = (self.options.get("precision") or {}).get(name)
        return None if value is None else str(value)

    def compute(self, dtype: str) -> str:
        """The dtype in which a parameter built as ``dtype`` is computed and sent."""
        return self.precision("parameters") or dtype

    def reduction(self, dtype: str) -> str:
        """The dtype in which its gradient is summed."""
        return self.precision("reduce") or self.compute(dtype)


def model_facts_of(case: Case, workload: Workload, model: nn.Module) -> ModelFacts:
    """The facts of ``case``; ``model`` is its model, built on the meta device."""
    # By identity: a tied parameter is one object under several names.
    owners: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(tensor), []).append(name.rpartition(".")[0])
    piped = axes.cutting("layers") in case.mesh
    homes = _homes(workload, model) if piped else {}
    inputs = _inputs(case, workload) if axes.exchanging(case.mesh) else ()
    form = workload.family.cross_entropy(workload.params)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    return ModelFacts(
        noted=_noted(case, workload),
        axes=dict(case.mesh),
        options=dict(case.options),
        parameters=tuple(
            TensorFacts(
                name,
                tuple(p.shape),
                _dtype(p.dtype),
                p.requires_grad,
                tuple(owners[id(p)]),
                workload.first_use(name),
                workload.last_use(name),
                not p.is_contiguous(),
                homes.get(id(p), ()),
            )
            for name, p in model.named_parameters()
        ),
        buffers=tuple(
            TensorFacts(name, tuple(b.shape), _dtype(b.dtype), False, units=homes.get(id(b), ()))
            for name, b in model.named_buffers()
        ),
        modules={name: type(module).__name__ for name, module in model.named_modules()},
        units=tuple(workload.units),
        micro_batches=tuple(case.workload.micro_batch_counts(case.data_coordinates)),
        rotating="rotating_shares" in case.workload.traits,
        groups=tuple(tuple(names) for _, names in case.optimizer.assign(trained)),
        optimizer=case.optimizer.name,
        momentum=case.optimizer.momentum,
        clipped=case.optimizer.clip_norm is not None,
        scaled=case.optimizer.scaler is not None,
        terms=tuple(
            term.size * max(4, ITEMSIZE[case.dtype])
            for term in workload.family.terms(workload.params)
            if term.scope == "global"
        ),
        steps=case.steps,
        completed=workload.found.completed,
        calls=_all_calls(model) | dict(workload.found.calls),
        inputs=inputs,
        roles=dict(workload.roles),
        heads=heads_of(model, workload.roles),
        label_smoothing=None if form is None else form.label_smoothing,
        hidden=_hidden(workload, case, inputs if piped else ()),
    )


def _all_calls(model: nn.Module) -> dict[str, int]:
    """Name of a module -> how often the module that holds it calls it in one forward."""
    return {
        f"{name}.{child}": count
        for name, module in model.named_modules()
        for child, count in _calls(module).items()
    }


def _homes(workload: Workload, model: nn.Module) -> dict[int, tuple[int, ...]]:
    """Parameter or buffer (its ``id``) -> numbers of the units whose part of the model has it."""
    homes: dict[int, tuple[int, ...]] = {}
    for unit in range(len(workload.units)):
        part = workload.build_for(0).stage(model, unit, unit + 1)
        for tensor in (*part.parameters(), *part.buffers()):
            homes[id(tensor)] = (*homes.get(id(tensor), ()), unit)
    return homes


def _inputs(case: Case, workload: Workload) -> tuple[tuple[Windows, ...], ...]:
    """Shapes of inputs by step, data coordinate, window and micro-batch."""
    return tuple(
        tuple(
            tuple(tuple(tuple(micro.inputs.shape) for micro in window) for window in batch.windows)
            for batch in workload.batch(step, case.data_coordinates)
        )
        for step in range(case.steps)
    )


def _noted(case: Case, workload: Workload) -> int:
    """Most bytes by which a model may know documents and positions between steps."""
    packed, cut = "packed" in workload.traits, axes.parts(case.mesh, "positions") > 1
    if not packed and not cut:
        return 0
    shapes = (s for step in _inputs(case, workload) for share in step for w in share for s in w)
    # Where the document of each position begins, and once the positions of all ranks.
    return max(8 * (shape[0] * packed + cut) * shape[-1] for shape in shapes)


def _calls(module: nn.Module) -> Mapping[str, int]:
    """The marks that the suite's own modules put on their children; a user's may differ."""
    told = getattr(module, "calls", None)
    return told if isinstance(told, Mapping) else {}


def heads_of(model: nn.Module, roles: Mapping[str, str]) -> dict[str, tuple[int, int]]:
    """Query and KV heads of every module that attends with a fused projection."""
    heads = {}
    for projection in (name for name, role in roles.items() if role == "heads"):
        name = projection.rpartition(".")[0]
        attention: Any = model.get_submodule(name)
        rows = model.get_parameter(f"{projection}.weight").shape[0]
        kv = rows // int(attention.head_size) // (int(attention.group) + 2)
        heads[name] = kv * int(attention.group), kv
    return heads


def shape_key(shape: Iterable[int]) -> str:
    """The name of a shape in :attr:`ModelFacts.hidden`."""
    return "x".join(map(str, shape))


def _hidden(
    workload: Workload, case: Case, inputs: tuple[tuple[Windows, ...], ...]
) -> dict[str, tuple[int, ...]]:
    """Elements between units, by shape of the inputs; run on the data, which choose branches."""
    import torch

    from shardproof.ledgers.program_order import nested_tensors

    def note(name: str, module: Any, given: Any, output: Any) -> None:
        sizes[name] = sum(tensor.numel() for tensor in nested_tensors(output))

    hidden: dict[str, tuple[int, ...]] = {}
    wanted = {shape_key(s) for step in inputs for share in step for w in share for s in w}
    model, sizes = workload.model(), dict[str, int]()
    for name in workload.units if wanted else ():
        model.get_submodule(name).register_forward_hook(partial(note, name))
    steps = (workload.batch(step, case.data_coordinates) for step in range(len(inputs)))
    for micro in (micro for step in steps for batch in step for micro in batch.micro_batches):
        if wanted <= set(hidden):
            break
        if (key := shape_key(micro.inputs.shape)) not in hidden:
            with torch.no_grad():
                model(micro.inputs)
            hidden[key] = tuple(sizes[name] for name in workload.units[:-1])
    return hidden


def slots(facts: ModelFacts) -> int:
    """State tensors of the optimizer that have their parameter's shape."""
    # First and second moment of AdamW; the momentum of SGD.
    return 2 if facts.optimizer == "adamw" else int(facts.momentum != 0)


def counter_bytes(facts: ModelFacts) -> int:
    """Bytes of an optimizer's step counter, one a parameter (or part): fp32 in torch's AdamW."""
    return 4 if facts.optimizer == "adamw" else 0


def used(tensors: Iterable[TensorFacts], step: int) -> list[TensorFacts]:
    """Those that have a gradient in ``step``."""
    return [t for t in used_by(tensors, step) if t.last_use is None or step <= t.last_use]


def updated_by(tensors: Iterable[TensorFacts], step: int) -> list[TensorFacts]:
    """Those of which the optimizer has state after the update of ``step``."""
    return [t for t in used_by(tensors, step) if t.is_updated]


def used_by(tensors: Iterable[TensorFacts], step: int) -> list[TensorFacts]:
    """Those that had a gradient in ``step`` or before."""
    return [t for t in tensors if t.trainable and t.first_use is not None and t.first_use <= step]


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
