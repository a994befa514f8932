"""The program that ``mpirun`` starts for a rank; the rank itself is forked elsewhere, with torch.

Hands its environment, and the descriptor of MPICH's process manager, to the socket that
``SHARDPROOF_STAND_IN`` names, and ends when that is closed.  Run as a file by ``python -I -S``: it
imports nothing of the suite, so it starts in milliseconds.
"""

import os
import socket
import sys

DESCRIPTOR = "PMI_FD"


def main() -> int:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["SHARDPROOF_STAND_IN"])
        text = "\0".join(f"{name}={value}" for name, value in os.environ.items()).encode()
        given = [int(os.environ[DESCRIPTOR])] if DESCRIPTOR in os.environ else []
        # A few bytes go with the descriptor, the rest as it finds room.
        socket.send_fds(connection, [len(text).to_bytes(8, "little")], given)
        connection.sendall(text)
        for descriptor in given:
            os.close(descriptor)
        connection.recv(1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
