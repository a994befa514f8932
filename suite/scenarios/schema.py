"""The shape of a scenario file, as pydantic models; :func:`json_schema` exports it for editors.

This module checks the shape.  Names of implementations, backends, workloads, traits and checks are
looked up only where a vocabulary is given as the context of the validation, because they depend on
what is installed.  What does not go together is in ``rules.py``.

A single value may stand for a list of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from shardproof import axes
from shardproof.case import FaultKind, FaultPhase
from shardproof.costs import expression

Tier = Literal["quick", "full"]
#: Option or knob -> value; an implementation or a workload checks them.
Values = dict[str, Any]
LaneName = Literal["bitwise", "dyadic", "fp64", "working_precision"]
RelationName = Literal[
    "split", "permute", "cut", "thawed", "world1", "scale", "recompute", "reload", "again"
]
DtypeName = Literal["float64", "float32", "bfloat16", "float16"]
# A type checker cannot read the table; to pydantic only these names are keys.
if TYPE_CHECKING:
    AxisName = str
else:
    AxisName = Literal[axes.names()]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,39}$")]
Reason = Annotated[str, Field(min_length=3, description="the reason, in one sentence")]
Clip = Annotated[float, Field(gt=0)]
#: Of rates and their factors: beyond it their products overflow float32, in which lanes train.
_LARGEST = 1e9
Size = Annotated[int, Field(ge=1, le=1024)]


class Model(BaseModel):
    """Base of all models: unknown keys are errors, and no type is silently converted."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


def _many(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _written(value: Any) -> Any:
    return str(value) if type(value) in (int, float) else value


@dataclass(frozen=True)
class _Short:
    """A value may also be given in a short ``form``, which ``read`` makes a full one."""

    read: Callable[[Any], Any]
    form: Callable[[Any], CoreSchema]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        full = handler(source)
        either = core_schema.union_schema([self.form(full), full])
        return core_schema.no_info_before_validator_function(
            self.read, full, json_schema_input_schema=either
        )


Item = TypeVar("Item")
Many = Annotated[list[Item], Field(min_length=1), _Short(_many, lambda full: full["items_schema"])]
Named = Annotated[Item, _Short(_named, lambda _: core_schema.str_schema())]


#: What is not a formula is refused.
Expression = Annotated[
    str,
    BeforeValidator(_written, json_schema_input_type=str | float),
    AfterValidator(lambda text: expression.parse(text) and text),
]
Sizes = Many[Size]
Mesh = Annotated[dict[AxisName, Sizes], Field(min_length=1)]


def _known(kind: str) -> AfterValidator:
    """A name that the vocabulary lists as ``kind``; a user's own (with a colon) is asked later."""

    def look_up(name: str, info: ValidationInfo) -> str:
        if info.context is None or (":" in name and kind in ("implementation", "workload")):
            return name
        if name not in (known := getattr(info.context, f"{kind}s")):
            found = {"kind": kind, "known": sorted(known)}
            raise PydanticCustomError("unknown_name", "unknown {kind}", found)
        return name

    return AfterValidator(look_up)


_Implementation = Annotated[str, Field(min_length=1), _known("implementation")]
_Workload = Annotated[str, Field(min_length=1), _known("workload")]
_Trait = Annotated[str, _known("trait")]


class Other(Model):
    """A second run: another implementation, mesh or options."""

    implementation: _Implementation | None = Field(None, description="default: the case's own")
    options: Values = Field(
        {}, description="of another implementation: all options; of the same: changes to the case's"
    )
    mesh: dict[AxisName, Size] | None = Field(
        None, min_length=1, description="default: the case's, or the one axis of the implementation"
    )


class SameAs(Model):
    """The relation of a case to a second run."""

    same_as: Other


def _relation_tag(value: Any) -> str:
    return "[other]" if isinstance(value, dict | SameAs) else "[name]"


Relation = Annotated[
    Annotated[RelationName, Tag("[name]")] | Annotated[SameAs, Tag("[other]")],
    Discriminator(_relation_tag),
]


class MemoryExpect(Model):
    """Bytes on the rank that holds most, and how many times less than full replication.

    State is that after the last update; `activations` and `peak` are the largest of the last step.
    """

    parameters: Expression | None = Field(None, description="bytes: a formula, as of `traffic`")
    masters: Expression | None = Field(None, description="bytes of fp32 copies")
    gradients: Expression | None = Field(None, description="bytes after the update")
    optimizer_state: Expression | None = Field(None, description="bytes, step counters included")
    state: Expression | None = Field(None, description="bytes of these four together")
    activations: Expression | None = Field(None, description="bytes kept for backward")
    peak: Expression | None = Field(None, description="bytes of all classes at once")
    ratio: Expression | None = Field(None, description="full replication's state over this state")
    within: float = Field(0.0, ge=0, lt=1, description="largest relative error; 0: exact")

    @model_validator(mode="after")
    def _asks(self) -> MemoryExpect:
        if not self.model_dump(exclude={"within"}, exclude_none=True):
            raise ValueError("no expected value given: add one, e.g. `ratio: zero1.memory_ratio`")
        return self


class Expect(Model):
    """Expectations beyond correct numbers."""

    traffic: Expression | None = Field(
        None,
        description="floating-point payload of one optimizer step, in bytes summed over ranks: a "
        "named formula, or an expression of numbers, facts, + - * / ( ) min max ceil",
    )
    memory: MemoryExpect | None = Field(None, description="bytes by class, and a ratio")
    buckets: int | None = Field(None, ge=1, le=100_000, description="minimum of buckets per step")
    refuses: str | None = Field(None, min_length=1, description="text in the refusal")
    relation: Relation | None = Field(None, description="to a second run: see check `relations`")


class ImplementationChoice(Model):
    """An implementation and its options; a bare name stands for `{name: ...}`."""

    name: _Implementation = Field(description="family/name, or package.module:Class")
    options: Values = Field({}, description="passed to setup()")
    label: Label | None = Field(None, description="label of the options in ids and tables")
    expect: Expect | None = Field(None, description="overrides the scenario's expect")

    @model_validator(mode="after")
    def _labelled(self) -> ImplementationChoice:
        if self.options and self.label is None:
            message = "options need a label, so that ids of cases differ: add e.g. `label: mine`"
            raise ValueError(message)
        return self


class Group(Model):
    """A parameter group of the optimizer: names that match `pattern` (re.search)."""

    pattern: str
    lr_scale: float = Field(1.0, ge=0, le=_LARGEST)
    weight_decay: float | None = Field(None, ge=0, le=_LARGEST)

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"not a valid Python regular expression: {error}") from None
        return pattern


