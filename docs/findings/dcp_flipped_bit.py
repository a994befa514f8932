"""torch.distributed.checkpoint: a bit that flipped on the disk is loaded without a word."""

import pathlib
import sys
import tempfile
import warnings

import torch
import torch.distributed.checkpoint as dcp

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of a single process
    saved = torch.full((64,), 1.0)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"weight": saved}, checkpoint_id=folder)
        file = next(pathlib.Path(folder).glob("*.distcp"))
        data = bytearray(file.read_bytes())
        at = data.index(saved.numpy().tobytes())
        data[at + 3] ^= 0x40  # a bit of the first element's exponent
        file.write_bytes(data)
        state = {"weight": torch.zeros(64)}
        dcp.load(state, checkpoint_id=folder)
    first = float(state["weight"][0])
    present = first != 1.0
    print(f"expected an error, for a bit of the file flipped; came a weight of {first} for 1.0")
    print("DEFECT PRESENT" if present else "defect absent: fixed?")
    sys.exit(0 if present else 1)
