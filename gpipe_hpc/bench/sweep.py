"""The points of a sweep (combinations of settings), and the overrides for each."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from gpipe_hpc.config import num_planned_ranks
from gpipe_hpc.settings import Config


class Point(NamedTuple):
    """One combination of ranks, CPU threads, batch size, micro-batches and backend."""

    ranks: int
    threads: int
    batch_size: int
    microbatches: int
    backend: str

    def named(self) -> str:
        """Return the values of the point as text for a progress line."""
        values = zip(self._fields, self, strict=True)
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values)

    @property
    def overrides(self) -> list[str]:
        """Return the command-line overrides for a run at this point."""
        return [
            f"train.num_threads={self.threads}",
            f"train.batch_size={self.batch_size}",
            "train.batch_ramp.start=null",  # measure steps of the full batch size
            f"pipeline.microbatches={self.microbatches}",
            f"comm.backend={self.backend}",
        ]


def at_point(config: Config, point: Point) -> Config:
    """Return the configuration of a run at a point, for checks; see `Point.overrides`."""
    train = replace(config.train, batch_size=point.batch_size, num_threads=point.threads)
    train.batch_ramp = replace(train.batch_ramp, start=None)
    return replace(
        config,
        train=train,
        pipeline=replace(config.pipeline, microbatches=point.microbatches),
        comm=replace(config.comm, backend=point.backend),
    )


def points(config: Config) -> list[Point]:
    """Return all combinations of the listed settings."""
    bench, own = config.bench, config.pipeline
    lists = (
        bench.ranks or [num_planned_ranks(config, 1)],
        bench.threads or [1],
        bench.batch_sizes or [config.train.batch_size],
        bench.microbatches or [own.microbatches],
        bench.backends or [config.comm.backend],
    )
    return [Point(*each) for each in product(*lists)]


def varied(found: list[Point]) -> Iterator[str]:
    """Yield the names of the settings that differ between points."""
    for name, values in zip(Point._fields, zip(*found, strict=True), strict=True):
        if len(set(values)) > 1:
            yield name
