"""The memory ledger: every storage that a rank's tensors lie in, born, resized and freed.

``recorder`` writes the log of a rank while it runs, ``installed`` holds what must be patched in the
process meanwhile, ``log`` is the written log: plain data that is classed and replayed afterwards.
"""
