"""A data-parallel class that forgets to reduce: Shardproof says what is wrong, and where.

Run: python examples/broken_ddp.py
     python examples/broken_ddp.py --mended
"""

import sys

from shardproof import prove
from shardproof.contract import PROFILES, Capabilities
from shardproof.impls.reference.engine.engine import Engine
from shardproof.impls.reference.engine.handle import Replicated
from shardproof.impls.reference.engine.state import broadcast_tensors, named_state


class Averaging(Replicated):
    """The part of a step between backward and the optimizer's step."""

    def finish(self):
        for parameter in self.parameters:
            self.comm.all_reduce(parameter.grad)  # the suite's loss is already divided: a sum


class Forgetful(Replicated):
    def finish(self):
        for parameter in self.parameters[1:]:  # the first parameter is left out
            self.comm.all_reduce(parameter.grad)


class Mended(Engine):
    strategy = "naive_ddp"
    after_backward = Averaging

    @classmethod
    def capabilities(cls, options):
        return Capabilities(features=PROFILES["naive_ddp"], declines={"unused": "not yet"})

    def transform(self, module, mesh, options):
        broadcast_tensors(list(named_state(module).values()), mesh.comm("replicate"))
        return self.after_backward(module, mesh.comm("replicate"))


class Broken(Mended):
    after_backward = Forgetful


if __name__ == "__main__":
    verdicts = prove(Mended if "--mended" in sys.argv else Broken, worlds=(2, 3))
    for row in verdicts.itertuples():
        print(f"{row.verdict}: {row.world} ranks, {row.lane}: {row.reason or 'equal'}")
    sys.exit(any(verdicts.verdict == "fail"))
