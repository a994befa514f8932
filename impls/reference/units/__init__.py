"""Sharded units: what ZeRO-3 and FSDP share."""
