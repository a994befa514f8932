"""The command that runs a case again on such nodes as it had."""

from __future__ import annotations

from shardproof.runs.header import Invocation

#: By cap of a node: the option of ``cluster run`` that sets it.
_CAP_OPTIONS = {
    "cpus": "--cpus",
    "memory_bytes": "--memory",
    "bits_per_second": "--bandwidth",
    "delay_seconds": "--delay",
}


def _typed(name: str, cap: float) -> str:
    """A cap as the option of it takes it, exactly."""
    if name == "memory_bytes":
        size = int(cap)
        units = ((20, "m"), (10, "k"), (0, ""))
        return next(f"{size >> bits}{unit}" for bits, unit in units if not size % (1 << bits))
    if name == "bits_per_second":
        return f"{cap / 1e6:.12g}mbit"
    return f"{1e3 * cap if name == 'delay_seconds' else cap:.12g}"


def run_command(one: Invocation) -> str | None:
    """The beginning of a command that runs a case as ``one`` did; ``None``: not on containers."""
    if one.caps is None:
        return None
    per_node = (one.cluster or {}).get("ranks_per_node")
    words = [f"shardproof cluster run --nodes {len(one.nodes)} --ranks-per-node {per_node}"]
    words += [f"{_CAP_OPTIONS[name]} {_typed(name, cap)}" for name, cap in one.caps.items()]
    for node, own in one.slow_nodes.items():
        for name, cap in own.items():
            limit = f"{_CAP_OPTIONS[name].removeprefix('--')}={_typed(name, cap)}"
            words.append(f"--slow-node {node.removeprefix('node')}:{limit}")
    return " ".join(words)
