"""The engine that turns a strategy into a training system: optimizer, precision, recomputation,
offload.
"""
