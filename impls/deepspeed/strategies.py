"""The strategies of DeepSpeed: the textbook strategy of each, and the differences.

Cost models lie in ``costs.py``, which is imported when bytes are first compared.
"""

from shardproof.strategies import TEXTBOOK

_COSTS = "shardproof.impls.deepspeed.costs"
#: DeepSpeed reduces when it likes, and has no units of its own to order.
_LESS = (
    "frozen_parameters",
    "accumulation_without_communication",
    "buffer_broadcast",
    "overlap",
)

STRATEGIES = (
    TEXTBOOK["ddp"].by_system("deepspeed_zero0", f"{_COSTS}:DeepSpeedZero0", less=_LESS),
    TEXTBOOK["zero1"].by_system("deepspeed_zero1", f"{_COSTS}:DeepSpeedZero1", less=_LESS),
    TEXTBOOK["zero2"].by_system("deepspeed_zero2", f"{_COSTS}:DeepSpeedZero2", less=_LESS),
    TEXTBOOK["zero3"].by_system("deepspeed_zero3", f"{_COSTS}:DeepSpeedZero3", less=_LESS),
    # Stages of upstream systems have nothing in common that could be broadcast.
    TEXTBOOK["pipeline"].by_system(
        "deepspeed_pipeline", f"{_COSTS}:DeepSpeedPipeline", less=("initial_broadcast",)
    ),
    TEXTBOOK["context"].by_system("deepspeed_ulysses", f"{_COSTS}:DeepSpeedUlysses"),
)
