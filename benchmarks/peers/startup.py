"""Seconds from the launch by torchrun to the end of the first step, for gpipe_hpc and torch."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figures import quartiles
from benchmarks.probes import is_disturbed, machine_busy_s

HERE = Path(__file__).resolve().parent
_PATIENCE_S = 120.0


def launch(script: str, folder: Path) -> tuple[float, bool]:
    """Return the seconds of a launch, and whether other processes disturbed it."""
    mark = folder / f"{script}-{time.monotonic_ns()}"
    marks = [Path(f"{mark}.{rank}") for rank in range(2)]
    begin_s, busy_s, own_s = time.monotonic(), machine_busy_s(), _children_s()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    process = subprocess.Popen(
        [*torchrun, "--nproc_per_node", "2", str(HERE / f"{script}.py"), str(mark)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while not all(each.exists() for each in marks):
        if process.poll() not in (None, 0) or time.monotonic() - begin_s > _PATIENCE_S:
            process.kill()
            process.wait()
            raise RuntimeError(f"{script} did not come to the end of its first step")
        time.sleep(0.005)
    took_s = time.monotonic() - begin_s
    process.wait(_PATIENCE_S)
    wall_s = time.monotonic() - begin_s
    foreign_s = machine_busy_s() - busy_s - (_children_s() - own_s)
    return took_s, is_disturbed(wall_s, foreign_s)


def _children_s() -> float:
    """Return the processor time of this process and all children that have ended."""
    return sum(os.times()[:4])


def measure(num_launches: int = 5) -> dict[str, dict[str, object]]:
    """Launch both in turn; return for each the median, quartiles and number of valid launches."""
    taken: dict[str, list[tuple[float, bool]]] = {"first_step_ours": [], "first_step_torch": []}
    with tempfile.TemporaryDirectory(prefix="first_step_") as folder:
        for script in taken:
            launch(script, Path(folder))  # warms the file cache
        for _ in range(num_launches):
            for script, times in taken.items():
                times.append(launch(script, Path(folder)))
    figures: dict[str, dict[str, object]] = {}
    for script, times in taken.items():
        clean = [seconds for seconds, disturbed in times if not disturbed]
        counted = clean or [seconds for seconds, _ in times]
        figures[script.removeprefix("first_step_")] = {
            "median_s": statistics.median(counted),
            "quartiles_s": quartiles(sorted(counted)),
            "num_clean": len(clean),
            "num_launches": len(times),
        }
    return figures


if __name__ == "__main__":
    for name, each in measure().items():
        print(name, each)
