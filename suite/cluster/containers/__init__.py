"""Containers of this machine as nodes: engine, images, caps, faults, and the head."""
