"""Plan a layout and run it: predicted and measured step time and memory."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import torch

from experiments.plan.layouts import Planned
from gpipe_hpc.config import compose_config
from gpipe_hpc.errors import GpipeError
from gpipe_hpc.plan import Plan, make_plan

# Steps at the start: they open connections and make buffers, and until the C library keeps enough
# of what is freed, those that keep the most take a tenth longer.
_SKIPPED: Final = 12
_SKIPPED_ON_ACCELERATOR: Final = 4
_LIMIT_S: Final = 180
# Of a run whose memory alone counts: its first step has all but the optimizer's state.
_FEW_STEPS: Final = 3
_ROOT: Final = Path(__file__).parents[2]
_COMMON: Final = (
    "train.validate_every=0",
    "train.validate_batches=1",
    "checkpoint.every=0",
    "preflight.before_run=false",
)


@dataclass(frozen=True)
class Result:
    """A layout as planned and as run: seconds of a step, bytes of the fullest rank's process.

    `process_bytes`: of the planned ones, what a process takes beside tensors. `kept_bytes`: as
    measured where freed memory is kept, which is the default; `measured_bytes` where it goes back
    to the system. `plans_s`: each time it was planned. `calibrated_s`: planned by what a run of
    another layout of the model on as many ranks has measured; None for that layout itself.
    `runs_s`: the median step of each run. `replays_s`: of each run, planned by what that very run
    has measured of its layers and all else. `crowded`: ranks outnumber cores. `failed`: why there
    are no figures.

    Of an accelerator the bytes are those of tensors, `process_bytes` is 0, and what torch keeps of
    freed memory does not count.
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
        """Return the median over its runs of what each is planned at by its own figures."""
        return median(self.replays_s)

    @property
    def replayed_error(self) -> float:
        """Return the median over its runs of how far that is off, to which costs add little."""
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


def save(path: Path, device: str, results: Sequence[Result], **beside: object) -> None:
    """Write results, the device, and further entries as JSON."""
    told = {"device": device, "results": [asdict(each) for each in results], **beside}
    path.write_text(json.dumps(told, indent=1) + "\n", "utf-8")


def load(path: Path) -> tuple[str, list[Result]]:
    """Return the device and the results written by `save`."""
    told = json.loads(path.read_text("utf-8"))
    rows: list[dict[str, Any]] = told["results"]
    results = [Result(**{name: _tupled(value) for name, value in row.items()}) for row in rows]
    return str(told["device"]), results


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class FailedRunError(Exception):
    """A run without results; the message is one line."""


class Bench(NamedTuple):
    """Device, number of steps, and output folder of the runs."""

    device: str
    steps: int
    out: Path

    @property
    def is_accelerator(self) -> bool:
        """Return whether ranks compute on an accelerator instead of CPU cores."""
        return self.device != "cpu"

    @property
    def common(self) -> list[str]:
        """Return the settings of all layouts."""
        threads = [] if self.is_accelerator else ["train.num_threads=1"]
        return [f"train.device={self.device}", *threads, *_COMMON]

    @property
    def num_skipped(self) -> int:
        """Return the number of initial steps that are not counted."""
        return _SKIPPED_ON_ACCELERATOR if self.is_accelerator else _SKIPPED

    def plan(self, words: Sequence[str]) -> Plan:
        """Plan with the given settings; the device is free for a run afterwards."""
        plan = make_plan(compose_config(list(words)))
        if self.is_accelerator:
            torch.accelerator.empty_cache()
        return plan


def prices(bench: Bench, ranks: int, precision: str) -> Path:
    """Measure the overhead of a step beyond its layers on a number of ranks; return the file."""
    folder = bench.out / f"overheads_{ranks}_{precision}"
    folder.mkdir(parents=True, exist_ok=True)
    words = ("preflight.steps=true", f"preflight.out={folder / 'links.yaml'}")
    model = ("model=mlp", "data=synthetic_vectors", f"pipeline.stages={ranks}")
    kind = (f"train.device={bench.device}", f"train.precision={precision}")
    _launch(ranks, "gpipe_hpc.preflight", [*model, *words, *kind])
    return folder / "prices.yaml"


class _Ran(NamedTuple):
    """The median seconds of a step, and the most bytes of a rank's process.

    `replayed_s`: seconds as planned by what the run measured; 0 where that was not asked for.
    """

    step_s: float
    most_bytes: int
    replayed_s: float


def try_layout(bench: Bench, layout: Planned, prices_file: Path, num_runs: int) -> Result:
    """Plan it and run it, so often, with the first plan's cut; what fails is told in the result.

    It is planned before and after each run: a machine that others use is not as fast all the time.
    The first layout of a model on so many ranks leaves its calibration in `bench.out` for the
    others with as large micro-batches.
    """
    name = f"{layout.model}_{layout.ranks}r_x{layout.replicas}_{layout.precision}.yaml"
    calibration = bench.out / name
    words = [*bench.common, *layout.words, *layout.beside]
    by = ["plan.costs=measured", f"plan.prices={prices_file}"]
    try:
        plan = bench.plan([*words, *by])
        counts = ",".join(map(str, plan.layout.partition.counts))
        words.append(f"pipeline.partition=[{counts}]")
        calibrated_s = _planned_by(calibration, words) if calibration.exists() else None
        plans, runs = [plan], []
        for _ in range(num_runs):
            runs.append(_run(bench, layout, words, calibration))
            plans.append(bench.plan([*words, *by]))
        kept_bytes = least_bytes = max(each.most_bytes for each in runs)
        if not bench.is_accelerator:
            frugal = [*words, "train.keep_freed_memory=false"]
            few = bench._replace(steps=_FEW_STEPS)
            least_bytes = _run(few, layout, frugal, None).most_bytes
    except (GpipeError, FailedRunError) as error:
        return Result(layout.name, failed=str(error).splitlines()[0])
    expected = [each.step for each in plans if each.step is not None]
    assert len(expected) == len(plans), "plan.costs=measured gives seconds"
    step = expected[0]
    beside_bytes = plan.forecast.ranks[0].process_bytes
    most_bytes = max(rank.total_bytes for rank in plan.forecast.ranks)
    return Result(
        layout.name,
        tuple(each.total_s for each in expected),
        tuple(each.step_s for each in runs),
        most_bytes - beside_bytes * bench.is_accelerator,
        beside_bytes * (not bench.is_accelerator),
        least_bytes,
        kept_bytes,
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
    """Run it. `calibration`: where what it measured is kept, unless something is there.

    Without that its memory alone counts.
    """
    folder = bench.out / layout.name
    num_skipped = 0 if calibration is None else bench.num_skipped
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
