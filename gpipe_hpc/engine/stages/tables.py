"""The tables that are run."""

from collections.abc import Sequence
from typing import NamedTuple

from gpipe_hpc.data_parallel import Buckets
from gpipe_hpc.schedule import Schedule


class Tables(NamedTuple):
    """The lowered tables of a pipeline, all checked, and what the reductions in them are of.

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
        """Return the tables that there are."""
        tables = self.training, self.evaluation, self.averaging
        return tuple(table for table in tables if table is not None)

    def with_schedules(self, schedules: Sequence[Schedule]) -> "Tables":
        """Return the same with others of the tables that there are."""
        training, evaluation, *averaging = schedules
        return self._replace(
            training=training,
            evaluation=evaluation,
            averaging=averaging[0] if averaging else None,
        )
