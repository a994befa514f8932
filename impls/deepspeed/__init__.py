"""DeepSpeed's ZeRO stages, judged as they ship (extra ``deepspeed``)."""
