"""The format asynchronous: one thread copies and writes; an update waits until the copy is made.

    training   step | save: agree | forward, backward | update | step | step | save: wait ...
    writer                        \\- copy ----------- ^ rank-00000 -- index -- (rank 0: manifest)

    copy       of what this rank writes, in memory: updates change the tensors in place
               (pytorch/pytorch#145408 handed the live ones to the writer).  Parameters and the
               optimizer's state stay as they are until the next update, so their copy overlaps
               with what comes before it (CheckFreq, FAST 2021, section 4.1); the rest is copied
               before ``save`` returns: buffers, generators, and what compression still owes (a
               residual is as large as the rank's gradients)
    write      as in sharded.py, by one thread a rank, which calls no collective: training does
    manifest   rank 0's writer waits until every rank's index stands in the folder, under its name,
               which is a writer's last operation; then it commits.  Nobody has to call for that
    wait       the next save waits for this one: there is one copy, and it is in use

Cost: training's stall is one short message of each rank (agreement.py), the copy of the rest, and
what the other copy takes longer than the next forward and backward; the first save agrees at
length.  The next save pays for a disk that is slower than the time between two.  Memory: at most
one copy of the local state, and less where copies share the writing; it is kept for the next save.
Numbers: those of the moment of ``save``, whatever training does since; step, extra and scaler too.
Errors: of any rank's writer are raised by ``wait`` (or the next ``save``) on all ranks.
Left out: a process of its own for writing (5 to 20 s to start one, for a stall that is no shorter).
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardproof.impls.reference.checkpoint.agreement import Agreed, State, own_writes
from shardproof.impls.reference.checkpoint.data_file import Held
from shardproof.impls.reference.checkpoint.errors import CheckpointError
from shardproof.impls.reference.checkpoint.manifest import INDEX, About, Listed
from shardproof.impls.reference.checkpoint.saver import Saver
from shardproof.impls.reference.checkpoint.writing import listed_in, stem_of, write_pair

#: What only an update changes.
_LATER = ("parameters", "optimizer")
#: Seconds without a byte more in the folder after which a writer is given up.
PATIENCE = 600.0
#: Seconds between two looks; looks in which a writer sees that it is cancelled.
_LOOK, _LOOKS = 0.02, 500


class Growth:
    """Repeated checks whether a folder's files still grow."""

    def __init__(self, folder: Path, patience: float) -> None:
        self.folder, self.patience = folder, patience
        self.bytes, self.since = -1, time.monotonic()

    def stands_still(self) -> bool:
        """Whether nothing has grown for ``patience`` seconds."""
        try:
            found = sum(path.stat().st_size for path in self.folder.iterdir())
        except OSError:  # a name that was just given up
            return time.monotonic() - self.since > self.patience
        if found != self.bytes:
            self.bytes, self.since = found, time.monotonic()
        return time.monotonic() - self.since > self.patience


class Writer(threading.Thread):
    """Write one rank's pair of files; rank 0's writer commits when all pairs exist."""

    def __init__(
        self,
        saver: AsynchronousSharded,
        agreed: Agreed,
        about: About,
        tensors: Sequence[Held],
    ) -> None:
        # A rank that crashes must end, whatever its disk does.
        super().__init__(name=f"writes {agreed.id}", daemon=True)
        self.saver, self.agreed, self.about = saver, agreed, about
        #: What this rank writes, and room for a copy of each.
        self.tensors = tensors
        self.copies: Sequence[Held] | None = None
        self.is_given, self.has_copied = threading.Event(), threading.Event()
        self.has_written, self.has_ended = threading.Event(), threading.Event()
        self.cancelled = threading.Event()
        self.failure: Exception | None = None

    def run(self) -> None:
        """The body of the thread."""
        saver = self.saver
        self.is_given.wait()
        try:
            if self.failure is not None:
                raise self.failure
            if self.copies is None:
                what = "the copy of the state was interrupted, so nothing was saved"
                raise CheckpointError(self.agreed.folder, what, "save again")
            saver.fill(self.copies, self.tensors, later=True)
            self.has_copied.set()
            write_pair(saver.layer, self.agreed, stem_of(saver.rank), self.copies)
            self.has_written.set()
            if saver.rank == 0:
                if listed := self.all_indexes():
                    saver.commit(self.agreed, self.about, listed)
                else:
                    saver.root.abandon()
        except Exception as error:  # noqa: BLE001 - a thread that ends in silence loses the save
            self.failure = error
        finally:
            for event in (self.has_copied, self.has_written, self.has_ended):
                event.set()

    def all_indexes(self) -> list[Listed]:
        """The indexes of all writing ranks once all exist; none if cancelled.

        :raises CheckpointError: the folder no longer grows, and an index is missing.
        """
        ranks = sorted({one.rank for one in self.agreed.writes})
        paths = [self.agreed.folder / (stem_of(rank) + INDEX) for rank in ranks]
        grown = Growth(self.agreed.folder, self.saver.patience)
        while not self.cancelled.wait(_LOOK):
            missing = [path for path in paths if not path.exists()]
            if not missing:
                return [listed_in(path, self.agreed.id) for path in paths]
            if grown.stands_still():
                what = (
                    "this file was not written, and no file of the checkpoint grew for "
                    f"{self.saver.patience:.0f} s"
                )
                raise CheckpointError(
                    missing[0],
                    what,
                    "one rank writes this file: find out why that rank stopped, then save again",
                )
        return []

    def result(self, event: threading.Event) -> None:
        """Wait for ``event``.

        :raises CheckpointError: nothing more is written; or whatever ended the thread.
        """
        grown = Growth(self.agreed.folder, self.saver.patience)
        while not event.wait(1.0):
            if grown.stands_still():
                what = f"nothing was written into this folder for {self.saver.patience:.0f} s"
                raise CheckpointError(self.agreed.folder, what, "check the disk, then save again")
        if self.failure is not None:
            raise self.failure


