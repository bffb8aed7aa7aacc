"""The tables that are run."""

from typing import NamedTuple

from gpipe_hpc.schedule import Schedule


class Tables(NamedTuple):
    """The lowered tables of a pipeline, both checked."""

    training: Schedule
    evaluation: Schedule
