"""muon_fsdp2: the optimizer cannot update a parameter on one device."""

import importlib.util
import sys

import torch
from torch import nn

if __name__ == "__main__":
    if importlib.util.find_spec("muon_fsdp2") is None:
        print("muon_fsdp2 is not installed")
        sys.exit(3)
    from muon_fsdp2 import Muon

    model = nn.Linear(4, 4, bias=False)
    optimizer = Muon([{"params": [model.weight], "use_muon": True, "lr": 0.02}])
    model(torch.ones(2, 4)).sum().backward()
    try:
        optimizer.step()
        came = "no error"
    except NameError as error:
        came = str(error)
    print(f"expected an update; came {came}")
    print("DEFECT PRESENT" if "muon_update" in came else "defect absent: fixed?")
    sys.exit(0 if "muon_update" in came else 1)
