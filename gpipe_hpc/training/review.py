"""The cut of a run looked at again, once some of its steps are measured."""

from collections.abc import Mapping
from dataclasses import replace

from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planning.advice import layer_times
from gpipe_hpc.planning.review import Review, by_forwards, review
from gpipe_hpc.schedule import Timeline
from gpipe_hpc.training.foresight import Foresight


def review_run(
    pipe: Pipeline, foreseen: Foresight, measured: Timeline, forwards_s: Mapping[int, float]
) -> Review | None:
    """Return a better cut for a measured step of the fullest replica; None if none is much.

    `forwards_s`: what the forwards of layers took, where they were watched. They say which layer of
    a stage is slow; the step says how long the stage takes.
    """
    cut, counted = pipe.partition, foreseen.known.times
    basis = by_forwards(counted, forwards_s, cut.counts)
    times = layer_times(measured, cut.counts, basis, cut.paces)
    return review(pipe.request, pipe.layout, replace(foreseen.known, times=times), counted)