class Scaler(Model):
    """Dynamic loss scaling, by the rule of torch.amp.GradScaler."""

    initial: float = Field(65536.0, gt=0, description="scale in the first step")
    growth: float = Field(2.0, gt=1, description="factor after `interval` updates without overflow")
    backoff: float = Field(0.5, gt=0, lt=1, description="factor after an overflow")
    interval: int = Field(2000, ge=1, description="updates without overflow before the scale grows")


class OptimizerChoice(Model):
    """The optimizer as data; a bare name stands for `{name: ...}`."""

    name: Literal["sgd", "adamw"]
    label: Label | None = None
    lr: float | None = Field(None, gt=0, le=_LARGEST, description="peak rate; sgd 0.1, adamw 0.003")
    momentum: float = Field(0.9, ge=0, lt=1)
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.95], min_length=2, max_length=2
    )
    eps: float = Field(1e-8, gt=0, le=_LARGEST)
    weight_decay: float = Field(0.0, ge=0, le=_LARGEST)
    warmup_steps: int = Field(0, ge=0)
    groups: list[Group] = Field([])
    scaler: Scaler | None = Field(None, description="loss scaling; null: none")


class PrecisionChoice(Model):
    """A mixed-precision policy; keys without a value keep the built dtype.

    The implementation gets it as its option `precision`; so does the oracle.
    """

    label: Label = Field(description="name of the policy in ids")
    built: DtypeName | None = Field(None, description="dtype of the model; default: the lane's")
    parameters: DtypeName | None = Field(None, description="dtype of compute and sent parameters")
    reduce: DtypeName | None = Field(None, description="dtype of gradient sums over ranks")
    output: DtypeName | None = Field(None, description="dtype of the model's outputs")
    buffers: DtypeName | None = Field(None, description="dtype of floating-point buffers")


class WorkloadKeys(Model):
    """Model, data and batch shape; `shardproof list traits` shows the traits."""

    name: _Workload = Field(description="a workload of the suite")
    traits: list[_Trait] = Field([], description="trigger conditions")
    seed: int = Field(0, ge=0, lt=2**31)
    global_batch: int = Field(24, ge=1, le=4096, description="samples in one optimizer step")
    micro_batches: int = Field(2, ge=1, le=64, description="per data coordinate and window")
    windows: int = Field(1, ge=1, le=16, description="schedule calls in one optimizer step")
    params: Values = Field({}, description="parameters of the workload")


