"""What a run tells of its steps: each line is written once its step is done on the device.

On an accelerator that is when the next step has been handed to the device, which so always has
work: the host waits once a step, for the end of the one before, and finds all its numbers there.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from gpipe_hpc.comm.world.world import together
from gpipe_hpc.device.deferred import Mark, seconds_between, wait_for
from gpipe_hpc.trainer.figures.metrics import Metrics
from gpipe_hpc.trainer.figures.progress import Progress
from gpipe_hpc.trainer.one_step import Trained, refuse_non_finite
from gpipe_hpc.trainer.session import Session
from gpipe_hpc.trainer.step_edge import TimedStep
from gpipe_hpc.trainer.summary.ledger import Ledger, Times


class Line(NamedTuple):
    """A step, and what its line says besides results.

    `since`: the end of the step before it; None where something else came between: then the step
    counts from its own beginning. `times`: of the newest step that is known.
    """

    trained: Trained
    timed: TimedStep
    since: Mark | None
    times: Times | None
    known: dict[str, Any]

    def seconds(self) -> float:
        """Return what the step took; on an accelerator this waits for its end."""
        laps = self.trained.laps
        return seconds_between(laps.began if self.since is None else self.since, laps.left)


class Results:
    """Writes the lines of a run's steps, on rank 0; other ranks look at the numbers, too.

    `is_late`: a step is done on the device after the host has left it. `rates`: what a step did in
    a second, by its samples and its seconds.
    """

    def __init__(
        self,
        session: Session,
        ledger: Ledger,
        metrics: Metrics | None,
        progress: Progress | None,
        *,
        is_late: bool,
        rates: Callable[[int, float], Mapping[str, float]],
    ) -> None:
        self._session, self._ledger = session, ledger
        self._metrics, self._progress = metrics, progress
        self._is_late, self._rates = is_late, rates
        self._waiting: Line | None = None

    def add(self, line: Line) -> TimedStep | None:
        """Take a step; return one whose marks may be read: the one before if steps are done late.

        Raises NonFiniteError, on every rank, if that one's loss or norm is no number to go on from;
        PeerError if another rank failed before the device was done with it.
        """
        before, self._waiting = self._waiting, line
        if not self._is_late:
            return self.settle()
        return None if before is None else self._finish(before)

    def settle(self) -> TimedStep | None:
        """Wait for the last step, unless its line is written; return it. Raises as `add` does."""
        line, self._waiting = self._waiting, None
        return None if line is None else self._finish(line)

    def _finish(self, line: Line) -> TimedStep:
        trained = line.trained
        if self._is_late:
            # A sum that was cut off on the device may have ended with anything in memory.
            with together(self._session.pipe.world, f"step {trained.step}"):
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
