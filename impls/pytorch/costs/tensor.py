"""The bytes of tensor parallelism of PyTorch 2.13.

Paths are those below ``torch/distributed/tensor``.  The terms were found by reading the source and
confirmed call by call with the traffic ledger.
"""

from __future__ import annotations

from shardproof.axes import cutting
from shardproof.costs.model import Flow, flow
from shardproof.costs.model_facts import ITEMSIZE, ModelFacts, TensorFacts
from shardproof.costs.tensor import TensorParallel

#: Bytes of a number of a scaler, of which it keeps four (scale, its inverse, updates since it grew,
#: whether there is an overflow), and of a rank's number in the tensor that ``DeviceMesh`` keeps.
_NUMBER, _OF_SCALER = 4, 4
#: Modules that no style splits: every rank computes them, on the whole sequence.
_ODD = "Oddities"


class TorchTensorParallel(TensorParallel):
    """``ColwiseParallel``, ``RowwiseParallel``, ``SequenceParallel``, ``loss_parallel``.

    As the textbook but for: logits that are gathered unless ``loss_parallel`` is asked for, three
    numbers a target in three calls where it is; partial sums of whole parameters in a call each;
    norms, of which all DTensors' are stacked and summed; two gathers a call around modules without
    a style; padding.
    """

    strategy, textbook = "torch_tensor_parallel", "tensor"
    source = (
        "tensor/parallel/style.py: RowwiseParallel's output is reduced, ColwiseParallel's input "
        "gradient too, both reduced and scattered, or gathered, where inputs are cut on the "
        "sequence; the head gathers logits unless loss_parallel keeps them cut, which all-reduces "
        "a maximum, a sum and a logit a target (loss.py, _log_softmax and _nll_loss_forward); "
        "partial sums of whole parameters once a step, when the adapter lays gradients out as "
        "parameters; get_total_norm all-reduces the stacked norms of all DTensors, whole ones too "
        "(nn/utils/clip_grad.py); a shard that is short keeps the padding of the scatter it came "
        "by (placement_types.py, _make_shard_tensor); a scaler's overflow is one fp32 number "
        "(_dispatch.py, found_inf_reduce_handler)"
    )

    def __init__(self, facts: ModelFacts) -> None:
        super().__init__(facts)
        self.is_loss = bool(facts.option("loss_parallel", False))
        self.odd = tuple(name for name, kind in facts.modules.items() if kind == _ODD)

    def is_styled(self, tensor: TensorFacts) -> bool:
        """Whether ``tensor`` becomes a DTensor, split or whole."""
        return not any(owner.startswith(f"{o}.") for owner in tensor.owners for o in self.odd)

    def terms(self) -> list[tuple[TensorFacts, int]]:
        """Gradients that ``SequenceParallel`` leaves as sums over each rank's positions: norms,
        positions.

        Biases of ``RowwiseParallel`` and modules without a style see the whole sequence.
        """
        return [(t, n) for t, n in super().terms() if self.is_styled(t) and not self.is_bias(t)]

    def is_bias(self, tensor: TensorFacts) -> bool:
        """Whether ``tensor`` is the bias of a row-parallel layer, which rank 0 adds."""
        return tensor.name.endswith(".bias") and self.facts.role(tensor) == "row"

    def flows(self) -> list[Flow]:
        """Calls and bytes of one step along the axis."""
        facts = self.facts
        if self.ranks == 1:
            return []
        flows = super().flows()
        if self.is_sequence:
            width, item = self.table.shape[1], ITEMSIZE[self.table.dtype]
            hidden = [n * length * width * item for n, length in self.shapes]
            flows += self.each("all_gather", hidden, 2 * len(self.odd))
        return [*flows, *flow(facts, cutting("widths"), "all_reduce", [4] if facts.scaled else [])]

    def gathered_twice(self) -> int:
        """None: torch keeps for W the tensors that B has gathered (pipelining/_backward.py)."""
        return 0

    def gathered_length(self, positions: int) -> int:
        """The length without padding."""
        return positions

    def of_targets(self, numbers: list[int]) -> list[Flow]:
        """Three numbers per target."""
        return self.each("all_reduce", numbers, 3)

    def sums(self) -> list[Flow]:
        """One call per term, once per step."""
        terms = [n * ITEMSIZE[t.dtype] for t, n in self.terms()]
        return flow(self.facts, cutting("widths"), "all_reduce", terms)

    def norms(self) -> list[Flow]:
        """The norms of all DTensors in one call."""
        if not self.facts.clipped:
            return []
        stacked = [ITEMSIZE[t.dtype] for t in self.facts.trainable if self.is_styled(t)]
        return flow(self.facts, cutting("widths"), "all_reduce", [sum(stacked)])

    def held_elements(self, tensor: TensorFacts, rank: int) -> int:
        """Elements of ``tensor`` in memory: the largest part, because torch pads."""
        if not self.is_split(tensor):
            return tensor.numel
        return max(self.elements(tensor, other) for other in range(self.ranks))

    def communication_at_rest(self, rank: int, step: int) -> int:
        """Zero: torch keeps no buffers between steps."""
        return 0

    def unclassified_limit(self, rank: int, step: int) -> int:
        """One loss per micro-batch and the norm, in fp32 or wider; a few numbers of ranks and of a
        scaler.
        """
        facts, wide = self.facts, max(ITEMSIZE[self.table.dtype], ITEMSIZE["float32"])
        kept = facts.world + (_OF_SCALER if facts.scaled else 0)
        return wide * (facts.rounds + facts.clipped) + _NUMBER * kept
