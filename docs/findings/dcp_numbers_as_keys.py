"""torch.distributed.checkpoint: values under keys that are numbers are not loaded."""

import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.optim.lr_scheduler import MultiStepLR


def training():
    """A scheduler, whose state has its milestones as keys."""
    return MultiStepLR(torch.optim.SGD([torch.zeros(1)], lr=1.0), [2])


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of a single process
    resumed, again = training(), "a second checkpoint"
    with tempfile.TemporaryDirectory() as folder:
        saved = {"seen": {0: 5}, "scheduler": training().state_dict()}
        dcp.save(saved, checkpoint_id=f"{folder}/first")
        state = {"seen": {0: 0}, "scheduler": resumed.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/first")
        resumed.load_state_dict(state["scheduler"])
        try:
            dcp.save({"scheduler": resumed.state_dict()}, checkpoint_id=f"{folder}/second")
        except dcp.api.CheckpointException as error:
            again = str(error).strip().splitlines()[-1]
    present = state["seen"] != {0: 5}
    print(f"expected {{0: 5}} and a second checkpoint; came {state['seen']} and {again}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
