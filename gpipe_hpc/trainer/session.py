"""The objects of a run on one rank: pipeline, optimizer, data, and their checkpoints."""

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

import torch

from gpipe_hpc.checkpoint import BackgroundSaver
from gpipe_hpc.checkpoint.in_memory import NeighbourCopies
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.data import (
    CorruptTally,
    DataFacts,
    Dataset,
    DataSource,
    Identity,
    PlannedBatch,
    ShuffledSampler,
    validation_batches,
)
from gpipe_hpc.data.batches import Batch, Batches
from gpipe_hpc.data.position import IDENTITY
from gpipe_hpc.optim.large_batch.adascale import AdaScale
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planner.forecast import RankForecast
from gpipe_hpc.planner.run_forecast import RunForecast
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.horizon import last_step
from gpipe_hpc.trainer.run.changed_settings import SETTINGS, settings_of
from gpipe_hpc.trainer.run.folder import OWNER, Checkpoints
from gpipe_hpc.trainer.run.lock import RunLock

log = logging.getLogger("gpipe_hpc.train")

ADASCALE: Final = "adascale"
"""Key of AdaScale's state in a checkpoint's extra values."""

_GRACE_S: Final = 5.0  # for a file that is being written when a run fails


@dataclass
class Session:
    """State of a run on one rank: pipeline, optimizer, data position, checkpoints and settings.

    `config` contains the settings resolved for the current ranks, `asked` the settings as given.
    """

    config: Config
    asked: Config
    pipe: Pipeline
    optimizer: torch.optim.Optimizer
    source: DataSource | None  # None if this rank's stages need neither inputs nor targets
    facts: DataFacts
    identity: Identity
    sampler: ShuffledSampler
    checkpoints: Checkpoints
    run_folder: Path
    tally: CorruptTally
    run_name: str  # stored in its checkpoints
    lock: RunLock | None  # of the run folder, on rank 0
    saver: BackgroundSaver
    copies: NeighbourCopies | None = None  # in-memory checkpoints, if enabled
    baseline: float | None = None  # loss of a trivial prediction, on rank 0, if known
    foreseen: RunForecast | None = None  # forecast, on rank 0, if the layers can be counted
    planned: RankForecast | None = None  # memory forecast of this rank, if known
    position: int = 0  # samples consumed since the start of the run
    adascale: AdaScale | None = None
    _batches: Batches | None = None

    @property
    def batch_size(self) -> int:
        """Return the number of samples of a global batch; the last of an epoch may be smaller."""
        return min(self.sampler.batch_size, self.sampler.num_samples)

    @property
    def is_complete(self) -> bool:
        """Return whether AdaScale has made the progress of train.steps steps of the base batch."""
        return self.adascale is not None and self.adascale.progress >= self.config.train.steps

    def next_batch(self) -> Batch:
        """Return this rank's part of the next global training batch; `position` is not changed."""
        if self._batches is None:
            num_left = max(0, last_step(self.config.train) - self.pipe.steps_done)
            plan = islice(self.sampler.batches(self.position, self.pipe.steps_done), num_left)
            dataset = None if self.source is None else self.source.train
            self._batches = self._read(dataset, plan, "training samples")
        return next(self._batches)

    def validation_batches(self) -> Batches:
        """Return an iterator over this rank's part of each validation batch; close it after use."""
        train = self.config.train
        batches = validation_batches(
            self.facts.num_validation_samples, train.batch_size, train.validate_batches
        )
        plan = (PlannedBatch(indices, epoch=0, position=0) for indices in batches)
        dataset = None if self.source is None else self.source.validation
        return self._read(dataset, plan, "validation samples")

    def close(self) -> None:
        """Stop the workers that read data, and abandon a checkpoint that is being written."""
        self.saver.give_up(_GRACE_S)
        if self._batches is not None:
            self._batches.close()

    def _read(self, dataset: Dataset | None, plan: Iterable[PlannedBatch], what: str) -> Batches:
        config = self.config
        return Batches(
            self.pipe, dataset, plan, config.data, self.tally, config.comm.timeout_s, what
        )

    def copy(self) -> float:
        """Save this step's state as an in-memory checkpoint; return the seconds that it took."""
        assert self.copies is not None, "in-memory checkpoints are enabled"
        return self.copies.save(self.pipe, self.optimizer, self._extra())

    def _extra(self) -> dict[str, Any]:
        return {
            "position": self.position,
            "corrupt": self.tally.names,
            IDENTITY: self.identity,
            OWNER: self.run_name,
            SETTINGS: settings_of(self.asked),
            **({} if self.adascale is None else {ADASCALE: self.adascale.state()}),
        }

    def save(self) -> float:
        """Write a checkpoint of this step; return the seconds that it took.

        A checkpoint that is being written in the background is finished first.
        """
        began_s = time.perf_counter()
        self.finish_save()
        path = self.checkpoints.path(self.pipe.steps_done)
        self._check_lock()
        self.pipe.save(path, self.optimizer, self._extra())
        self._prune()
        seconds = time.perf_counter() - began_s
        log.info("saved %s: the step waited %.3f s", path, seconds)
        return seconds

    def start_save(self) -> float:
        """Start writing a checkpoint of this step in the background; return the seconds waited.

        Finishes the previous checkpoint first.
        """
        began_s = time.perf_counter()
        self.finish_save()
        path = self.checkpoints.path(self.pipe.steps_done)
        self._check_lock()
        self.saver.start(path, self.optimizer, self._extra())
        return time.perf_counter() - began_s

    def finish_save(self) -> float:
        """Finish the checkpoint being written in the background, if any; return seconds waited."""
        if not self.saver.is_under_way:
            return 0.0
        began_s = time.perf_counter()
        self._check_lock()
        path = self.saver.finish()
        self._prune()
        seconds = time.perf_counter() - began_s
        wrote_s = self.saver.seconds
        log.info(
            "saved %s, written in the background in %.3f s; all ranks waited %.3f s at its end",
            path,
            wrote_s,
            seconds,
        )
        return seconds

    def _check_lock(self) -> None:
        with collective_errors(self.pipe.world, "saving"):
            if self.lock is not None:
                self.lock.check(looks=True)

    def _prune(self) -> None:
        with collective_errors(self.pipe.world, "removing old checkpoints"):
            if self.pipe.world.rank == 0:
                self.checkpoints.prune()
