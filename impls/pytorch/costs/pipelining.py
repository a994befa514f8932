"""The bytes of pipelines of PyTorch 2.13, each term with its source.

They send what ``costs.pipeline.Pipeline`` says and something more.  Shapes travel as integers in
the first step: they stand in the rows of control traffic.
"""

from __future__ import annotations

from itertools import pairwise

from shardproof.axes import cutting
from shardproof.costs.model import Flow, flow
from shardproof.costs.model_facts import ITEMSIZE, shape_key
from shardproof.costs.pipeline import Pipeline

FP32 = 4


class TorchPipelining(Pipeline):
    """``torch.distributed.pipelining``: exactly the bytes that a pipeline needs.

    Received activations and gradients have buffers for every micro-batch that stay from step to
    step, whatever the schedule has in flight.
    """

    strategy, textbook = "torch_pipelining", "pipeline"
    source = (
        "pipelining/stage.py: get_fwd_send_ops and get_bwd_send_ops send an activation and its "
        "gradient a micro-batch and boundary, set_local_fwd_input and set_local_bwd_input nothing "
        "between stages of one rank; _warmup_forward_vote and _forward_metadata_inference exchange "
        "integers and pickled shapes in the first call; one fp64 number for the norm is the "
        "adapter's, one fp32 number for an overflow ShardedGradScaler's"
    )

    def flows(self) -> list[Flow]:
        """The flows of every pipeline; the scaler's agreement on an overflow is one fp32 number."""
        scaled = [FP32] if self.facts.scaled else []
        return [*super().flows(), *flow(self.facts, cutting("layers"), "all_reduce", scaled)]

    def communication_at_rest(self, rank: int, step: int) -> int:
        """Receive buffers for other ranks' tensors, all of which have been sent as messages."""
        return super().communication_at_rest(rank, step) + self.buffers(
            rank, step, between_ranks=True
        )

    def unclassified_limit(self, rank: int, step: int) -> int:
        """Tensors passed between stages of one rank, without a message."""
        return super().unclassified_limit(rank, step) + self.buffers(
            rank, step, between_ranks=False
        )

    def buffers(self, rank: int, step: int, between_ranks: bool) -> int:
        """The largest size of the buffers of ``rank`` over all window lengths and shapes so far:
        for tensors from another rank, or for those from this one.

        A micro-batch has one for what a stage receives, one for that one's gradient (which stays
        where backward was split) and one for the gradient of what the stage gives.
        """
        facts, place = self.facts, self.stages.place
        item = ITEMSIZE[facts.trainable[0].dtype]
        wanted = [(a != b) == between_ranks for a, b in pairwise(place)]  # by boundary
        seen = {
            (len(window), window[0])
            for shares in facts.inputs[: step + 1]
            for windows in shares
            for window in windows
        }
        total = 0
        for micro_batches, shape in seen:
            #   input, gradient of the input     2 x the boundary before the stage
            #   gradient of the output           1 x the boundary after it
            hidden = facts.hidden[shape_key(shape)]
            for stage in self.stages.of(facts.place(rank, cutting("layers"))):
                units = self.stages.units[stage]
                elements = 2 * hidden[units.start - 1] if stage and wanted[stage - 1] else 0
                if stage < len(wanted) and wanted[stage]:
                    elements += hidden[units.stop - 1]
                total += micro_batches * elements * item
        return total
