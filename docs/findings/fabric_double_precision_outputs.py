"""Lightning Fabric, precision "64-true": what a module returns is rounded to float32."""

import sys

import torch
from torch import nn

try:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
except ImportError:
    print("lightning-fabric is not installed")
    sys.exit(3)

if __name__ == "__main__":
    # The launcher is named: left to itself Fabric asks every installed one, MPI's as well.
    named = [LightningEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true", plugins=named)
    model = fabric.setup(nn.Linear(3, 3))
    parameters = {p.dtype for p in model.parameters()}
    output = model(torch.randn(2, 3, dtype=torch.float64))
    present = parameters == {torch.float64} and output.dtype == torch.float32
    print(f"expected float64 outputs of {parameters} parameters; came {output.dtype}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
