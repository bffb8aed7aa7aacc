"""Iteration over global batches; each rank reads the part that its pipeline stage needs."""

from collections.abc import Iterable, Iterator
from itertools import tee
from typing import NamedTuple

import torch

from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.data import (
    BatchData,
    BatchReader,
    CorruptTally,
    Dataset,
    PlannedBatch,
    ProcessReaders,
    Readers,
    ReadRequest,
    open_readers,
)
from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.pytree import Nest
from gpipe_hpc.settings import DataConfig


class Batch(NamedTuple):
    """This rank's part of a global batch of `num_samples` samples.

    `position` is the number of samples consumed since the start of the run, this batch included.
    """

    num_samples: int
    position: int
    inputs: Nest
    targets: Nest


class Batches:
    """Iterator over global batches in a planned order; each rank reads only its part.

    All ranks must call `next` equally often; a rank whose stages need neither inputs nor targets
    passes no dataset and reads nothing. Positions count batches returned, not batches read ahead,
    so a resumed run neither loses nor repeats samples.

    Args:
        pipe: the pipeline, which determines the rank's part.
        dataset: the samples; None if the rank needs none.
        plan: the global batches, in order.
        settings: number of workers and depth of prefetching.
        tally: counter of corrupt samples.
        timeout_s: maximum seconds to wait for a batch.
        what: name of the data in error messages.
    """

    def __init__(
        self,
        pipe: Pipeline,
        dataset: Dataset | None,
        plan: Iterable[PlannedBatch],
        settings: DataConfig,
        tally: CorruptTally,
        timeout_s: float,
        what: str = "samples",
    ) -> None:
        self._pipe, self._dataset = pipe, dataset
        self._tally, self._what = tally, what
        ahead, self._plan = tee(plan)
        self._readers: Readers | ProcessReaders | None = None
        if pipe.needs_inputs or pipe.needs_targets:
            assert dataset is not None, "a rank that needs samples must open the data"
            reader = BatchReader(dataset, pipe.needs_inputs, pipe.needs_targets, tally.limit)
            self._readers = open_readers(
                reader,
                (ReadRequest(each.indices[self._share(each)], each.epoch) for each in ahead),
                settings.workers,
                settings.prefetch,
                timeout_s,
            )

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next batch; raise DataError on every rank if one rank cannot read its part."""
        planned, world = next(self._plan), self._pipe.world
        where = f"reading {self._what} of step {self._pipe.steps_done}"
        with collective_errors(world, where):
            world.activity = where
            reading = None if self._readers is None else next(self._readers)
            inputs = reading and reading.inputs
            targets = reading and reading.targets
            if self._tally.limit:
                used = self._used(planned, reading)
                if self._dataset is not None and targets is not None and used != planned.indices:
                    own = used[self._share(planned)]
                    targets = self._dataset.read_targets(own, planned.epoch)
        return Batch(len(planned.indices), planned.position, inputs, targets)

    def close(self) -> None:
        """Stop workers that read ahead."""
        if self._readers is not None:
            self._readers.close()

    def _share(self, planned: PlannedBatch) -> slice:
        return self._pipe.share(len(planned.indices))

    def _used(self, planned: PlannedBatch, reading: BatchData | None) -> list[int]:
        """Return the sample indices of the global batch after replacement of corrupt samples.

        Only ranks that read inputs detect corrupt samples; ranks that read targets need the
        replaced indices, and all ranks count corrupt samples.
        """
        pipe = self._pipe
        corrupt = {} if reading is None else dict(reading.corrupt)
        found = torch.tensor([len(corrupt)], dtype=torch.int64)
        pipe.world_group.all_reduce(found)
        used = list(planned.indices)
        if not found.item():
            return used
        own = list(enumerate(reading.used, self._share(planned).start)) if reading else []
        # Exchange only the indices of replaced samples.
        other = {place: index for place, index in own if index != planned.indices[place]}
        others, merged = pipe.world_group.merge_object(
            (other, corrupt), lambda ahead, behind: (ahead[0] | behind[0], ahead[1] | behind[1])
        )
        for place, index in others.items():
            used[place] = index
        self._tally.add(dict(sorted(merged.items())), says=pipe.world.rank == 0)
        return used
