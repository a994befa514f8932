"""The process of an actor: reads a class, then calls; answers with values or errors."""

import os
import pickle
import sys

out = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)
actor = pickle.loads(pickle.load(sys.stdin.buffer))()
while True:
    try:
        name, given = pickle.loads(pickle.load(sys.stdin.buffer))
    except EOFError:
        break
    try:
        answer = True, getattr(actor, name)(*given)
    except Exception as error:  # noqa: BLE001
        answer = False, error
    pickle.dump(answer, out)
    out.flush()
