"""Collect the measurements of a run while it trains, and write its report."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.errors import os_remedy
from gpipe_hpc.planner.run_review import review_run, slow_stages
from gpipe_hpc.trainer.calibrating import calibrate
from gpipe_hpc.trainer.session import Session
from gpipe_hpc.trainer.step_boundary import TimedStep
from gpipe_hpc.trainer.summary.compose import (
    MedianTrace,
    RunOutcome,
    compose_summary,
    expected_step,
    write_summary,
)
from gpipe_hpc.trainer.summary.figures import RankFigures, TimeSums
from gpipe_hpc.trainer.summary.layer_clock import LayerClock
from gpipe_hpc.trainer.summary.ledger import RunStatistics
from gpipe_hpc.trainer.summary.table import summary_text
from gpipe_hpc.trainer.traces.files import (
    forget_later_traces,
    trace_name,
    write_planned,
    write_trace,
)
from gpipe_hpc.trainer.traces.recorded_steps import (
    RecordedStep,
    RecordedSteps,
    TracedStep,
    gather_steps,
    timelines_of,
)

log = logging.getLogger("gpipe_hpc.train")


@contextmanager
def _log_errors(failed: str = "summary: cannot be created") -> Iterator[None]:
    """Context manager that logs errors of writing a report instead of ending the run."""
    try:
        yield
    except OSError as error:
        remedy = os_remedy(error) or "check the folder"
        log.warning("summary: cannot be written to the run folder: %s; %s", error, remedy)
    except Exception:
        log.warning("%s; the run itself is complete", failed, exc_info=True)


class Reporter:
    """Collector of one rank's measurements for the report, which rank 0 writes.

    Ranks send them to rank 0 when all synchronize anyway: after a validation and at the end. Each
    sends a few numbers, and at the end the times of the actions of the traced steps.
    """

    def __init__(self, session: Session, memory_before_bytes: int) -> None:
        self._session, self._pipe = session, session.pipe
        self._before_bytes = memory_before_bytes
        trace = session.config.trace
        self._held = RecordedSteps(trace.steps, trace.from_step)
        self._sums = TimeSums()
        layers = {
            i: layer for each in self._pipe.stages.values() for i, layer in each.layers.items()
        }
        is_compiled = any(each.is_compiled for each in self._pipe.stages.values())
        # Hooks would make torch.compile compile the layers again.
        self.layer_clock = LayerClock({} if is_compiled else layers, self._pipe.world.device)
        self.ledger = RunStatistics(session.pipe.steps_done)
        layout, leads = session.pipe.layout, session.pipe.world.rank == 0
        self._tables = [layout.of(replica).schedule for replica in range(layout.replicas)]
        self.planned = expected_step(session) if leads else None

    def record_step(self, timed: TimedStep, pipeline_s: float) -> None:
        """Add this rank's times of a step, and store its events if the step may be traced."""
        self._sums.add(timed.marks.times.busy_s, timed.laps.spent(pipeline_s))
        if self._held.wants(timed.step):
            moments, around = timed.marks.moments, timed.laps.moments()
            self._held.take(RecordedStep(timed.step, pipeline_s, moments, timed.origin_s, around))

    def review(self) -> None:
        """Log stages that differ from the plan, and warn if another partition is better (rank 0).

        Collective; each rank sends the times of one step's actions.
        """
        median, world_group = self._held.median, self._pipe.world_group
        if median is None or self._pipe.layout.schedule.num_ranks == 1:
            return
        with collective_errors(self._pipe.world, "reviewing the partition"):
            stages = self._pipe.mesh.stages
            traced = gather_steps(world_group, (median,), median, stages)
            watched = world_group.gather_object(self.layer_clock.times(), root=0)
        if watched is None or self._session.foreseen is None:
            return
        with _log_errors("the partition was not reviewed"):
            fullest = self._pipe.layout.portions.fullest
            measured = timelines_of(traced[0], self._tables)[fullest]
            of_replica = watched[fullest * stages : (fullest + 1) * stages]
            forwards_s = {each.layer: each.forward_s for own in of_replica for each in own}
            off = slow_stages(self._pipe, self._session.foreseen, measured, forwards_s)
            if off:
                log.info("%s", off)
            found = review_run(self._pipe, self._session.foreseen, measured, forwards_s)
            if found is not None:
                log.warning("%s", found.text())

    def refresh(self) -> None:
        """Write an intermediate summary during the run. Collective."""
        ranks = self._gather_figures()
        if ranks:
            with _log_errors():
                summary = self._compose(RunOutcome("running"), ranks, None)
                write_summary(self._session.run_folder, summary)

    def finish(self, ended: RunOutcome) -> None:
        """Write traces, summary and calibration, and log the closing table. Collective."""
        ranks = self._gather_figures()
        with collective_errors(self._pipe.world, "gathering traces"):
            median = self._held.median
            kept = self._held.steps
            if self._session.config.trace.keep == "median":
                kept = tuple(each for each in kept if each is median)
            world_group = self._pipe.world_group
            traced = gather_steps(world_group, kept, median, self._pipe.mesh.stages)
        if ranks:
            with _log_errors():
                found = self._median_of(traced)
                summary = self._compose(ended, ranks, found)
                log.info("%s", summary_text(summary))
                self._keep_traces(traced)
                write_summary(self._session.run_folder, summary)
                self._calibrate(traced, found, ranks)

    def _calibrate(
        self,
        traced: Sequence[TracedStep],
        typical: MedianTrace | None,
        ranks: Sequence[RankFigures],
    ) -> None:
        if typical is not None:
            steps = [timelines_of(each, self._tables) for each in traced]
            calibrate(self._session, self.ledger, steps, typical.replicas, ranks)

    def fail(self, error: BaseException) -> None:
        """Write the summary of a failed run, on rank 0 and from its own data; ignore errors.

        Other ranks are not queried, as one of them may have failed.
        """
        with suppress(Exception):
            if self._session.lock is not None:
                self._session.lock.check()  # another run may own the folder by now
            text = f"{type(error).__name__}: {error}"
            summary = self._compose(RunOutcome("failed", text), [self._figures()], None)
            write_summary(self._session.run_folder, summary)

    def _figures(self) -> RankFigures:
        layers = self.layer_clock.times()
        return RankFigures.of(self._pipe, self._held.median, self._before_bytes, self._sums, layers)

    def _gather_figures(self) -> Sequence[RankFigures]:
        """Return the measurements of all ranks on rank 0, nothing elsewhere. Collective."""
        with collective_errors(self._pipe.world, "gathering the ranks' figures"):
            return self._pipe.world_group.gather_object(self._figures(), root=0) or ()

    def _median_of(self, traced: Sequence[TracedStep]) -> MedianTrace | None:
        for each in traced:
            if each.is_median:
                replicas = timelines_of(each, self._tables)
                return MedianTrace(each.step, each.pipeline_s, replicas, trace_name(each.step))
        return None

    def _keep_traces(self, traced: Sequence[TracedStep]) -> None:
        folder, pipe = self._session.run_folder, self._pipe
        forget_later_traces(folder, pipe.steps_done)
        if self.planned is not None and traced:
            write_planned(self.planned.timeline, folder)
        for each in traced:
            replicas = timelines_of(each, self._tables)
            around = each.around
            write_trace(replicas, folder, each.step, is_median=each.is_median, around=around)

    def _compose(
        self, ended: RunOutcome, ranks: Sequence[RankFigures], traced: MedianTrace | None
    ) -> dict[str, Any]:
        return compose_summary(self._session, self.ledger, ended, ranks, traced, self.planned)
