"""The program that ``mpirun`` calls instead of ``ssh``: ``daemon.py NODE COMMAND`` has a node's
agent run it.

The node's door is in the folder ``SHARDPROOF_DOORS``.  The command runs as long as this program
does, writes where this one would, and finds the socket of its node's stand-ins, in the folder of
that name in ``SHARDPROOF_SPREAD``.  Run as a file by ``python -I -S``: it imports nothing of the
suite, so it starts in milliseconds.
"""

import json
import os
import select
import shlex
import socket
import sys

#: Variables that name the folders of doors and of keepers.
DOORS, SPREAD = "SHARDPROOF_DOORS", "SHARDPROOF_SPREAD"
#: Seconds between looks at whether ``mpirun`` is there.
_LOOK_SECONDS = 0.5


def main() -> int:
    """Have the agent run the command; its exit code."""
    parent = os.getppid()
    node, *words = sys.argv[1:]
    folder = f"{os.environ[SPREAD]}/{node}"
    places = {"TMPDIR": folder, "SHARDPROOF_STAND_IN": f"{folder}/stand-ins"}
    told = "".join(f"export {name}={shlex.quote(path)}; " for name, path in places.items())
    order = json.dumps({"daemon": told + " ".join(words)}).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        try:
            agent.connect(f"{os.environ[DOORS]}/{node}")
            socket.send_fds(agent, [order], [1, 2])
            while not select.select([agent], [], [], _LOOK_SECONDS)[0]:
                if os.getppid() != parent:
                    return 1
            code = agent.recv(16)
        except OSError as error:
            print(f"the agent of {node} cannot be reached: {error}", file=sys.stderr)
            return 1
    return int(code or 1)


if __name__ == "__main__":
    sys.exit(main())
