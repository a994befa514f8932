"""picotron: a pipeline's gradients are as many times too large as there are micro-batches."""

import os
import sys
import tempfile
from datetime import timedelta
from multiprocessing import get_context

import torch
from torch import distributed, nn

try:
    sys.path.insert(0, os.environ["PICOTRON"])
    from picotron.pipeline_parallel import pipeline_parallel as pipeline
except (KeyError, ImportError) as error:
    print(f"picotron (PICOTRON=path of a checkout; {error!r}) is not installed")
    sys.exit(2 if "PICOTRON" in os.environ else 3)

WORLD, MICRO, KEYS = 2, 4, ("input_ids", "target_ids", "position_ids")


class Loader(list):
    grad_acc_steps = MICRO

    def __next__(self) -> dict:
        return dict(zip(KEYS, self.pop(0), strict=True))


class Stage(nn.Sequential):
    backward = pipeline.PipelineParallel.backward

    def forward(self, input_ids, position_ids, hidden_states):
        return super().forward(input_ids if hidden_states is None else hidden_states)


def work(rank: int, store: str) -> list[float]:
    """The loss reported and the norm of the stage's gradients, each by that of one process."""
    distributed.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), WORLD, rank)
    pipeline.pgm.setup_process_group_manager(1, 1, WORLD, 1)
    torch.cuda.synchronize = lambda: None  # it follows every message
    torch.manual_seed(0)
    whole = [nn.Embedding(5, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 5)]
    ids, targets = torch.randint(5, (2, MICRO, 6, 3))
    loss = nn.functional.cross_entropy(nn.Sequential(*whole)(ids).flatten(0, 2), targets.flatten())
    stage = Stage(*whole[2 * rank : 2 * rank + 2])
    right = nn.utils.get_total_norm(torch.autograd.grad(loss, stage.parameters()))
    batches = Loader(zip(ids, targets, ids, strict=True))
    said = pipeline.train_step_pipeline_1f1b(stage, batches, (6, 3, 4), "cpu", torch.float32)
    norm = nn.utils.get_total_norm([p.grad for p in stage.parameters()])
    return [round(said / loss.item(), 4), round(float(norm / right), 4)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, get_context("fork").Pool(WORLD) as pool:
        arguments = [(rank, f"{folder}/store") for rank in range(WORLD)]
        (_, first), (loss, last) = pool.starmap_async(work, arguments, 1).get(100)
    present = loss == 1 and first == last == MICRO
    print(f"expected 1 times loss and gradients of one process; came {loss}, {first} and {last}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
