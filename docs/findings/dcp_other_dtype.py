"""torch.distributed.checkpoint: another dtype is cast, also where numbers do not fit."""

import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of a single process
    found = {}
    for saved, dtype in (
        (torch.tensor([1 / 3], dtype=torch.float64), torch.float32),
        (torch.tensor([300.0]), torch.uint8),
        (torch.tensor([1j]), torch.float32),
    ):
        state = {"weight": torch.zeros(1, dtype=dtype)}
        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"weight": saved}, checkpoint_id=folder)
            dcp.load(state, checkpoint_id=folder)
        found[saved.item()] = state["weight"].item()
    present = all(before != after for before, after in found.items())
    print(f"expected errors, as for another shape; came numbers, saved: loaded {found}")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
