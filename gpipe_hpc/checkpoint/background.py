"""Write checkpoints in the background: a step waits only for a copy to host memory.

A thread of each rank writes that rank's copy, without communication. At a later step boundary the
main threads write the manifest and rename the folder. Collectives are therefore never called from
two threads, and a kill during writing leaves an incomplete folder next to the older checkpoints.
"""

import copy
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gpipe_hpc.checkpoint.host_copy import HostBuffer
from gpipe_hpc.checkpoint.saving import PendingCheckpoint, WrittenTensors, begin, end, write
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.errors import CheckpointError

if TYPE_CHECKING:
    from gpipe_hpc.pipeline import Pipeline


class _WriteJob:
    """The thread that writes one rank's part of a checkpoint."""

    def __init__(self, begun: PendingCheckpoint, rank: int) -> None:
        self.begun = begun
        self.result: WrittenTensors | CheckpointError | None = None
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
    """Writer of a pipeline's checkpoints in the background, one at a time.

    All ranks call `start` and `finish` at the same step boundary. The host memory (pinned if there
    is an accelerator) for the copy of what this rank writes is reused.
    """

    def __init__(self, pipe: "Pipeline") -> None:
        self._pipe = pipe
        self._buffer = HostBuffer(pipe.world.device)
        self._job: _WriteJob | None = None
        self.seconds = 0.0
        """Seconds in which this rank wrote its part of the last finished checkpoint."""

    @property
    def is_under_way(self) -> bool:
        """Return whether a checkpoint is started and not finished; equal on every rank."""
        return self._job is not None

    @property
    def is_done(self) -> bool:
        """Return whether this rank has written its part of the current checkpoint."""
        return self._job is not None and self._job.is_done

    def start(
        self,
        path: str | Path,
        optimizer: torch.optim.Optimizer | None = None,
        extra: Mapping[Any, Any] | None = None,
    ) -> None:
        """Copy the current state and start writing it to `path`. Collective.

        Finishes the previous checkpoint first. Raises CheckpointError on all ranks if that fails,
        or if the new one cannot be started.
        """
        self.finish()
        with collective_errors(self._pipe.world, f"saving {path}"):
            begun = begin(self._pipe, Path(path), optimizer, extra)
            tensors = self._buffer.copy(begun.contents.tensors)
            # The caller may change its values before they are written.
            facts = copy.deepcopy(begun.contents.facts)
            contents = begun.contents._replace(tensors=tensors, facts=facts)
            begun = begun._replace(contents=contents)
            self._job = _WriteJob(begun, self._pipe.world.rank)

    def finish(self) -> Path | None:
        """Wait until all ranks have written; return the checkpoint's path, or None.

        Raises CheckpointError on all ranks if it cannot be written; nothing of it remains then.
        """
        job, self._job = self._job, None
        if job is None:
            return None
        with collective_errors(self._pipe.world, f"saving {job.begun.path}"):
            job.wait()
            self.seconds = job.seconds
            assert job.result is not None, "a thread ends with a result"
            return end(self._pipe, job.begun, job.result)

    def give_up(self, limit_s: float) -> None:
        """Abandon the current checkpoint, waiting at most `limit_s` seconds for its thread."""
        job, self._job = self._job, None
        if job is not None:
            job.wait(limit_s)
