"""Statistics over the steps of a run, on rank 0."""

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from gpipe_hpc.trainer.one_step import StepPartTimes

_NUM_KEPT: Final = 10_000  # newest steps over which medians are computed


class StepTimings(NamedTuple):
    """Times of a step: of the pipeline on all ranks, and of its other parts on rank 0."""

    pipeline_s: float
    bubble: float
    spent: StepPartTimes

    def scalars(self) -> dict[str, float | None]:
        """Return the times by their names in metrics.jsonl."""
        return {"bubble": self.bubble, "pipeline_s": self.pipeline_s, **self.spent._asdict()}

    @staticmethod
    def none() -> dict[str, float | None]:
        """Return the keys of `scalars` with values None, for a step whose times are unknown."""
        return dict.fromkeys(("bubble", "pipeline_s", *StepPartTimes._fields))


@dataclass
class RunStatistics:
    """Totals over the steps of one start, and the times of its newest steps.

    The first step, which includes initialization, is excluded from rates and medians.
    """

    first_step: int  # number of steps done before this start
    began_s: float = field(default_factory=time.time)
    num_steps: int = 0
    num_samples: int = 0
    steps_s: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    validation_loss: float | None = None
    stalls_s: dict[str, float] = field(default_factory=dict)
    _newest: deque[tuple[float, StepTimings]] = field(
        default_factory=lambda: deque(maxlen=_NUM_KEPT)
    )

    def note(
        self, times: StepTimings | None, step_time_s: float, num_samples: int, loss: float
    ) -> None:
        """Add the times and loss of a finished step."""
        if self.num_steps == 1:
            self.num_samples, self.steps_s = 0, 0.0
            self._newest.clear()
        self.num_steps += 1
        self.num_samples += num_samples
        self.steps_s += step_time_s
        if times is not None:
            self._newest.append((step_time_s, times))
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.last_loss = loss

    def stall(self, name: str, seconds: float) -> None:
        """Add the seconds that all ranks waited at a step boundary for the state to be saved."""
        self.stalls_s[name] = self.stalls_s.get(name, 0.0) + seconds

    @property
    def samples_per_s(self) -> float | None:
        """Return samples per second of step time; None before the first step."""
        return self.num_samples / self.steps_s if self.steps_s else None

    def medians(self) -> dict[str, Any]:
        """Return the medians of step time, pipeline time, other parts of a step, and the bubble."""
        if not self._newest:
            return {"step_time_s": None, "pipeline_s": None, "outside_pipeline_s": None}
        outside = [step_s - times.pipeline_s for step_s, times in self._newest]
        rows = [times.scalars() for _, times in self._newest]
        return {
            "step_time_s": statistics.median(step_s for step_s, _ in self._newest),
            "outside_pipeline_s": statistics.median(outside),
            **{name: statistics.median(row[name] or 0.0 for row in rows) for name in rows[0]},
        }
