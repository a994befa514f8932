"""The bytes that PyTorch's own systems send and hold, from the sources of the pinned version."""
