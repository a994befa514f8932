"""``python -m shardproof``, and the command ``shardproof``."""

from __future__ import annotations

import os
import signal

_HEARD = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _HEARD:  # while modules are loaded nothing is to be tidied up: Ctrl-C ends without a traceback
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(130))
try:
    from shardproof.commands.main import main
finally:
    if _HEARD:
        signal.signal(signal.SIGINT, signal.default_int_handler)

if __name__ == "__main__":
    main()
