"""Options under which faults of compression show, and small buckets that are rebuilt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Option = Mapping[str, Any]

TOPK: Option = {"method": "topk", "density": 0.1}
RANDOMK: Option = {"method": "randomk", "density": 0.25}
POWERSGD: Option = {"method": "powersgd", "rank": 2}
SIGN: Option = {"method": "sign"}
ONEBIT: Option = {"method": "onebit"}
FP16: Option = {"method": "cast", "dtype": "float16", "feedback": True}
PLAIN_FP16: Option = {"method": "cast", "dtype": "float16"}


def sent_by(compress: Option) -> Option:
    """Options of DDP with several buckets that are rebuilt after the first step."""
    return {"bucket_bytes": 8 * 1024, "first_bucket_bytes": 2 * 1024, "compress": compress}
