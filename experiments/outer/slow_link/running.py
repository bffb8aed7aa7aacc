"""One row: train on two hosts for some seconds, and note what came of it."""

import json
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from experiments.outer.slow_link.plot import Curve
from experiments.outer.slow_link.rows import COMMON, Row
from experiments.two_hosts import Counts, Ranks, TwoHosts, start_ranks

_LOOK_S: Final = 0.2
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
    lost_packets: int
    late_s: float

    @property
    def steps_per_s(self) -> float:
        """Return the mean."""
        return self.steps / self.seconds

    @property
    def step_bytes(self) -> float:
        """Return what passed over the link in a step, the way that more passed."""
        return max(self.there_bytes, self.back_bytes) / self.counted_steps


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
    try:
        first = _reached(ranks, run, 0.0, _START_S, num_steps=_NOT_COUNTED)
        before = pair.link.counts()
        last = _reached(ranks, run, seconds, seconds * 20 + _START_S)
        passed = pair.link.counts().since(before)
        ranks.signal(signal.SIGTERM)  # training ends at the edge of its step
        ranks.wait(_END_S)
    finally:
        ranks.end()
    return _found(row.name, run, last - first, passed)


def _reached(ranks: Ranks, run: Path, seconds: float, limit_s: float, num_steps: int = 1) -> int:
    """Wait until the steps have taken some seconds; return how many there are by then."""
    deadline_s = time.monotonic() + limit_s
    while True:
        lines = _steps_of(run)
        if len(lines) >= num_steps and sum(line["step_time_s"] for line in lines) >= seconds:
            return len(lines)
        if set(ranks.codes) != {None} or time.monotonic() > deadline_s:
            said = "\n".join(ranks.outputs)
            raise RowError(f"{len(lines)} steps after {limit_s:g} s or an end; ranks said:\n{said}")
        time.sleep(_LOOK_S)


def _lines_of(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    whole = path.read_text("utf-8").rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def _steps_of(run: Path) -> list[dict[str, float]]:
    return [line for line in _lines_of(run) if "step_time_s" in line]


def _found(name: str, run: Path, counted_steps: int, passed: Counts) -> Found:
    seconds, losses, validation = 0.0, [], []
    for line in _lines_of(run):
        if "step_time_s" in line:
            seconds += line["step_time_s"]
            losses.append((seconds, line["loss"]))
        elif "validation_loss" in line:
            validation.append((seconds, line["validation_loss"]))
    return Found(
        name=name,
        steps=len(losses),
        seconds=seconds,
        losses=losses,
        validation=validation,
        counted_steps=counted_steps,
        there_bytes=passed.there.passed_bytes,
        back_bytes=passed.back.passed_bytes,
        lost_packets=passed.there.lost_packets + passed.back.lost_packets,
        late_s=max(passed.there.late_s, passed.back.late_s),
    )
