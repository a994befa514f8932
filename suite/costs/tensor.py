"""Tensor and sequence parallelism: what is split, what is on every rank, what ranks exchange."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

from shardproof.costs import model
from shardproof.costs.layout import chunk
from shardproof.costs.model import Bytes, CostModel, Flow, Local, NoCostModel, Operation
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, TensorFacts, used
from shardproof.costs.stages import comes_apart

#: Roles of layers whose output features are split: of pairs in a unit, and over the vocabulary.
_COLUMNS, _VOCABULARY = ("heads", "column"), ("embedding", "classes")
#: Role -> the dimension of a weight that the ranks divide, and what it counts.
_DIVIDED = {"column": (0, "output"), "row": (1, "input")}
#: Bytes of losses, norms and factors of a step.
_SCALARS = 256


class TensorParallel(CostModel):
    """A rank of t holds P + G + O bytes: 1/t of those of split layers, all of those of others."""

    strategy = "tensor"
    frees_gradients = True
    divided = (True, True, True)
    source = (
        "each layer has two all-reduces forward and two backward of bsh elements: Megatron-LM "
        "(arXiv 1909.08053) section 3, arXiv 2104.04473 section 3.2; or all-gathers and reduce-"
        "scatters of the same bytes: arXiv 2205.05198 section 4.2.2; the embedding and the head "
        "add one pair; a split loss sends a maximum and 2 or 3 sums per target; partial gradients "
        "(replicated parameters if sequences are split, shared KV heads) are summed once per step"
    )

    #: Whether gradients have the padding of their parameters.
    pads_gradients = False

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self.ranks = facts.size("tensor")
        self.is_sequence = bool(facts.option("sequence_parallel", False)) and self.ranks > 1
        is_cross_entropy = facts.label_smoothing is not None
        self.is_loss = bool(facts.option("loss_parallel", is_cross_entropy))

    @property
    def splits_head(self) -> bool:
        """Whether the last layer gives each rank some of the classes."""
        return "classes" in self.facts.roles.values()

    def heads(self, layer: str) -> tuple[int, int]:
        """Query and key/value heads of the attention that ``layer`` belongs to."""
        return self.facts.heads[layer.rpartition(".")[0]]

    def elements(self, tensor: TensorFacts, rank: int) -> int:
        """Elements of ``tensor`` that ``rank`` holds."""
        layer, role = tensor.name.rpartition(".")[0], self.facts.role(tensor)
        if self.ranks == 1 or not self.is_split(tensor):
            return tensor.numel
        if role in _VOCABULARY:
            size = tensor.shape[0]
            return tensor.numel // size * chunk(size, self.ranks, self.facts.place(rank, "tensor"))
        if role != "heads":
            return tensor.numel // self.ranks
        queries, kv = self.heads(layer)
        rows = tensor.numel // (queries + 2 * kv)  # elements of a head
        # A fused projection has rows of Q, K and V.  Where there are more ranks than KV heads, each
        # rank has a copy of one: its gradient is a term of a sum (see terms).
        return rows * (queries // self.ranks + 2 * max(1, kv // self.ranks))

    def is_split(self, tensor: TensorFacts) -> bool:
        """Whether ranks hold different parts of ``tensor``."""
        role = self.facts.role(tensor)
        return role in (*_VOCABULARY, *_COLUMNS) or self.is_split_by_columns(tensor)

    def is_split_by_columns(self, tensor: TensorFacts) -> bool:
        """Whether ``tensor`` is the weight of a row-parallel layer, cut along its inputs."""
        return tensor.name.endswith(".weight") and self.facts.role(tensor) == "row"

    def terms(self) -> list[tuple[TensorFacts, int]]:
        """Trained tensors of which each rank has one term of the gradient, and how many elements
        are summed.
        """
        terms = []
        for tensor in self.facts.trainable if self.ranks > 1 else ():
            layer = tensor.name.rpartition(".")[0]
            if not self.is_split(tensor):
                terms += [(tensor, tensor.numel)] if self.is_sequence else []
            elif self.facts.role(tensor) == "heads" and self.ranks > self.heads(layer)[1]:
                queries, kv = self.heads(layer)
                terms.append((tensor, tensor.numel // (queries + 2 * kv) * 2 * kv))
        return terms

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Samples and positions of every micro-batch of the step, over all data coordinates."""
        key = any(name.endswith(".dropout_counter") for name in self.facts.modules)
        return [(shape[0], shape[1] - key) for shape in self.facts.shapes]  # behind the positions

    @property
    def table(self) -> TensorFacts:
        """The embedding of positions."""
        found = [t for t in self.facts.parameters if self.facts.role(t) == "positions"]
        if not found:
            raise NoCostModel("no traffic formula: no parameter has the role 'positions'")
        return found[0]

    @property
    def classes(self) -> int:
        """Rows of the vocabulary: the number of classes."""
        return next(t.shape[0] for t in self.facts.parameters if self.facts.role(t) in _VOCABULARY)

    def padded(self, positions: int) -> int:
        """Positions of a sequence when it has been cut for the ranks."""
        return -(-positions // self.ranks) * self.ranks if self.is_sequence else positions

    def flows(self) -> list[Flow]:
        """2 all-reduces of hidden states a layer and direction; loss, partial gradients, norm."""
        if self.ranks == 1:
            return []
        facts, width = self.facts, self.table.shape[1]
        layers = {name for t in facts.parameters for name in t.owners}
        columns = sum(facts.roles.get(name) in _COLUMNS for name in layers)
        rows = sum(facts.roles.get(name) == "row" for name in layers)
        again = bool(facts.option("recompute_every", 0))
        if idle := next((name for name in sorted(facts.roles) if not facts.is_reached(name)), ""):
            raise NoCostModel(f"no traffic formula: no backward pass of the step uses {idle!r}")
        width *= ITEMSIZE[self.table.dtype]
        hidden = [n * self.padded(length) * width for n, length in self.shapes]
        #   forward    x --> column --> row --[sum]--> y      the row's output is a partial sum,
        #   backward   dx <--[sum]-- column <-- row <-- dy    and so is dx, the input's gradient
        # One more of each: what leaves the embedding, what enters a head that is split.
        into, out = columns + self.splits_head, rows + 1
        calls: list[tuple[Operation, int]]
        if self.is_sequence:
            gathers = into + out + (columns if again else 0) + self.gathered_twice()
            scatters = into + out + (rows if again else 0)
            calls = [("all_gather", gathers), ("reduce_scatter", scatters)]
        else:
            calls = [("all_reduce", into + out + (rows if again else 0))]
        flows = [f for operation, n in calls for f in self.each(operation, hidden, n)]
        return [*flows, *self.outputs(), *self.sums(), *self.norms()]

    def gathered_twice(self) -> int:
        """Layers whose output's gradient is gathered for B and for W: the latter goes through what
        follows a product in its own module as well.
        """
        facts = self.facts
        if facts.parts("layers") == 1 or not comes_apart(facts.options):
            return 0
        return sum(t.trainable and self.is_split_by_columns(t) for t in facts.parameters)

    def each(self, operation: Operation, payloads: list[int], times: int = 1) -> list[Flow]:
        """``times`` calls for every payload, in the tensor group of its data coordinate."""
        return model.grouped_flow("tensor", operation, payloads, self.ranks, times)

    def outputs(self) -> list[Flow]:
        """Numbers a target in the dtype of its weight, or whole logits."""
        if not self.splits_head:
            return []
        item = ITEMSIZE[self.table.dtype]
        if self.is_loss:
            # The split loss works in fp32 at least, whatever the logits are in.
            wide = max(item, ITEMSIZE["float32"])
            return self.of_targets([n * length * wide for n, length in self.shapes])
        classes = -(-self.classes // self.ranks) * self.ranks
        rows = [n * self.gathered_length(length) for n, length in self.shapes]
        return self.each("all_gather", [n * classes * item for n in rows])

    def gathered_length(self, positions: int) -> int:
        """Positions of a sequence whose logits are gathered."""
        return self.padded(positions)

    def of_targets(self, numbers: list[int]) -> list[Flow]:
        """A maximum, and two or three sums in one call; ``numbers``: bytes of one a target."""
        sums = 3 if self.facts.label_smoothing else 2
        return [
            *self.each("all_reduce", numbers),
            *self.each("all_reduce", [sums * n for n in numbers]),
        ]

    def sums(self) -> list[Flow]:
        """Gradients that are terms: in one call a step, or each in every backward."""
        facts = self.facts
        terms = [(t, n * ITEMSIZE[t.dtype]) for t, n in self.terms()]
        if not facts.option("sum_each_backward", False):
            return model.flow(facts, "tensor", "all_reduce", [sum(n for _, n in terms)])
        if idle := next((t.name for t, _ in terms if not t.in_every_backward), ""):
            raise model.NoCostModel(f"no traffic formula: not every backward pass uses {idle!r}")
        return [f for _, n in terms for f in self.each("all_reduce", [n] * len(self.shapes)) if n]

    def norms(self) -> list[Flow]:
        """The call that sums squares of the gradient norm over ranks."""
        return model.norm_flow(self.facts, "tensor")

    def parts(self, rank: int) -> list[tuple[TensorFacts, int]]:
        """Each parameter with its number of elements on ``rank``."""
        return [(t, self.elements(t, rank)) for t in self.facts.parameters]

    def communication_at_rest(self, rank: int, step: int) -> int:
        """The gathered or summed tensor has become a gradient, or gone; the norm may remain."""
        return _SCALARS

    def unclassified_limit(self, rank: int, step: int) -> int:
        """Losses, norms and factors."""
        return _SCALARS

    def by_layout(self, rank: int) -> Mapping[str, Mapping[str, int]]:
        """Elements of parameters that are split, and of those that every rank has whole."""
        return self.laid_out({t.name: n for t, n in self.parts(rank)})

    def laid_out(self, held: Mapping[str, int]) -> dict[str, dict[str, int]]:
        """``held`` by layout: what ranks split, and what each holds whole."""
        split = {t.name for t in self.facts.parameters if self.ranks > 1 and self.is_split(t)}
        return {
            "split": {name: n for name, n in held.items() if name in split},
            "replicated": {name: n for name, n in held.items() if name not in split},
        }

    def resident(self, rank: int, step: int, updated: int) -> Bytes:
        """Parts of what is split, the rest whole; gradients of what is used."""
        facts, own = self.facts, self.parts(rank)
        held = [(t, self.held_elements(t, rank)) for t, _ in own]
        now = {t.name for t in used(facts.parameters, step)}
        trained = [(t, n) for t, n in own if t.trainable]
        gradients = [(t, n) for t, n in (held if self.pads_gradients else own) if t.name in now]
        return {
            "parameters": sum(n * ITEMSIZE[t.dtype] for t, n in held),
            "masters": 0,
            "gradients": sum(n * ITEMSIZE[t.dtype] for t, n in gradients),
            "optimizer_state": model.state_bytes(facts, trained, updated),
        }

    def held_elements(self, tensor: TensorFacts, rank: int) -> int:
        """Elements that the part of ``tensor`` on ``rank`` takes, padding included."""
        return self.elements(tensor, rank)

    def local(self, rank: int) -> Local:
        """Elements that ``rank`` holds (name -> count)."""
        return Local.of(self.facts, {t.name: n for t, n in self.parts(rank)})


def cannot_share_layers(facts: ModelFacts) -> str:
    """Why the ranks of the tensor axis cannot share heads or hidden sizes (empty: they can)."""
    ranks = facts.size("tensor")

    def reason(layer: str, what: str, valid: Iterable[int]) -> str:
        return (
            f"mesh axis 'tensor' = {ranks}: {layer!r} has {what}, which cannot be "
            f"divided among {ranks} ranks; valid: {', '.join(map(str, valid))}"
        )

    for name, (heads, kv) in facts.heads.items():
        valid = [n for n in _divisors(heads) if kv % n == 0 or n % kv == 0]
        if ranks not in valid:
            return reason(f"{name}.qkv", f"{heads} heads and {kv} KV heads", valid)
    for tensor in facts.parameters:
        layer, _, leaf = tensor.name.rpartition(".")
        if leaf == "weight" and (role := facts.role(tensor)) in _DIVIDED:
            dim, what = _DIVIDED[role]
            if (size := tensor.shape[dim]) % ranks:
                return reason(layer, f"{size} {what} features", _divisors(size))
    return ""


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
