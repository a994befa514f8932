"""What upstream systems really send and hold, from the sources of pinned versions."""
