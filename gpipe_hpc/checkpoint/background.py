"""Writing a checkpoint while training goes on: a step waits for a copy to host memory, no longer.

A thread of each rank writes that rank's copy, by the code of any save and without a word to other
ranks. The main threads, at a later edge of a step, put together what was written and give the
checkpoint its name. So no collective is ever called from two threads, and a kill while anything
is written leaves an unnamed folder beside the older checkpoints.
"""

import copy
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpipe_hpc.checkpoint.host_copy import HostBuffer
from gpipe_hpc.checkpoint.saving import Begun, Written, begin, end, write
from gpipe_hpc.comm.world.world import together
from gpipe_hpc.errors import CheckpointError

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline


class _Job:
    """One rank's part of a checkpoint, on a thread of its own."""

    def __init__(self, begun: Begun, rank: int) -> None:
        self.begun = begun
        self.result: Written | CheckpointError | None = None
        self.seconds = 0.0
        self._rank = rank
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self, limit_s: float | None = None) -> None:
        self._thread.join(limit_s)

    def _run(self) -> None:
        began_s = time.perf_counter()
        self.result = write(self.begun, self._rank)
        self.seconds = time.perf_counter() - began_s


class BackgroundSaver:
    """Save a pipeline's checkpoints in the background, one at a time.

    All ranks call `start` and `finish`, at the same edge of a step. Keeps a host copy of what this
    rank writes (pinned if there is an accelerator), which is reused.
    """

    def __init__(self, pipe: "Pipeline") -> None:
        self._pipe = pipe
        self._buffer = HostBuffer(pipe.world.device)
        self._job: _Job | None = None
        self.seconds = 0.0
        """How long this rank wrote its part of the last checkpoint that was finished."""

    @property
    def is_under_way(self) -> bool:
        """Return whether a checkpoint is started and not finished: the same on every rank."""
        return self._job is not None

    @property
    def is_done(self) -> bool:
        """Return whether this rank has written its part of the checkpoint under way."""
        return self._job is not None and self._job.is_done

    def start(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[Any, Any] | None = None,
    ) -> None:
        """Copy the current state and start writing it to `path`.

        Waits for the previous checkpoint, if it is under way. Raises CheckpointError on all ranks
        if that one cannot be written.
        """
        self.finish()
        with together(self._pipe.world, f"saving {path}"):
            begun = begin(self._pipe, Path(path), optimizer, extra)
            tensors = self._buffer.copy(begun.contents.tensors)
            # What the caller gave may change before it is written down.
            facts = copy.deepcopy(begun.contents.facts)
            contents = begun.contents._replace(tensors=tensors, facts=facts)
            begun = begun._replace(contents=contents)
            self._job = _Job(begun, self._pipe.world.rank)

    def finish(self) -> Path | None:
        """Wait until all ranks have written; return the checkpoint's path, or None.

        Raises CheckpointError on all ranks if it cannot be written; then nothing of it remains.
        """
        job, self._job = self._job, None
        if job is None:
            return None
        with together(self._pipe.world, f"saving {job.begun.path}"):
            job.wait()
            self.seconds = job.seconds
            assert job.result is not None, "a thread ends with a result"
            return end(self._pipe, job.begun, job.result)

    def give_up(self, limit_s: float) -> None:
        """Abandon a checkpoint under way, without waiting longer for its thread than this."""
        job, self._job = self._job, None
        if job is not None:
            job.wait(limit_s)
