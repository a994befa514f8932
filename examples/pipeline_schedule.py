"""A pipeline schedule of torch.distributed.pipelining, tested with the suite's GPT.

Run: python examples/pipeline_schedule.py
"""

from torch.distributed.pipelining import Schedule1F1B

from shardproof import prove


class Mine(Schedule1F1B):
    """Put the changes of your schedule here."""


class Scaled(Schedule1F1B):
    """Divides gradients by the number of micro-batches, though the loss is already a sum."""

    def __init__(self, *given, **more):
        super().__init__(*given, **{**more, "scale_grads": True})


if __name__ == "__main__":
    for schedule in (Mine, Scaled):
        for row in prove(schedule=schedule, worlds=(2,)).itertuples():
            print(f"{schedule.__name__}, {row.world} stages: {row.verdict} {row.reason}")
