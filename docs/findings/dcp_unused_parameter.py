"""torch.distributed.checkpoint: a parameter that nothing used makes a load fail."""

import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict


def training():
    """A model of two layers and its optimizer."""
    model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)])
    return model, torch.optim.AdamW(model.parameters())


def state_of(model, optimizer):
    """What is saved."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of a single process
    came = "a load"
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = training()
        model[0](torch.ones(1, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        dcp.save(state_of(model, optimizer), checkpoint_id=folder)
        state = state_of(*training())
        try:
            dcp.load(state, checkpoint_id=folder)
        except dcp.api.CheckpointException as error:
            came = next(line for line in str(error).splitlines() if "Error: Missing key" in line)
    present = "Missing key" in came
    print(f"expected that a fresh training loads what was saved; came {came}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
