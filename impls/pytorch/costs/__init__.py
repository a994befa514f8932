"""What PyTorch's own systems really send and hold, from the sources of the pinned version."""
