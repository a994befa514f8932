"""Cases as tasks of a Ray cluster: who starts them (cluster), what runs there (task, server)."""

import re

from shardproof.errors import Problem, SelectionError

#: Where Ray's client server listens, unless told otherwise.
CLIENT_PORT = 10001
#: Instead of an address: a new cluster on this machine.
LOCAL = "local"


def address(where: str) -> str:
    """The address that ``--on WHERE`` means; empty: the cluster of this machine, or a new one.

    :raises SelectionError: it names none.
    """
    found = re.fullmatch(r"ray(?:://([\w.-]+|\[[0-9a-fA-F:]+\])(?::(\d{1,5}))?)?", where)
    if found is None or not 0 < int(found[2] or 1) < 1 << 16:
        remedy = f"give ray, or ray://HOST[:PORT] of a Ray client server (port {CLIENT_PORT})"
        raise SelectionError(Problem("--on is not the address of a Ray cluster", remedy, where))
    return f"ray://{found[1]}:{found[2] or CLIENT_PORT}" if found[1] else ""


def address_of_environment(where: str) -> str:
    """The address that ``RAY_ADDRESS=WHERE`` means, in the words of Ray; empty as above.

    :raises SelectionError: it names none.
    """
    if where in ("", "auto"):
        return ""
    if where.startswith("ray://"):
        return address(where)
    if where != LOCAL and re.fullmatch(r"[^/]+:\d{1,5}", where) is None:
        remedy = "give HOST:PORT, ray://HOST[:PORT], 'auto' or 'local'"
        raise SelectionError(
            Problem("RAY_ADDRESS is not the address of a Ray cluster", remedy, where)
        )
    return where
