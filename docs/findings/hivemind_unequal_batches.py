"""hivemind: accumulated gradients of unequal batches are no average."""

import importlib.util
import sys

import torch

if __name__ == "__main__":
    if importlib.util.find_spec("hivemind") is None:
        print("hivemind is not installed")
        sys.exit(3)
    import hivemind
    from hivemind.optim.grad_averager import GradientAverager

    weight = torch.nn.Parameter(torch.zeros(1))
    dht = hivemind.DHT(start=True)
    averager = GradientAverager([weight], dht=dht, prefix="one", start=True)
    for samples in (2, 1):  # every sample has the gradient 1, and so has their average
        weight.grad = torch.ones(1)
        averager.accumulate_grads_(batch_size=samples)
    averager.load_accumulators_into_averager_()
    with averager.get_tensors() as tensors:
        came = tensors[0].item()
    averager.shutdown()
    dht.shutdown()
    print(f"expected 1.0, the average over three samples; came {came}")
    print("DEFECT PRESENT" if came == 0.75 else "defect absent: fixed?")
    sys.exit(0 if came == 0.75 else 1)
