"""Simulation of one rank of a large world: its real code, on tensors without values.

``group`` is a process group that moves nothing, ``rank`` drives an implementation on it with both
ledgers, ``sources`` says what is trained, ``figures`` adds up, ``compared`` holds simulated ranks
against those of a stored run.
"""
