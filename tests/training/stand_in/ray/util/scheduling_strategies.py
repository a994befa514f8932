"""Where an actor runs."""

from typing import Any


class PlacementGroupSchedulingStrategy:
    def __init__(self, group: Any) -> None:
        self.group = group
