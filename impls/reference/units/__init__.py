"""Sharded units: the common part of ZeRO-3 and FSDP."""
