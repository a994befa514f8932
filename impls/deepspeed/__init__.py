"""DeepSpeed's ZeRO stages, unmodified (extra ``deepspeed``)."""
