"""torch.distributed.checkpoint: loading into other parameter groups leaves one without settings."""

import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def training(by_layer: bool):
    """A model of two layers, grouped by layers, or by weights and biases, after one step."""
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    first, second = [list(layer.parameters()) for layer in model]
    pairs = (first, second) if by_layer else tuple(map(list, zip(first, second, strict=True)))
    groups = [{"params": pairs[0], "lr": 0.1}, {"params": pairs[1], "lr": 0.2}]
    optimizer = torch.optim.AdamW(groups)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model, optimizer):
    """What is saved."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of a single process
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state_of(*training(True)), checkpoint_id=folder)
        model, optimizer = training(False)
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
    given = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **given)
    rates = [group.get("lr") for group in optimizer.param_groups]
    present = None in rates
    print(f"expected rates for both groups, or an error; came {rates}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
