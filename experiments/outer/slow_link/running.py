"""One row: train on two hosts for some seconds, and note what came of it."""

import json
import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from experiments.outer.slow_link.plot import Curve
from experiments.outer.slow_link.rows import COMMON, Row
from experiments.two_hosts import Counts, Ranks, TwoHosts, start_ranks

_LOOK_S: Final = 0.01  # so that counts are taken close to the edges of steps
_START_S: Final = 240.0  # until the first step, on a busy machine
_END_S: Final = 120.0
_NOT_COUNTED: Final = 2  # steps at the start: they pay for what is done once


class Found(NamedTuple):
    """What a row gave.

    Seconds are those within steps: validations are not in them. Curves are (seconds, loss).
    """

    name: str
    steps: int
    seconds: float
    losses: Curve  # of training
    validation: Curve
    counted_steps: int
    there_bytes: int  # over the link in the steps counted, from the first host to the second
    back_bytes: int
    lost_packets: int  # of the whole run
    late_s: float

    @property
    def steps_per_s(self) -> float:
        """Return the mean."""
        return self.steps / self.seconds

    @property
    def step_bytes(self) -> float:
        """Return what passed over the link in a step, the way that more passed; NaN unknown."""
        return max(self.there_bytes, self.back_bytes) / (self.counted_steps or math.nan)


class RowError(Exception):
    """A row did not run; the text is what its ranks said."""


def run_row(
    pair: TwoHosts,
    row: Row,
    seconds: float,
    folder: Path,
    port: int,
    overrides: Sequence[str] = (),
) -> Found:
    """Train as a row says until its steps have taken some seconds."""
    run = folder / row.name
    words = ["-m", "gpipe_hpc.train", *COMMON, *row.overrides, *overrides]
    words += [f"train.validate_every={row.validate_every}", f"run.dir={run}"]
    ranks = start_ranks(pair, row.places, words, folder=folder, logs=run / "said", port=port)
    watched = _Watched(row, pair, ranks, run / "metrics.jsonl")
    try:
        watched.until(0.0, _START_S)
        watched.until(seconds, 20 * seconds + _START_S)
        ranks.signal(signal.SIGTERM)  # training ends at the edge of its step
        ranks.wait(_END_S)
    finally:
        ranks.end()
    return watched.found()


class _Watched:
    """A run under way, seen through its metrics and the link's counts.

    What passes in a validation is not counted: those of a pipeline send activations, too.
    """

    def __init__(self, row: Row, pair: TwoHosts, ranks: Ranks, metrics: Path) -> None:
        self._row, self._pair, self._ranks, self._metrics = row, pair, ranks, metrics
        self._num_read = 0  # bytes of the metrics
        self._seconds = 0.0
        self._losses: Curve = []
        self._validation: Curve = []
        self._since: tuple[int, Counts] | None = None  # steps and counts where counting began
        self._counted, self._there, self._back = 0, 0, 0

    def until(self, seconds: float, limit_s: float) -> None:
        """Return once the steps have taken some seconds; raises RowError."""
        deadline_s = time.monotonic() + limit_s
        while not self._losses or self._seconds < seconds:
            if None not in self._ranks.codes or time.monotonic() > deadline_s:
                said = "\n".join(self._ranks.outputs)
                raise RowError(f"{len(self._losses)} steps, and an end; ranks said:\n{said}")
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

    def found(self) -> Found:
        """Return what there was, when all ranks have ended."""
        counts = self._pair.link.counts()
        return Found(
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
