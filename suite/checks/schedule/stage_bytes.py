"""The memory that one micro-batch takes on each stage, measured on the workload's own model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from shardproof import workloads
from shardproof.case import Case
from shardproof.contract import MicroBatch
from shardproof.ledgers.memory.recorder import MemoryLedger
from shardproof.workloads import Workload

#: Step, data coordinate, window and number in it.
Place = tuple[int, int, int, int]


def stage_bytes(
    case: Case, ranges: Sequence[range], name: Callable[[Place, Sequence[int]], str]
) -> dict[tuple[int, str], dict[str, int]]:
    """``(stage, name)`` -> bytes by what they are, of the first micro-batch that has the name.

    ``F``: of class activations when the forward is over, its result (on the last stage the loss)
    included; ``W``: of them the inputs of layers whose weights are trained; ``input``: what the
    stage is given by the one before.  ``name`` is asked with a micro-batch's place and the shape of
    its inputs.
    """
    workload = workloads.for_case(case)
    model = workload.model()
    workload.load(model)
    build = workload.build_for(0)
    parts = [build.stage(model, units.start, units.stop) for units in ranges]
    by_stage: dict[tuple[int, str], dict[str, int]] = {}
    for place, micro in _micro_batches(case, workload):
        key = name(place, micro.inputs.shape)
        if (0, key) not in by_stage:
            for stage, weights in enumerate(_one(parts, build, micro)):
                by_stage[stage, key] = weights
    return by_stage


def _micro_batches(case: Case, workload: Workload) -> Iterator[tuple[Place, MicroBatch]]:
    for step in range(case.steps):
        for share, batch in enumerate(workload.batch(step, case.data_coordinates)):
            for window, micro_batches in enumerate(batch.windows):
                for number, micro in enumerate(micro_batches):
                    yield (step, share, window, number), micro


def _one(parts: Sequence[nn.Module], build: Any, micro: MicroBatch) -> list[dict[str, int]]:
    """One micro-batch through all ``parts``, each with a ledger of its own."""
    sizes, given = [], micro.inputs
    for number, part in enumerate(parts):
        if number:
            # Each stage has a graph of its own, as it has on a rank of its own.
            given = given.detach().requires_grad_()
        inputs: dict[int, int] = {}
        note = partial(_note, inputs)
        hooks = [m.register_forward_pre_hook(note) for m in part.modules() if _trains(m)]
        received = given.untyped_storage()
        phase = "forward"
        with MemoryLedger(lambda: phase) as ledger:  # noqa: B023 - read while it is open
            kept = result = part(given)
            if part is parts[-1]:
                kept = build.loss(result, micro)
                del result
            ledger.classify(modules=[part])  # buffers that a forward binds anew are no activations
            ledger.mark("kept")
            phase = "backward"
            ledger.mark("over")
        for hook in hooks:
            hook.remove()
        own = ledger.log.bytes("kept")["activations"]
        # Counted apart, as the stage's input.
        inputs.pop(received._cdata, None)
        weights, was_sent = min(own, sum(inputs.values())), number > 0
        sizes.append({"F": own, "W": weights, "input": received.nbytes() if was_sent else 0})
        given = kept
    return sizes


def _trains(module: nn.Module) -> bool:
    """Whether the gradient of the module's weights is made from its input."""
    weight = getattr(module, "weight", None)
    kinds = (nn.Linear, nn.Conv2d, nn.LayerNorm, nn.RMSNorm)
    return isinstance(module, kinds) and weight is not None and weight.requires_grad


def _note(sizes: dict[int, int], module: nn.Module, given: tuple[Tensor, ...]) -> None:
    """Note the storage of what a module is given."""
    storage = given[0].untyped_storage()
    # By storage: several layers may read views of one input, which is held once.
    sizes[storage._cdata] = storage.nbytes()
