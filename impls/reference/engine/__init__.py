"""What runs a strategy as a training system: optimizer, precision, recomputation, offload."""
