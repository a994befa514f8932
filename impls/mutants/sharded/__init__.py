"""Faults of ZeRO and FSDP."""
