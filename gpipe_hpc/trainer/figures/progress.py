"""The progress line of rank 0."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from statistics import median
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gpipe_hpc.trainer.writers import Scalars
from gpipe_hpc.units import bytes_text

_NUM_RECENT: Final = 20  # steps whose median time predicts the remaining time
_SMOOTHED: Final = ("tokens_per_s", "samples_per_s", "share_of_peak", "bubble")
_SMOOTHED_S: Final = 10.0  # seconds of steps over which these are averaged
_OF_RANK: Final = "peak_memory_bytes/"  # followed by the rank
_REFRESH_S: Final = 0.1  # between two updates of the line on a terminal
_SHORTEST_GAP_S: Final = 1.0  # between two lines without a terminal, after the first seconds
_LONGEST_GAP_S: Final = 60.0


class _Window:
    """Moving average of a metric over the last `span_s` seconds, weighted by step time."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._steps: deque[tuple[float, float]] = deque()  # seconds, figure x seconds
        self._seconds = self._amount = 0.0

    def add(self, step_time_s: float, figure: float) -> None:
        """Add a step's value, and drop the oldest steps that are outside the time span."""
        self._steps.append((step_time_s, figure * step_time_s))
        self._seconds += step_time_s
        self._amount += figure * step_time_s
        while self._seconds - self._steps[0][0] >= self._span_s:
            seconds, amount = self._steps.popleft()
            self._seconds -= seconds
            self._amount -= amount

    @property
    def mean(self) -> float | None:
        """Return the mean; None before the first step."""
        return self._amount / self._seconds if self._steps else None


class Progress:
    """Progress display: a line updated in place on a terminal, else one every `log_every` steps.

    Without a terminal at most one line per second is printed, except in the first seconds, and at
    least one per minute. Rates and bubble are averages over the last ten seconds of steps.
    """

    def __init__(
        self,
        first_step: int,
        last_step: int,
        log_every: int,
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first, self._last, self._log_every = first_step, last_step, log_every
        # Environment variables for colors must not count as a terminal.
        self._console = console or Console(force_terminal=sys.stdout.isatty())
        self._now = now
        self._began_s = self._shown_s = now()
        self._times_s: deque[float] = deque(maxlen=_NUM_RECENT)
        self._smoothed = {name: _Window(_SMOOTHED_S) for name in _SMOOTHED}
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                console=self._console, auto_refresh=False, redirect_stderr=sys.stderr.isatty()
            )
            self._live.start()

    def update(self, step: int, scalars: Scalars) -> None:
        """Display a finished step, given its scalars for metrics.jsonl."""
        step_time_s = scalars.get("step_time_s")
        if step_time_s:
            self._times_s.append(step_time_s)
            for name, window in self._smoothed.items():
                figure = scalars.get(name)
                if figure is not None:
                    window.add(step_time_s, figure)
        is_end = step in (self._first + 1, self._last)
        now_s = self._now()
        passed_s = now_s - self._shown_s
        if self._live is not None:
            # Truncate instead of wrapping: only a single line can be overwritten.
            line = Text(self.line(step, scalars), no_wrap=True, overflow="ellipsis")
            is_due = is_end or passed_s >= _REFRESH_S
            self._live.update(line, refresh=is_due)
        else:
            gap_s = min(_SHORTEST_GAP_S, 0.05 * (now_s - self._began_s))
            is_due = (step - self._first) % self._log_every == 0 and passed_s >= gap_s
            is_due |= is_end or passed_s >= _LONGEST_GAP_S
            if is_due:
                self.say(self.line(step, scalars))
        if is_due:
            self._shown_s = now_s

    def line(self, step: int, scalars: Scalars) -> str:
        """Return the progress text of a step.

        Peak memory is last, so that a narrow terminal truncates it first: of each rank if there are
        at most 8, else the smallest and the largest. The bubble is idle time over total time.
        """
        parts = [f"step {step:>{len(str(self._last))}}/{self._last}"]
        loss = scalars.get("loss")
        if loss is not None:
            parts.append(f"loss {loss:.4f}")
        tokens, samples, share, bubble = (self._smoothed[name].mean for name in _SMOOTHED)
        if tokens is not None:
            parts.append(f"{tokens:,.0f} tokens/s")
        elif samples is not None:
            parts.append(f"{samples:,.1f} samples/s")
        if share is not None:
            parts.append(f"{share:.1%} of peak")
        if bubble is not None:
            parts.append(f"bubble {bubble:.1%} of total")
        if self._times_s:
            parts.append(f"{_clock(median(self._times_s) * (self._last - step))} left")
        parts += _memory(scalars)
        return "  ".join(parts)

    def say(self, text: str) -> None:
        """Print a permanent line above the progress line."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last line on the terminal and stop updating it."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _memory(scalars: Scalars) -> Iterator[str]:
    most, least = scalars.get("peak_memory_bytes"), scalars.get("least_peak_memory_bytes")
    if not most:
        return
    each = [each for name, each in scalars.items() if name.startswith(_OF_RANK) and each]
    texts = list(map(bytes_text, each))
    if len(set(texts)) > 1:
        yield f"memory {', '.join(texts)} by rank"
        return
    if least is None or bytes_text(least) == bytes_text(most):
        yield f"memory {bytes_text(most)}"
    else:
        yield (
            f"memory {bytes_text(least)} to {bytes_text(most)} (rank "
            f"{scalars.get('peak_memory_rank')})"
        )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
