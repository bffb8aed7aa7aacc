"""Plan a layout and run it: predicted and measured step time and memory."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from experiments.plan.layouts import Planned
from gpipe_hpc.config import compose_config
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.plan import make_plan

# First steps, which open connections and allocate buffers. Until the C library keeps enough freed
# memory, steps of layouts with much memory take a tenth longer.
_SKIPPED: Final = 12
_LIMIT_S: Final = 180
# Steps of a run of which only the memory is measured; the optimizer's state exists from step 2.
_FEW_STEPS: Final = 3
_ROOT: Final = Path(__file__).parents[2]
_COMMON: Final = (
    "train.device=cpu",
    "train.num_threads=1",
    "train.validate_every=0",
    "train.validate_batches=1",
    "checkpoint.every=0",
    "preflight.before_run=false",
)


@dataclass(frozen=True)
class Result:
    """Planned and measured step times in seconds, and bytes of the fullest rank, of one layout.

    Args:
        plans_s: step time of each plan
        runs_s: median step time of each run
        process_bytes: part of `predicted_bytes` that is not tensors
        measured_bytes: with train.keep_freed_memory=false
        kept_bytes: measured with the default, which keeps freed memory
        crowded: whether there are more ranks than cores
        failed: reason if there are no results
        calibrated_s: planned with the calibration of another layout of the same model and number
            of ranks; None for that layout itself
        replays_s: planned with the calibration of each run itself
    """

    name: str
    plans_s: tuple[float, ...] = ()
    runs_s: tuple[float, ...] = ()
    predicted_bytes: int = 0
    process_bytes: int = 0
    measured_bytes: int = 0
    kept_bytes: int = 0
    crowded: bool = False
    parts: str = ""
    failed: str = ""
    calibrated_s: float | None = None
    replays_s: tuple[float, ...] = ()

    @property
    def predicted_s(self) -> float:
        """Return the median predicted step time over its plans."""
        return median(self.plans_s)

    @property
    def measured_s(self) -> float:
        """Return the median step time over its runs."""
        return median(self.runs_s)

    @property
    def error(self) -> float:
        """Return the prediction error relative to the measurement."""
        return self.predicted_s / self.measured_s - 1

    @property
    def calibrated_error(self) -> float | None:
        """Return the relative error of the prediction calibrated by another run."""
        return None if self.calibrated_s is None else self.calibrated_s / self.measured_s - 1

    @property
    def replayed_s(self) -> float:
        """Return the median over runs of the step time planned with the run's own calibration."""
        return median(self.replays_s)

    @property
    def replayed_error(self) -> float:
        """Return the median over runs of the relative error of that plan."""
        pairs = zip(self.replays_s, self.runs_s, strict=True)
        return median(replay / run - 1 for replay, run in pairs)

    @property
    def memory_error(self) -> float:
        """Return the relative error of the memory prediction."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def tensors_error(self) -> float:
        """Return the relative error of the memory prediction without process overhead."""
        counted = self.predicted_bytes - self.process_bytes
        return counted / (self.measured_bytes - self.process_bytes) - 1

    @property
    def kept_more(self) -> float:
        """Return the additional memory of the fullest rank if freed memory is kept, as a share."""
        return self.kept_bytes / self.measured_bytes - 1


class FailedRunError(Exception):
    """A run has no results; the message is one line."""


class Bench(NamedTuple):
    """Number of steps and output folder of the runs."""

    steps: int
    out: Path


def prices(bench: Bench, ranks: int) -> Path:
    """Measure the overhead of a step beyond its layers on a number of ranks; return the file."""
    folder = bench.out / f"overheads_{ranks}"
    folder.mkdir(parents=True, exist_ok=True)
    words = ("preflight.steps=true", f"preflight.out={folder / 'links.yaml'}")
    model = ("model=mlp", "data=synthetic_vectors", f"pipeline.stages={ranks}")
    _launch(ranks, "gpipe_hpc.preflight", [*model, *words, "train.device=cpu"])
    return folder / "prices.yaml"


class _Ran(NamedTuple):
    """Median step time, and bytes of the fullest rank's process.

    `replayed_s` is the step time planned with the calibration of the run, or 0.
    """

    step_s: float
    most_bytes: int
    replayed_s: float


def try_layout(bench: Bench, layout: Planned, prices_file: Path, num_runs: int) -> Result:
    """Plan a layout before and after each run; the runs use the partition of the first plan.

    The first layout of a model and number of ranks stores its calibration in `bench.out`, which the
    others with equal micro-batches use. A failure is returned as `Result.failed`.
    """
    calibration = bench.out / f"{layout.model}_{layout.ranks}r_x{layout.replicas}.yaml"
    words = [*_COMMON, *layout.words]
    by = ["plan.costs=measured", f"plan.prices={prices_file}"]
    try:
        plan = make_plan(compose_config([*words, *by]))
        counts = ",".join(map(str, plan.layout.partition.counts))
        words.append(f"pipeline.partition=[{counts}]")
        calibrated_s = _planned_by(calibration, words) if calibration.exists() else None
        plans, runs = [plan], []
        for _ in range(num_runs):
            runs.append(_run(bench, layout, words, calibration))
            plans.append(make_plan(compose_config([*words, *by])))
        frugal = [*words, "train.keep_freed_memory=false"]
        few = bench._replace(steps=_FEW_STEPS)
        least_bytes = _run(few, layout, frugal, None).most_bytes
    except (GpipeError, FailedRunError) as error:
        return Result(layout.name, failed=str(error).splitlines()[0])
    expected = [each.step for each in plans if each.step is not None]
    assert len(expected) == len(plans), "plan.costs=measured gives seconds"
    step = expected[0]
    return Result(
        layout.name,
        tuple(each.total_s for each in expected),
        tuple(each.step_s for each in runs),
        max(rank.total_bytes for rank in plan.forecast.ranks),
        plan.forecast.ranks[0].process_bytes,
        least_bytes,
        max(each.most_bytes for each in runs),
        crowded=step.crowd is not None,
        parts=step.text().splitlines()[0].partition("(")[2].rstrip(")"),
        calibrated_s=calibrated_s,
        replays_s=tuple(each.replayed_s for each in runs),
    )


def _planned_by(calibration: Path, words: list[str]) -> float:
    step = make_plan(compose_config([*words, f"plan.calibration={calibration}"])).step
    assert step is not None, "a calibration gives seconds"
    return step.total_s


def _run(bench: Bench, layout: Planned, words: list[str], calibration: Path | None) -> _Ran:
    """Train a layout; store the run's calibration in `calibration` if that file does not exist.

    If `calibration` is None, only the memory is measured.
    """
    folder = bench.out / layout.name
    num_skipped = 0 if calibration is None else _SKIPPED
    shutil.rmtree(folder, ignore_errors=True)
    asked = [*words, f"train.steps={bench.steps + num_skipped}", f"run.dir={folder}"]
    _launch(layout.ranks, "gpipe_hpc.train", asked)
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    times = [line["step_time_s"] for line in map(json.loads, lines) if "step_time_s" in line]
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    taken = [rank["peak_memory_bytes"] for rank in summary["ranks"]]
    replayed_s = 0.0
    if calibration is not None:
        replayed_s = _planned_by(folder / "calibration.yaml", words)
        if not calibration.exists():
            shutil.copy(folder / "calibration.yaml", calibration)
    shutil.rmtree(folder, ignore_errors=True)
    if len(times) <= num_skipped:
        raise FailedRunError(f"expected {bench.steps + num_skipped} steps, got {len(times)}")
    return _Ran(median(times[num_skipped:]), max(taken), replayed_s)


def _launch(ranks: int, module: str, words: list[str]) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [sys.executable, *launcher, "-m", module, *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        raise FailedRunError(f"{module} did not end within {_LIMIT_S} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "Error" in line or "error" in line]
        raise FailedRunError(said[0] if said else f"{module} ended with {done.returncode}")
