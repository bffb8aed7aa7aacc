"""The tables that a pipeline runs."""

from collections.abc import Sequence
from typing import NamedTuple

from gpipe_hpc.data_parallel import Buckets
from gpipe_hpc.schedule import Schedule


class Tables(NamedTuple):
    """The lowered and checked tables of a pipeline, and the buckets of their reductions.

    `buckets`: for each stage the buckets into which its gradients are gathered; empty where no
    stage has another copy. `averaging`: where replicas train apart, the table of a step at whose
    end parameters are averaged; None where every step sums gradients.
    """

    training: Schedule
    evaluation: Schedule
    buckets: tuple[Buckets, ...] = ()
    averaging: Schedule | None = None

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        """Return the tables that are not None."""
        tables = self.training, self.evaluation, self.averaging
        return tuple(table for table in tables if table is not None)

    def with_schedules(self, schedules: Sequence[Schedule]) -> "Tables":
        """Return a copy with other schedules, in the order of `schedules`."""
        training, evaluation, *averaging = schedules
        return self._replace(
            training=training,
            evaluation=evaluation,
            averaging=averaging[0] if averaging else None,
        )
