"""A workload: a model family, its data, and how the global batch is cut.

The global batch of a step depends on the ``case.WorkloadSpec`` and the step only.  It
is cut contiguously over the data coordinates (unevenly where it does not divide, as by
``numpy.array_split``), each share again into windows and micro-batches.  The weight of every valid
target is 1 over their number in the *global* batch, so the weights sum to 1 whatever the cut.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardproof import tensor_bytes
from shardproof.case import WorkloadSpec
from shardproof.contract import Batch, CrossEntropy, LossTerm, MicroBatch, Role
from shardproof.workloads import layers
from shardproof.workloads.draws import generators
from shardproof.workloads.knobs import Knob, Params, check_traits, lookup, values_of
from shardproof.workloads.traits import FLAGS, SPIKES, TRAITS

#: A part of a tensor: one ``(start, stop)`` per dimension.
Region = tuple[tuple[int, int], ...]

_DTYPE_NAMES = ("float64", "float32", "bfloat16", "float16")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES}


@dataclass(frozen=True)
class Picks:
    """The draws of a batch, one number a sample: its ``index`` in the data set, a random number,
    flag bits; ``keys`` (below 2^31) are to travel with the inputs, for dropout.  ``packed``:
    samples hold several documents.
    """

    index: Sequence[int]
    draws: Sequence[int]
    flags: Sequence[int]
    keys: Sequence[int] | None
    dtype: torch.dtype
    packed: bool = False


@dataclass(frozen=True)
class Samples:
    """Samples on the first dimension; ``valid`` (bool) has the shape of ``targets``."""

    inputs: Tensor
    targets: Tensor
    valid: Tensor


@dataclass(frozen=True)
class Found:
    """The properties that a model shows when it runs: slices of parameters whose true gradient is
    0, trained parameters that no forward uses, traits that it has by itself, how often one forward
    of a module calls a child where that is not once, the widest dtype that it computes in, a
    parameter whose gradient holds more than that of the loss (empty: none does), and parameters in
    the order in which backward completes their gradients (empty: the reverse of registration).
    """

    zero_gradient: Mapping[str, list[Region]] = field(default_factory=dict)
    unused: frozenset[str] = frozenset()
    traits: tuple[str, ...] = ()
    calls: Mapping[str, int] = field(default_factory=dict)
    widest: str = "float64"
    beside_loss: str = ""
    completed: tuple[str, ...] = ()


class WorkloadFamily(ABC):
    """A kind of model with its data: what distinguishes one workload from another."""

    name: str
    about: str
    knobs: ClassVar[Mapping[str, Knob]]
    #: Named sets of knobs for ``--size``, by about how many parameters they give.
    sizes: ClassVar[Mapping[str, Params]] = {}
    digest: str
    #: Whether all its numbers are small integers over powers of two.
    dyadic: ClassVar[bool] = False

    #: Whether a fresh model has its initial values already, and :meth:`initial` perturbs them.
    has_values: ClassVar[bool] = False

    def check(self, params: Params) -> None:
        """Raise :class:`WorkloadError` for knobs that do not fit together."""

    def resolve(self, given: Params) -> Params:
        """All knobs, with the values that are ``given``, checked one by one and together."""
        params = values_of(self.name, self.knobs, given)
        self.check(params)
        return params

    def carriers(self, trait: str) -> Collection[str]:
        """The workloads that can carry ``trait``, this one among them if it can."""
        return TRAITS[trait].applies_to

    @abstractmethod
    def size(self) -> int:
        """Number of samples in the data set."""

    @abstractmethod
    def model(self, params: Params, traits: Collection[str], place: layers.Place) -> nn.Module:
        """A fresh, uninitialised model; frozen parameters already marked."""

    def units(self, model: nn.Module) -> tuple[str, ...]:
        """Dotted names of the repeated blocks of ``model``, in forward order."""
        return tuple(f"blocks.{name}" for name, _ in model.get_submodule("blocks").named_children())

    def roles(self, model: nn.Module) -> Mapping[str, Role]:
        """The roles of modules of ``model``, by their parents' attribute ``roles``."""
        return {
            f"{name}.{child}".strip("."): role
            for name, module in model.named_modules()
            for child, role in getattr(module, "roles", {}).items()
        }

    def stage(self, model: nn.Module, start: int, stop: int) -> nn.Module:
        """The part of ``model`` with units ``start`` to ``stop - 1``."""
        if not isinstance(model, layers.Stack):
            raise ValueError(f"a {type(model).__name__} has no pipeline stages: use a layers.Stack")
        return layers.StackPart(model, start, stop)

    def unfit(self, params: Params, lane: str) -> str:
        """Why the numbers of ``lane`` do not hold for the model (empty: they do)."""
        return ""

    def unstaged(self, params: Params) -> str:
        """Why the model cannot be cut into stages (empty: it can)."""
        return ""

    @abstractmethod
    def samples(self, params: Params, picks: Picks) -> Samples:
        """Encode what ``picks`` names of the data set."""

    def initial(self, seed: str, name: str, tensor: Tensor, owner: nn.Module) -> Tensor:
        """The initial value of the parameter or buffer ``name``, in fp64."""
        return layers.initial_value(seed, name, tensor, owner)

    def weights(self, valid: Tensor) -> Tensor:
        """Target weights (fp64) that sum to 1 over the global batch; 0 where not ``valid``."""
        return valid.to(torch.float64) / int(valid.sum())

    def cross_entropy(self, params: Params) -> CrossEntropy | None:
        """The cross-entropy that :meth:`loss` is (``None``: it is another function)."""
        return CrossEntropy(label_smoothing=params.get("label_smoothing", 0.0))

    def flags(self, params: Params, step: int) -> int:
        """Bits that all samples of ``step`` have, whatever the traits."""
        return 0

    def is_late(self, params: Params, traits: Collection[str], name: str) -> bool:
        """Whether no rank uses parameter ``name`` in the first step."""
        return False

    def loss(self, params: Params, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """``sum(weight * cross entropy)``, computed in the dtype of the weights."""
        form = self.cross_entropy(params)
        if form is None:
            raise NotImplementedError(f"{self.name} has no loss: define cross_entropy() or loss()")
        classes = outputs.shape[-1]
        logits = outputs.reshape(-1, classes).to(micro.weights.dtype)
        losses = F.cross_entropy(
            logits,
            micro.targets.reshape(-1),
            reduction="none",
            ignore_index=form.ignore_index,
            label_smoothing=form.label_smoothing,
        )
        return (micro.weights.reshape(-1) * losses).sum()

    def terms(self, params: Params) -> Sequence[LossTerm]:
        """Parts of the loss that are no sums over targets (``Build.terms``)."""
        return ()

    def depends_on_cut(self, params: Params) -> bool:
        """Whether one sample's gradient depends on the others in its micro-batch."""
        return False

    def zero_gradient(self, params: Params) -> dict[str, list[Region]]:
        """Slices of parameters whose true gradient is 0."""
        return {}

    def found(self, workload: Workload) -> Found:
        """The properties that only a look at the model and its first gradients shows."""
        return Found(zero_gradient=self.zero_gradient(workload.params))


class ModelBuild:
    """Builds the model of a workload for one rank (:class:`~shardproof.contract.Build`)."""

    def __init__(self, workload: Workload, rank: int, coordinate: int) -> None:
        self.units: Sequence[str] = workload.units
        self.roles: Mapping[str, Role] = workload.roles
        self.cross_entropy = workload.family.cross_entropy(workload.params)
        terms = workload.family.terms(workload.params)
        self.terms: Sequence[LossTerm] = [term for term in terms if term.scope != "micro-batch"]
        self._within = [term for term in terms if term.scope == "micro-batch"]
        self._workload = workload
        self._rank = rank
        self._coordinate = coordinate

    def __call__(self, device: str = "cpu") -> nn.Module:
        """A fresh module on ``device``, perturbed by rank (uninitialised on ``"meta"``)."""
        module = self._workload.model(device)
        for name, generator in generators(module).items():
            seed = f"{self._workload.spec.seed}/draws/{name}/{self._coordinate}"
            generator.manual_seed(layers.seed_number(seed))
        if device == "meta":
            return module
        seed = f"{self._workload.spec.seed}/perturbed/{self._rank}"
        with torch.no_grad():
            for name, tensor, owner in layers.named_tensors(module):
                if self._workload.family.has_values and layers.is_derived(name, owner):
                    continue  # in no state dict: whoever builds the model makes it
                value = self._workload.family.initial(seed, name, tensor, owner)
                tensor.copy_(value if value.is_floating_point() else value + 1000 + self._rank)
        return module

    def stage(self, module: nn.Module, start: int, stop: int) -> nn.Module:
        """The part of ``module`` with blocks ``start`` to ``stop - 1``."""
        if not 0 <= start < stop <= len(self.units):
            raise ValueError(f"units[{start}:{stop}] is invalid: the model has {len(self.units)}")
        return self._workload.family.stage(module, start, stop)

    def loss(self, outputs: Tensor, micro: MicroBatch) -> Tensor:
        """Scalar ``sum(micro.weights * token_loss)`` of the outputs of a micro-batch, and the terms
        that it has by itself.
        """
        loss = self._workload.family.loss(self._workload.params, outputs, micro)
        return sum((t.value(t.statistics(outputs, micro)) for t in self._within), loss)


class Workload:
    """Model, data, initial state and batches of one :class:`~shardproof.case.WorkloadSpec`.

    ``rounded_to`` names a narrower dtype whose values the state and the weights take before they
    are cast to ``dtype``: the fp64 twin of a bf16 run starts from the same numbers.
    """

    def __init__(
        self, family: WorkloadFamily, spec: WorkloadSpec, dtype: str, rounded_to: str | None = None
    ) -> None:
        self.family = family
        self.spec = spec
        self.dtype = dtype
        self.params = resolve(family, spec)
        self.traits = frozenset(spec.traits)
        self._dtype = lookup(dtype, DTYPES, "dtype")
        narrow = lookup(rounded_to or dtype, DTYPES, "dtype")
        # Target weights are held in fp32 at least: 1/97 in bf16 would be another loss.
        self._weight_dtype = self._dtype if self._dtype.itemsize >= 4 else torch.float32
        self._round_weights = torch.float32 if narrow.itemsize < 8 else torch.float64
        self._narrow = narrow
        self._cached: tuple[int, MicroBatch] | None = None
        self._prepared: dict[tuple[int, int], list[Batch]] = {}
        #: The number of its first sample, of a workload that :meth:`at` gave.
        self._first: int | None = None
        self._epoch = max(3, 5 * spec.global_batch // 2)

    @property
    def digest(self) -> str:
        """Of the data set; of a user's own, of the first batch."""
        if self.family.digest:
            return self.family.digest
        whole = self.whole_batch(0)
        parts = (tensor_bytes.digest(part) for part in (whole.inputs, whole.targets))
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()

    def model(self, device: str = "cpu") -> nn.Module:
        """An uninitialised model on ``device``."""
        return self.family.model(self.params, self.traits, {"device": device, "dtype": self._dtype})

    def build_for(self, rank: int, coordinate: int = 0) -> ModelBuild:
        """The builder that global rank ``rank`` is given; its values differ from every other's.

        Generators inside the model are seeded by data ``coordinate``, the same on all its ranks.
        """
        return ModelBuild(self, rank, coordinate)

    def state(self) -> dict[str, Tensor]:
        """Copies of the true initial parameters and buffers; tied ones once."""
        return {name: tensor.clone() for name, tensor in self._state.items()}

    @cached_property
    def _state(self) -> dict[str, Tensor]:
        seed = f"{self.spec.seed}/state"
        state = {}
        is_told = self.family.has_values
        for name, tensor, owner in layers.named_tensors(self.model() if is_told else self.skeleton):
            value = tensor if is_told else self.family.initial(seed, name, tensor, owner)
            if value.is_floating_point():
                value = value.to(self._narrow).to(self._dtype)
            state[name] = value.detach()
        return state

    @cached_property
    def skeleton(self) -> nn.Module:
        """The model on ``"meta"``: names and shapes, made once."""
        return self.model("meta")

    @cached_property
    def units(self) -> tuple[str, ...]:
        """Dotted names of the blocks, in forward order."""
        return self.family.units(self.skeleton)

    @cached_property
    def roles(self) -> Mapping[str, Role]:
        """The roles of modules, by dotted name."""
        return self.family.roles(self.skeleton)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every parameter, in registration order, tied ones once."""
        return {name: tuple(p.shape) for name, p in self.skeleton.named_parameters()}

    @cached_property
    def parameter_names(self) -> list[str]:
        """Names of all parameters, in the order of the module."""
        return list(self.shapes)

    @cached_property
    def trainable_names(self) -> list[str]:
        """Parameters that require gradients (used or not), in registration order."""
        return [name for name, p in self.skeleton.named_parameters() if p.requires_grad]

    @cached_property
    def unused(self) -> set[str]:
        """Names of the trainable parameters that never get a gradient."""
        by_name = {name for name in self.trainable_names if ".unused." in f".{name}"}
        return by_name | self.found.unused

    @cached_property
    def found(self) -> Found:
        """The properties that a look at the model and its first gradients shows."""
        return self.family.found(self)

    @property
    def unused_possible(self) -> bool:
        """Whether a rank may leave a trainable parameter without gradient in some step."""
        late = any(self.family.is_late(self.params, self.traits, n) for n in self.trainable_names)
        return late or not self.traits.isdisjoint(("unused", *FLAGS))

    def first_use(self, name: str) -> int | None:
        """The first step in which some rank uses trainable ``name``; ``None``: none ever does."""
        if name in self.unused:
            return None
        late = self.family.is_late(self.params, self.traits, name)
        return 1 if late or ".conditional_late_step." in f".{name}" else 0

    def last_use(self, name: str) -> int | None:
        """The last step in which some rank uses trainable ``name``; ``None``: there is no last."""
        return 0 if ".conditional_early_step." in f".{name}" else None

    @property
    def depends_on_cut(self) -> bool:
        """Whether the cut of the batch into micro-batches changes the numbers."""
        return self.family.depends_on_cut(self.params) or any(
            TRAITS[name].by_cut for name in self.traits
        )

    @property
    def zero_gradient(self) -> Mapping[str, list[Region]]:
        """Regions of parameters whose gradient is zero in every step (name -> regions)."""
        return self.found.zero_gradient

    def load(self, module: nn.Module, state: Mapping[str, Tensor] | None = None) -> None:
        """Copy ``state`` (default: the initial one) into the tensors of ``module`` with the same
        names.
        """
        layers.load_state(module, self._state if state is None else state)

    def prepare(self, steps: int, coordinates: int) -> None:
        """Make the state and the shares of ``steps`` steps now, for all processes forked later."""
        _ = self._state, self.found
        for step in range(steps):
            self._prepared[step, coordinates] = self.batch(step, coordinates)

    def batch(self, step: int, coordinates: int) -> list[Batch]:
        """The shares of ``coordinates`` data coordinates in ``step``, in their order.

        Whoever may write into them takes copies: prepared ones are everybody's.
        """
        if (step, coordinates) in self._prepared:
            return self._prepared[step, coordinates]
        whole = self.whole_batch(step)
        parts = (whole.inputs, whole.targets, whole.weights, whole.sample_ids)

        def micro(index: list[int]) -> MicroBatch:
            chosen = MicroBatch(*(part[index] for part in parts))
            return _trimmed(chosen) if "variable_lengths" in self.traits else chosen

        batches: list[Batch] = []
        start = 0
        for cut in self.spec.cut(coordinates):
            size = sum(map(sum, cut))
            order = iter(self._order(step, range(start, start + size)))
            start += size
            lots = [[list(itertools.islice(order, length)) for length in sizes] for sizes in cut]
            batches.append(Batch(step, tuple(tuple(map(micro, window)) for window in lots)))
        # The share of the first data coordinate in this step.
        first = step % coordinates if "rotating_shares" in self.traits else 0
        return batches[first:] + batches[:first]

    def at(self, first: int, size: int) -> Workload:
        """The same whose batch, of any step, are ``size`` samples from number ``first`` on.

        Samples stand in one endless row: epoch after epoch, each whole.
        """
        moved = copy.copy(self)
        moved.spec = dataclasses.replace(self.spec, global_batch=size)
        moved._first, moved._cached, moved._prepared = first, None, {}
        return moved

    def whole_batch(self, step: int) -> MicroBatch:
        """The global batch of ``step`` as one micro-batch, in the order of its sample ids."""
        cached = self._cached  # read once: threads share a workload
        if cached is not None and cached[0] == step:
            return cached[1]
        whole = self.fresh_batch(step)
        self._cached = step, whole
        return whole

    def fresh_batch(self, step: int) -> MicroBatch:
        """As :meth:`whole_batch`, made again."""
        size, index = self.spec.global_batch, self._index(step)
        generator = _generator(f"{self.spec.seed}/draws/{step}")
        draws = torch.randint(1 << 30, (size,), generator=generator).tolist()
        flags = [self._flags(step, place) for place in range(size)]
        seeds = (f"{self.spec.seed}/key/{step}/{i}" for i in range(size))
        has_keys = "dropout_counter" in self.traits
        keys = [layers.seed_number(seed) >> 32 for seed in seeds] if has_keys else None
        packed = "packed" in self.traits
        picks = Picks(index, draws, flags, keys, self._dtype, packed)
        samples = self.family.samples(self.params, picks)
        valid, targets = self._mask(samples.valid), samples.targets
        if "ignore_index" in self.traits:
            targets = targets.masked_fill(~valid, CrossEntropy.ignore_index)
        weights = self.family.weights(valid).to(self._round_weights).to(self._weight_dtype)
        numbers = torch.arange(size) + (step * size if self._first is None else self._first)
        return MicroBatch(samples.inputs, targets, weights, numbers)

    def progress(self, step: int) -> dict[str, int]:
        """How far training is in the data after ``step`` steps, for a checkpoint: whole epochs, and
        samples taken of the one under way.  Without the trait there is one endless epoch.
        """
        epoch, batches = divmod(step, self._batches) if self._batches else (0, step)
        return {"epoch": epoch, "taken": batches * self.spec.global_batch}

    def step_at(self, progress: Mapping[str, int]) -> int:
        """The number of steps after which :meth:`progress` is ``progress``."""
        return progress["epoch"] * self._batches + progress["taken"] // self.spec.global_batch

    @cached_property
    def _batches(self) -> int:
        """Batches of an epoch (0: it never ends); what does not fill one is left out."""
        return 2 if "short_epochs" in self.traits else 0

    def _index(self, step: int) -> list[int]:
        """The samples of the global batch of ``step``, by their numbers in the data set."""
        size, every, at = self.spec.global_batch, self._permutation, self.progress(step)
        if self._first is not None:
            return [self._sample(self._first + number) for number in range(size)]
        if not self._batches:  # one order, again and again
            return [every[(at["taken"] + i) % len(every)] for i in range(size)]
        order = self._order_of_epoch(at["epoch"])[at["taken"] : at["taken"] + size]
        return [every[i % len(every)] for i in order]

    def _sample(self, number: int) -> int:
        """Sample ``number`` of the endless row, by its number in the data set."""
        if self._batches:
            epoch, place = divmod(number, self._epoch)
            number = self._order_of_epoch(epoch)[place]
        return self._permutation[number % len(self._permutation)]

    def _order_of_epoch(self, epoch: int) -> list[int]:
        generator = _generator(f"{self.spec.seed}/order/{epoch}")
        return torch.randperm(self._epoch, generator=generator).tolist()

    @cached_property
    def _period(self) -> int:
        """Every how many samples one is flagged for a branch of one micro-batch.

        Twice the largest number of micro-batches: then the flagged samples of a share fit into one.
        """
        return 2 * sum(self.spec.window_sizes(1))

    def _order(self, step: int, share: range) -> list[int]:
        """The samples of a share; those for the first (last) micro-batch come first (last)."""
        flags = {index: self._flags(step, index) for index in share}
        first, last = (FLAGS[f"conditional_{which}_micro_batch"] for which in ("by", "last"))
        return sorted(share, key=lambda i: bool(flags[i] & last) - bool(flags[i] & first))

    def _flags(self, step: int, index: int) -> int:
        wanted = {
            "conditional_by_rank": index < (self.spec.global_batch + 1) // 2,
            "conditional_by_micro_batch": index % self._period == 0,
            "conditional_last_micro_batch": index % self._period == 1,
            "conditional_late_step": step >= 1,
            "conditional_early_step": step == 0,
        }
        flags = sum(FLAGS[name] for name, on in wanted.items() if on and name in self.traits)
        flags |= self.family.flags(self.params, step)
        if "overflow_on_one_rank" in self.traits and index == self.spec.global_batch - 1:
            flags += SPIKES.get(step, 0)
        return flags

    def _mask(self, valid: Tensor) -> Tensor:
        """``valid`` as the traits of the batch leave it; at least one target remains."""
        valid, size, half = valid.clone(), len(valid), (len(valid) + 1) // 2
        for index in range(size) if "unequal_tokens" in self.traits else ():
            if valid.dim() > 1:
                share = ((index + 1) / size) ** 2
                valid[index, max(1, int(share * valid.shape[1])) :] = False
            # One target a sample: two of eight stay in the first half, among them the first
            # samples that are flagged for the first and the last micro-batch.
            elif index < half and index % 8 > 1:
                valid[index] = False
        if "one_rank_without_tokens" in self.traits and size > 1:
            valid[half:] = False
        return valid

    @cached_property
    def _permutation(self) -> list[int]:
        generator = _generator(f"{self.spec.seed}/order")
        return torch.randperm(self.family.size(), generator=generator).tolist()


def resolve(family: WorkloadFamily, spec: WorkloadSpec) -> Params:
    """All knobs of ``family`` with the values of ``spec``; checks the whole of ``spec``."""
    params = family.resolve(spec.params)
    for name, smallest in (("global_batch", 1), ("micro_batches", 1), ("windows", 1), ("seed", 0)):
        Knob(smallest, smallest).check(name, getattr(spec, name))
    check_traits(family.name, family.carriers, spec.traits, spec.micro_batches)
    return params


def _trimmed(micro: MicroBatch) -> MicroBatch:
    """``micro`` up to the last position at which a target counts; a dropout key behind stays."""
    used, full = micro.weights.any(0).nonzero(), micro.targets.shape[1]
    length = 1 + int(used.max()) if len(used) else 1
    inputs = torch.cat([micro.inputs[:, :length], micro.inputs[:, full:]], 1)
    targets, weights = (part[:, :length].contiguous() for part in (micro.targets, micro.weights))
    return MicroBatch(inputs, targets, weights, micro.sample_ids)


def _generator(text: str) -> torch.Generator:
    return torch.Generator().manual_seed(layers.seed_number(text))
