"""The tables that are run."""

from typing import NamedTuple

from gpipe_hpc.engine.outer.buckets import Buckets
from gpipe_hpc.schedule import Schedule


class Tables(NamedTuple):
    """The lowered tables of a pipeline, both checked, and what the reductions in them are of.

    `buckets`: for each stage the buckets into which its gradients are gathered; empty where no
    stage has another copy.
    """

    training: Schedule
    evaluation: Schedule
    buckets: tuple[Buckets, ...] = ()
