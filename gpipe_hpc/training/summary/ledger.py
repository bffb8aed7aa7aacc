"""What rank 0 notes while a run goes on."""

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from gpipe_hpc.training.step_edge import Agreed

_NUM_KEPT: Final = 10_000  # steps of which medians are taken: the newest


@dataclass
class Ledger:
    """Sums over the steps of one start, and the newest steps one by one.

    The first step counts in no rate and no median: it prepares what later ones find ready.
    """

    first_step: int  # the number of steps done before
    began_s: float = field(default_factory=time.time)
    num_steps: int = 0
    num_samples: int = 0
    steps_s: float = 0.0
    first_loss: float | None = None
    last_loss: float | None = None
    validation_loss: float | None = None
    stalls_s: dict[str, float] = field(default_factory=dict)
    _newest: deque[tuple[float, float, float]] = field(
        default_factory=lambda: deque(maxlen=_NUM_KEPT)
    )

    def note(self, agreed: Agreed, step_time_s: float, num_samples: int, loss: float) -> None:
        """Take in a finished step."""
        if self.num_steps == 1:
            self.num_samples, self.steps_s = 0, 0.0
            self._newest.clear()
        self.num_steps += 1
        self.num_samples += num_samples
        self.steps_s += step_time_s
        self._newest.append((step_time_s, agreed.pipeline_s, agreed.bubble))
        self.first_loss = loss if self.first_loss is None else self.first_loss
        self.last_loss = loss

    def stall(self, name: str, seconds: float) -> None:
        """Note how long all waited at a step's edge for the state to be kept."""
        self.stalls_s[name] = self.stalls_s.get(name, 0.0) + seconds

    @property
    def samples_per_s(self) -> float | None:
        """Return samples over the time of their steps; None before the first step."""
        return self.num_samples / self.steps_s if self.steps_s else None

    def medians(self) -> dict[str, Any]:
        """Return the medians of a step: seconds, those in the pipeline and others; the bubble."""
        if not self._newest:
            return {"step_time_s": None, "pipeline_s": None, "outside_pipeline_s": None}
        step_s, pipeline_s, bubble = zip(*self._newest, strict=True)
        outside = [whole - part for whole, part in zip(step_s, pipeline_s, strict=True)]
        return {
            "step_time_s": statistics.median(step_s),
            "pipeline_s": statistics.median(pipeline_s),
            "outside_pipeline_s": statistics.median(outside),
            "bubble": statistics.median(bubble),
        }