class WorkloadChoice(Model):
    """A value of the workload axis: a label, and changes to the scenario's workload."""

    label: Label = Field(description="name of the variant in ids")
    name: _Workload | None = None
    traits: list[_Trait] | None = None
    seed: int | None = Field(None, ge=0, lt=2**31)
    global_batch: int | None = Field(None, ge=1, le=4096)
    micro_batches: int | None = Field(None, ge=1, le=64)
    windows: int | None = Field(None, ge=1, le=16)
    params: Values | None = None
    expect: Expect | None = Field(None, description="overrides the implementation's expect")


class QuickSize(Model):
    """The training of quick cells in place of the workload; a variant's own values remain."""

    global_batch: int | None = Field(None, ge=1, le=4096)
    steps: int | None = Field(None, ge=1, le=3000, description="optimizer steps")
    params: Values = Field({}, description="parameters of the workload")


Implementations = Many[Named[ImplementationChoice]]
Optimizers = Many[Named[OptimizerChoice]]
Words = Many[Annotated[str, Field(min_length=1)]]
Backends = Many[Annotated[str, Field(min_length=1), _known("backend")]]
Checks = Many[Annotated[str, Field(min_length=1), _known("check")]]
Meshes = Many[Mesh]
Clips = Many[Clip | None]
Lanes = Many[LaneName]
Precisions = Many[PrecisionChoice]
Workloads = Many[WorkloadChoice]


class Axes(Model):
    """The axes of cells, each of which may be left open."""

    implementation: Implementations = Field([], description="systems under test")
    backend: Backends = Field([], description="communication backend")
    mesh: Meshes = Field([], description="axes and sizes; a list of sizes gives one mesh each")
    optimizer: Optimizers = Field(
        [], description="sgd, adamw or a mapping; none where the workload trains nothing"
    )
    clip: Clips = Field([], description="largest global gradient norm; null: no clipping")
    lane: Lanes = Field([], description="way of comparing numbers")
    precision: Precisions = Field([], description="mixed-precision policies; none: the built dtype")
    workload: Workloads = Field([], description="variants of the scenario's workload")


class Matrix(Axes):
    """The axes; every combination of their values is a case."""

    implementation: Implementations = Field(description="systems under test")
    backend: Backends = Field(description="communication backend")
    mesh: Meshes = Field(description="axes and sizes; a list of sizes gives one mesh each")
    clip: Clips = Field([None], description="largest global gradient norm; null: no clipping")
    lane: Lanes = Field(["fp64"], description="way of comparing numbers")


class FaultExpect(Model):
    """The expected outcome of a fault."""

    verdict: Many[Literal["pass", "fail", "crash", "hang"]] = Field(
        description="any of these: kill, exit, raise: crash; stop, drop: hang; swap, shape: crash "
        "or hang; corrupt: fail; delay, slow_node: pass"
    )
    rank: int | None = Field(None, ge=0, description="the rank to blame; null: any or none")
    says: Words = Field([], description="texts that the sentence must all contain")


class FaultPlan(Model):
    """A fault that the suite makes in one rank; every plan gives each cell once more."""

    kind: FaultKind = Field(
        description="kill, stop, raise, exit, delay (the rank); corrupt (one bit of a payload), "
        "drop (a call is not made), swap (two calls exchanged), shape (one element more); of its "
        "node, in `cluster run`: kill_node, pause_node, cut_node, slow_node, fill_memory, fill_disk"
    )
    rank: int = Field(ge=0, description="the rank in which it happens")
    step: int = Field(0, ge=0, description="optimizer step, from 0; of setup and load: 0")
    phase: FaultPhase = Field(description="where in the step; save: after it, load: before all")
    call: int = Field(0, ge=0, description="calls of the phase before the fault")
    seconds: float = Field(1.0, gt=0, le=60, description="length of a delay, pause or cut")
    label: Label | None = Field(None, description="name of the plan in ids; default: its kind")
    expect: FaultExpect = Field(description="{verdict, rank, says}: the expected outcome")


class Into(Other):
    """The run that loads a checkpoint."""

    precision: PrecisionChoice | None = Field(None, description="its policy; null: the case's own")


class CheckpointKeys(Model):
    """When a case saves, and which run loads; every plan gives each cell once more."""

    label: Label = Field(description="name of the plan in ids")
    save_at: int = Field(ge=1, description="steps completed at the last save")
    saves: int = Field(1, ge=1, description="number of saves, one a step, the last at save_at")
    into: Into | None = Field(None, description="the restoring system; null: the same")
    again_at: int | None = Field(
        None, ge=1, description="steps completed when the restoring run saves; null: never"
    )
    trained: int = Field(0, ge=0, description="steps that the restoring run trains before it loads")


