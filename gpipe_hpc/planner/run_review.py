"""Review the partition of a run with its measured steps."""

from collections.abc import Mapping
from dataclasses import replace

from gpipe_hpc.pipeline import Pipeline
from gpipe_hpc.planner.review import Review, review, slow_stages_text
from gpipe_hpc.planner.run_forecast import RunForecast
from gpipe_hpc.schedule import Timeline
from gpipe_hpc.trainer.calibrating import measured_times


def review_run(
    pipe: Pipeline, foreseen: RunForecast, measured: Timeline, forwards_s: Mapping[int, float]
) -> Review | None:
    """Return a much faster partition for a measured step, or None if there is none.

    `measured` is a step of the replica with the most micro-batches. `forwards_s` are observed
    seconds of layer forwards, which show which layer of a stage is slow.
    """
    known = foreseen.known
    times = measured_times(pipe, foreseen, measured, forwards_s)
    return review(pipe.request, pipe.layout, replace(known, times=times), known.times)


def slow_stages(
    pipe: Pipeline, foreseen: RunForecast, measured: Timeline, forwards_s: Mapping[int, float]
) -> str:
    """Describe the stages of a measured step whose time deviates from the plan; empty if none."""
    times = measured_times(pipe, foreseen, measured, forwards_s)
    return slow_stages_text(pipe.partition, times, foreseen.known.times)
