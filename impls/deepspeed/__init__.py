"""DeepSpeed, unmodified (extra ``deepspeed``): ZeRO, pipeline, attention over ranks, experts."""
