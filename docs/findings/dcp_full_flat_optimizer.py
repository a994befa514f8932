"""torch.distributed.checkpoint: a full, flattened optimizer state is given, and cannot be set."""

import sys

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

if __name__ == "__main__":
    model = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    came = "a load"
    try:
        set_optimizer_state_dict(model, optimizer, state, options=options)
    except KeyError as error:
        came = f"KeyError: {error}"
    present = came.startswith("KeyError")
    print(f"expected that set_optimizer_state_dict takes what the getter gave; came {came}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
