"""The cut of a run looked at again, once some of its steps are measured."""

from collections.abc import Mapping
from dataclasses import replace

from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planner.foresight import Foresight
from gpipe_hpc.planner.review import Review, review, slow_stages_text
from gpipe_hpc.schedule import Timeline
from gpipe_hpc.trainer.calibrating import measured_times


def review_run(
    pipe: Pipeline, foreseen: Foresight, measured: Timeline, forwards_s: Mapping[int, float]
) -> Review | None:
    """Return a better cut for a measured step of the fullest replica; None if none is much.

    `forwards_s`: what the forwards of layers took, where they were watched. They say which layer of
    a stage is slow; the step says how long the stage takes.
    """
    known = foreseen.known
    times = measured_times(pipe, foreseen, measured, forwards_s)
    return review(pipe.request, pipe.layout, replace(known, times=times), known.times)


def slow_stages(
    pipe: Pipeline, foreseen: Foresight, measured: Timeline, forwards_s: Mapping[int, float]
) -> str:
    """Say which stages of a measured step took other times than planned; nothing where none did."""
    times = measured_times(pipe, foreseen, measured, forwards_s)
    return slow_stages_text(pipe.partition, times, foreseen.known.times)
