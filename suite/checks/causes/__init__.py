"""Sentences that lead home: what must have been done for just these wrong numbers to come out.

Asked where a comparison has failed, of the tensors of that moment.  Each function tries what is
often done wrong, on the oracle's own numbers, and tells the first that gives what the system holds.
A sentence stands before the numbers of the check; it decides nothing, and it is empty where
nothing fits.
"""

from collections.abc import Callable

from shardproof.checks.causes.buffers import of_buffers
from shardproof.checks.causes.compressed import of_kept
from shardproof.checks.causes.gradients import beside_loss, of_clipping, of_gradients
from shardproof.checks.causes.load import Load, moments_of, of_draws, of_load
from shardproof.checks.causes.losses import of_evaluation, of_loss
from shardproof.checks.causes.members import of_members
from shardproof.checks.causes.norms import of_norm
from shardproof.checks.causes.reload import of_reload
from shardproof.checks.causes.start import of_start
from shardproof.checks.causes.updates import of_update
from shardproof.checks.causes.where import of_full_state
from shardproof.checks.causes.words import said
from shardproof.errors import is_exhausted

__all__ = [
    "Load",
    "beside_loss",
    "moments_of",
    "of_buffers",
    "of_clipping",
    "of_draws",
    "of_evaluation",
    "of_full_state",
    "of_gradients",
    "of_kept",
    "of_load",
    "of_members",
    "of_loss",
    "of_norm",
    "of_reload",
    "of_start",
    "of_update",
    "said",
    "told",
]


def told(cause: Callable[[], str]) -> str:
    """What ``cause`` says; what it may raise takes no failure's place.

    But where the machine has no memory or descriptors left, the case is run once more.
    """
    try:
        return cause()
    except Exception as error:
        if is_exhausted(error):
            raise
        return f"no cause could be told ({error!r})"
