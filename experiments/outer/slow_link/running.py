"""Train one row on two hosts for some seconds, and collect the results."""

import json
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from experiments.outer.slow_link.rows import COMMON, Row
from experiments.two_hosts import Counts, Ranks, TwoHosts, start_ranks

Curve = list[tuple[float, float]]  # seconds of training, loss

_LOOK_S: Final = 0.01  # polling interval: counts are read close to the ends of steps
_START_S: Final = 240.0  # until the first step, on a busy machine
_END_S: Final = 120.0
_NOT_COUNTED: Final = 2  # first steps, which contain set-up work


class RowResult(NamedTuple):
    """Results of a row; seconds are those within steps, without validations."""

    name: str
    steps: int
    seconds: float
    losses: Curve  # of training
    validation: Curve
    counted_steps: int
    there_bytes: int  # over the link in the counted steps, from the first host to the second
    back_bytes: int
    lost_packets: int  # of the whole run
    late_s: float

    @property
    def steps_per_s(self) -> float:
        """Return the mean rate of steps."""
        return self.steps / self.seconds

    @property
    def step_bytes(self) -> float:
        """Return the bytes of a step over the link, in the direction with more; NaN if unknown."""
        return max(self.there_bytes, self.back_bytes) / (self.counted_steps or math.nan)


class RowError(Exception):
    """A row did not run; the message is the output of its ranks."""


def run_row(
    pair: TwoHosts,
    row: Row,
    seconds: float,
    folder: Path,
    port: int,
    overrides: Sequence[str] = (),
) -> RowResult:
    """Train with the settings of a row until its steps have taken `seconds`."""
    run = folder / row.name
    words = ["-m", "gpipe_hpc.train", *COMMON, *row.overrides, *overrides]
    words += [f"train.validate_every={row.validate_every}", f"run.dir={run}"]
    ranks = start_ranks(pair, row.places, words, folder=folder, logs=run / "said", port=port)
    watched = _Watched(row, pair, ranks, run / "metrics.jsonl")
    try:
        watched.until(0.0, _START_S)
        watched.until(seconds, 20 * seconds + _START_S)
        ranks.signal(signal.SIGTERM)  # training ends after its current step
        ranks.wait(_END_S)
    finally:
        ranks.end()
    return watched.found()


class _Watched:
    """Observer of a run through its metrics file and the link's counters.

    Traffic of validations is not counted, because pipelines send activations then too.
    """

    def __init__(self, row: Row, pair: TwoHosts, ranks: Ranks, metrics: Path) -> None:
        self._row, self._pair, self._ranks, self._metrics = row, pair, ranks, metrics
        self._num_read = 0  # bytes of the metrics file
        self._seconds = 0.0
        self._losses: Curve = []
        self._validation: Curve = []
        self._since: tuple[int, Counts] | None = None  # steps and counters at the start of counting
        self._counted, self._there, self._back = 0, 0, 0

    def until(self, seconds: float, limit_s: float) -> None:
        """Wait until the steps have taken `seconds`. Raises RowError."""
        deadline_s = time.monotonic() + limit_s
        while not self._losses or self._seconds < seconds:
            if None not in self._ranks.codes or time.monotonic() > deadline_s:
                said = "\n".join(self._ranks.outputs)
                raise RowError(
                    f"ended after {len(self._losses)} steps; output of the ranks:\n{said}"
                )
            time.sleep(_LOOK_S)
            for line in self._new_lines():
                self._take(line)

    def _new_lines(self) -> list[dict[str, float]]:
        if not self._metrics.exists():
            return []
        with self._metrics.open("rb") as file:
            file.seek(self._num_read)
            whole, end, _ = file.read().rpartition(b"\n")
        self._num_read += len(whole) + len(end)
        return [json.loads(line) for line in whole.splitlines()]

    def _take(self, line: dict[str, float]) -> None:
        if "step_time_s" in line:
            self._seconds += line["step_time_s"]
            self._losses.append((self._seconds, line["loss"]))
            if line["step"] == _NOT_COUNTED:
                self._begin()
            if line["step"] % self._row.validate_every == 0:
                self._end()
        elif "validation_loss" in line:
            self._validation.append((self._seconds, line["validation_loss"]))
            self._begin()

    def _begin(self) -> None:
        self._since = len(self._losses), self._pair.link.counts()

    def _end(self) -> None:
        if self._since is not None:
            steps, before = self._since
            passed = self._pair.link.counts().since(before)
            self._counted += len(self._losses) - steps
            self._there += passed.there.passed_bytes
            self._back += passed.back.passed_bytes
            self._since = None

    def found(self) -> RowResult:
        """Return the results after all ranks have ended."""
        counts = self._pair.link.counts()
        return RowResult(
            name=self._row.name,
            steps=len(self._losses),
            seconds=self._seconds,
            losses=self._losses,
            validation=self._validation,
            counted_steps=self._counted,
            there_bytes=self._there,
            back_bytes=self._back,
            lost_packets=counts.there.lost_packets + counts.back.lost_packets,
            late_s=max(counts.there.late_s, counts.back.late_s),
        )
