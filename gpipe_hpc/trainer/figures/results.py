"""Write the results of each step after the device has completed it.

On an accelerator, the host waits once per step, for the end of the previous step. At that time the
next step is already enqueued, so that the device always has work.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.device.deferred import Mark, seconds_between, wait_for
from gpipe_hpc.trainer.figures.metrics import Metrics
from gpipe_hpc.trainer.figures.progress import Progress
from gpipe_hpc.trainer.one_step import TrainedStep, refuse_non_finite
from gpipe_hpc.trainer.session import Session
from gpipe_hpc.trainer.step_boundary import TimedStep
from gpipe_hpc.trainer.summary.ledger import RunStatistics, StepTimings


class StepLine(NamedTuple):
    """A training step and the scalars of its line in metrics.jsonl.

    Args:
        trained: the step's inputs and results.
        timed: its time marks.
        since: end of the previous step, from which the step time is counted; None to count from the
            step's own start, if something else ran in between.
        times: times of the newest complete step.
        known: other scalars.
    """

    trained: TrainedStep
    timed: TimedStep
    since: Mark | None
    times: StepTimings | None
    known: dict[str, Any]

    def seconds(self) -> float:
        """Return the step time; on an accelerator this waits for the end of the step."""
        laps = self.trained.laps
        return seconds_between(laps.began if self.since is None else self.since, laps.left)


class Results:
    """Writer of the results of steps on rank 0; the other ranks only check them for NaN.

    Args:
        session: the run.
        ledger: statistics over steps.
        metrics: writer of metrics, on rank 0.
        progress: progress line, on rank 0.
        is_late: whether the device completes a step only after the host has enqueued the next.
        rates: returns rates per second from the samples and seconds of a step.
    """

    def __init__(
        self,
        session: Session,
        ledger: RunStatistics,
        metrics: Metrics | None,
        progress: Progress | None,
        *,
        is_late: bool,
        rates: Callable[[int, float], Mapping[str, float]],
    ) -> None:
        self._session, self._ledger = session, ledger
        self._metrics, self._progress = metrics, progress
        self._is_late, self._rates = is_late, rates
        self._waiting: StepLine | None = None

    def add(self, line: StepLine) -> TimedStep | None:
        """Add a step; return the newest complete step: this one, or the previous one if `is_late`.

        Returns None if no step is complete. Raises NonFiniteError on every rank if the loss or
        gradient norm of the complete step is not finite, PeerError if another rank failed before
        its end.
        """
        before, self._waiting = self._waiting, line
        if not self._is_late:
            return self.settle()
        return None if before is None else self._finish(before)

    def settle(self) -> TimedStep | None:
        """Wait for the last added step, write its results and return it; None if there is none.

        Raises the errors of `add`.
        """
        line, self._waiting = self._waiting, None
        return None if line is None else self._finish(line)

    def _finish(self, line: StepLine) -> TimedStep:
        trained = line.trained
        if self._is_late:
            # An aborted all-reduce may have left arbitrary values in memory.
            with collective_errors(self._session.pipe.world, f"step {trained.step}"):
                wait_for(trained.laps.left)
            refuse_non_finite(self._session, trained)
        if self._metrics is not None and self._progress is not None:
            num_samples, step_time_s = trained.batch.num_samples, line.seconds()
            scalars = {
                **trained.result.scalars(),
                "lr": trained.lr,
                "grad_norm": trained.grad_norm,
                "step_time_s": step_time_s,
                **self._rates(num_samples, step_time_s),
                **line.known,
            }
            self._metrics.write(trained.step, scalars)
            self._progress.update(trained.step, scalars)
            self._ledger.note(line.times, step_time_s, num_samples, trained.result.loss)
        return line.timed