class Change(Model):
    """Members join and leave before a step."""

    step: int = Field(ge=0, description="the first step of the new members, from 0")
    members: list[Annotated[int, Field(ge=0)]] = Field(description="ranks from then on, ascending")


class DeathPlan(Model):
    """A member dies inside a step, which the others take again without it."""

    rank: int = Field(ge=0, description="the member that dies")
    step: int = Field(ge=0, description="optimizer step, from 0")
    call: int = Field(0, ge=0, description="calls of that step that it makes before it dies")


class MembershipPlan(Model):
    """Members that join, leave and die; every plan gives each cell once more."""

    label: Label = Field(description="name of the plan in ids")
    changes: list[Change] = Field([], description="changes between steps, in order")
    deaths: list[DeathPlan] = Field([], description="inside steps; the rank is gone until a change")


class Match(Model):
    """Cells for which every given key holds; a list means any of its values.

    A missing key is an empty list; ``clip: null`` is a list of one.
    """

    implementation: Words = Field([], description="glob on the name or name+label")
    label: Words = Field([], description="glob on the implementation's label")
    backend: Words = Field([], description="communication backend")
    mesh: Words = Field([], description="short form, e.g. replicate4 or shard2xtensor2")
    world: Sizes = Field([], description="number of ranks")
    workload: Words = Field([], description="glob on the label of the workload variant")
    optimizer: Words = Field([], description="glob on the optimizer's label or name")
    clip: Clips = Field([], description="null matches cells without clipping")
    lane: Lanes = Field([], description="way of comparing numbers")
    precision: Words = Field([], description="glob on the label of the precision policy")
    fault: Words = Field([], description="glob on the label of the fault plan")
    checkpoint: Words = Field([], description="glob on the label of the checkpoint plan")
    membership: Words = Field([], description="glob on the label of the membership plan")


class Rule(Match):
    """A match and its reason."""

    reason: Reason


class KnownFailure(Rule):
    """A match, its reason and, where they are given, words of the right failure."""

    says: Words = Field([], description="texts that the failure must all contain")


class Include(Axes):
    """Cells to add: a small matrix; missing axes keep the values of the matrix."""

    reason: Reason
    tier: Tier | None = Field(None, description="tier of these cells")


class Scenario(Model):
    """One scenario file."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9_.-]{0,59}$", description="unique; lower case, digits, - _ ."
    )
    about: str = Field(min_length=3, description="the purpose of this scenario")
    sees: Annotated[Words, Field(description="fault classes that it must catch")]
    tier: Tier = Field("quick", description="tier of the cells that no `quick` rule matches")
    workload: WorkloadKeys = Field(description="model, data and batch shape")
    matrix: Matrix = Field(description="axes, multiplied into cells")
    steps: int = Field(3, ge=1, le=3000, description="optimizer steps")
    checks: Checks = Field(description="what is judged; `shardproof list checks` shows all")
    expect: Expect = Field(
        default_factory=lambda: Expect.model_validate({}), description="costs and refusals"
    )
    faults: list[FaultPlan] = Field([], description="faults to make, judged by check `faults`")
    checkpoints: list[CheckpointKeys] = Field([], description="saves, judged by `checkpoint`")
    membership: list[MembershipPlan] = Field([], description="changes, judged by `membership`")
    include: list[Include] = Field([], description="cells to add")
    exclude: list[Rule] = Field([], description="cells to remove")
    xfail: list[KnownFailure] = Field([], description="cells known to fail")
    skip: list[Rule] = Field([], description="cells that do not run")
    quick: list[Match] = Field([], description="cells of the quick tier; all others are `full`")
    quick_size: QuickSize | None = Field(None, description="a smaller form of the quick tier")
    deadline: float = Field(60.0, gt=0, le=3600, description="CPU seconds that a rank may compute")
    memory_gib: float = Field(8.0, gt=0.5, description="resident memory of one rank process")

    @property
    def least_steps(self) -> int:
        """Steps of its shortest cases."""
        return min(self.steps, (self.quick_size and self.quick_size.steps) or self.steps)

    @model_validator(mode="after")
    def _consistent(self) -> Scenario:
        if len({*self.checks}) != len(self.checks):
            raise ValueError("the list 'checks' has the same check twice: remove the duplicate")
        return self


def json_schema(model: type[Model] = Scenario, name: str = "scenario") -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a file of this shape, for editors and other tools."""
    own = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"Shardproof {name}"}
    return own | model.model_json_schema(mode="validation") | own
