"""The one line of progress that rank 0 shows."""

from collections import deque
from statistics import median
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gpipe_hpc.training.metrics import Scalars

_NUM_RECENT = 20  # steps whose median time foretells the rest


class Progress:
    """A line that stays in place on a terminal; elsewhere a line every `log_every` steps."""

    def __init__(
        self, first_step: int, last_step: int, log_every: int, console: Console | None = None
    ) -> None:
        self._first, self._last, self._log_every = first_step, last_step, log_every
        self._console = console or Console()
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)
        self._live: Live | None = None
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()

    def update(self, step: int, scalars: Scalars) -> None:
        """Show a finished step from its `loss`, `samples_per_s`, `bubble` and `step_time_s`."""
        step_time_s = scalars.get("step_time_s")
        if step_time_s is not None:
            self._recent.append(step_time_s)
        line = self.line(step, scalars)
        if self._live is not None:
            self._live.update(Text(line), refresh=True)
        elif (step - self._first) % self._log_every == 0 or step in (self._first + 1, self._last):
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)

    def line(self, step: int, scalars: Scalars) -> str:
        """Return the text of a step; the bubble is idle time over total."""
        parts = [f"step {step:>{len(str(self._last))}}/{self._last}"]
        for name, text in (
            ("loss", "loss {:.4f}"),
            ("samples_per_s", "{:.1f} samples/s"),
            ("bubble", "bubble {:.1%}"),
        ):
            value = scalars.get(name)
            if value is not None:
                parts.append(text.format(value))
        if self._recent:
            parts.append(f"{_clock(median(self._recent) * (self._last - step))} left")
        return "  ".join(parts)

    def say(self, text: str) -> None:
        """Print a line that stays, above the progress line."""
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def close(self) -> None:
        """Leave the last line on the terminal."""
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


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