class AsynchronousSharded(Saver):
    """Save the checkpoints of one run in the background, one at a time."""

    kind = "sharded"
    patience = PATIENCE
    writer_type: type[Writer] = Writer

    under_way: Writer | None = None
    #: Seconds that updates waited for the last copy.
    waited = 0.0

    def save(self, state: State) -> Path:
        """Start to save; a collective call that first waits for the previous save.

        The folder of the checkpoint, which is committed when :meth:`wait` returns, or earlier.

        :raises CheckpointError: on all ranks: the save before failed, or this one cannot start.
        """
        self.wait()
        with self.abandoned_if_it_fails():
            agreed = self.agree(state)
        tensors = own_writes(agreed, state, self.rank)
        # By value: what the caller changes from now on is of a later step.
        writer = self.writer_type(self, agreed, copy.deepcopy(state.about), tensors)
        self.under_way, self.waited = writer, 0.0
        # Before the copy: a thread that begins with work keeps training from going on.
        writer.start()
        try:
            copies = self.room(tensors)
            self.fill(copies, tensors, later=False)
            writer.copies = copies
        except Exception as error:  # noqa: BLE001 - told by wait: no rank waits for it before
            writer.failure = error
        finally:  # also where Ctrl-C ends the copy: nobody waits for a writer that waits for ever
            writer.is_given.set()
        return agreed.folder

    _copies: Sequence[Tensor] = ()

    def room(self, tensors: Sequence[Held]) -> list[Held]:
        """Host memory for copies; the memory of the previous copies if it fits."""
        kept = dict(enumerate(self._copies))
        self._copies = ()
        copies = []
        for number, one in enumerate(tensors):
            old, like = kept.pop(number, None), one.tensor
            if old is None or old.shape != like.shape or old.dtype != like.dtype:
                del old
                old = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            copies.append(old)
        self._copies = copies
        return [replace(one, tensor=t) for one, t in zip(tensors, copies, strict=True)]

    @torch.no_grad()
    def fill(self, copies: Sequence[Held], tensors: Sequence[Held], later: bool) -> None:
        """Copy the tensors that only an update changes (``later``), or the others."""
        for mine, one in zip(copies, tensors, strict=True):
            if (one.kind in _LATER) == later:
                mine.tensor.copy_(one.tensor)

    def before_update(self) -> None:
        """Wait until the tensors that an update changes are copied."""
        if self.under_way is not None:
            began = time.perf_counter()
            self.under_way.has_copied.wait()
            self.waited += time.perf_counter() - began

    def wait(self) -> None:
        """Return when the last save is committed; a collective call.

        :raises CheckpointError: on all ranks, if a rank's writer failed or stands still.
        """
        writer, self.under_way = self.under_way, None
        if writer is None:
            return
        with self.abandoned_if_it_fails():
            try:
                self.together.all(lambda: writer.result(writer.has_written))
                self.together.all(lambda: writer.result(writer.has_ended))
            except BaseException:
                # Rank 0's would wait for an index that never comes.
                writer.cancelled.set()
                writer.join(_LOOKS * _LOOK)
                raise

    def abort(self) -> None:
        """Make the writer commit nothing further and stop after its current tensor."""
        if self.under_way is not None:
            self.under_way.cancelled.set()
