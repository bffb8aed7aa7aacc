"""Compare the step times of two revisions of this repository, interleaved in one run.

    python -m benchmarks.before_after REVISION [--workloads A,C,T] [--pairs 30]

Each revision gets its own processes, one per rank, which stay alive and take turns: while one
revision runs a few steps, the other waits. A pair is one turn of each; the order alternates. It
prints the geometric mean of the ratios after / before with a 95 % interval (Student's t on their
logarithms), the calls of our own Python functions in one step, and the growth of resident memory.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
RANKS: Final = 2
TURN_S: Final = 0.4
# Two-sided 95 % points of Student's t; beyond 30 degrees of freedom the normal one is close.
T_95: Final = {4: 2.776, 9: 2.262, 14: 2.145, 19: 2.093, 29: 2.045}


class Revision:
    """The processes of one revision, one per rank, which run steps on request."""

    def __init__(self, tree: Path, workload: str, variant: str, recompute: str, port: int) -> None:
        self.ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--worker", workload, variant, recompute],
                cwd=tree,
                env=os.environ
                | {
                    "PYTHONPATH": str(tree),
                    "OMP_NUM_THREADS": "1",
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(RANKS),
                    "LOCAL_WORLD_SIZE": str(RANKS),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]

    def ask(self, **request: Any) -> list[dict[str, float]]:
        """Send a request to all ranks; return their answers in order of ranks."""
        for process in self.ranks:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        return [self._answer(process) for process in self.ranks]

    def close(self) -> None:
        """End the processes by closing their standard input."""
        for process in self.ranks:
            process.communicate()

    def _answer(self, process: "subprocess.Popen[str]") -> dict[str, float]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                answer: dict[str, float] = json.loads(line)
                return answer
        raise SystemExit(f"a process ended without an answer (exit code {process.wait()})")


def work(workload_name: str, variant: str, recompute: str) -> None:
    """Serve requests from standard input as one rank."""
    import torch

    from benchmarks.cells import Cell
    from benchmarks.contestants.ours import Ours
    from benchmarks.workloads import make_workload

    torch.set_num_threads(1)
    cell = Cell("ours", workload_name, variant, 8, recompute)
    entrant = Ours(make_workload(workload_name), cell)
    for line in sys.stdin:
        request = json.loads(line)
        began_s = time.perf_counter()
        calls = 0
        if request.get("counts"):
            calls = calls_of_a_step(entrant.step)
        else:
            for _ in range(request["steps"]):
                entrant.step()
        took_s = time.perf_counter() - began_s
        answer = {"took_s": took_s, "calls": calls, "rss_bytes": resident_bytes()}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # skip the shutdown, which may warn about a peer that has ended


def calls_of_a_step(step: Any) -> int:
    """Return the number of calls of gpipe_hpc functions in one step on this thread."""
    count = 0

    def profile(frame: Any, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call" and "/gpipe_hpc/" in frame.f_code.co_filename

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def compare(trees: tuple[Path, Path], name: str, variant: str, recompute: str, pairs: int) -> str:
    """Return one line of the table: one workload on both revisions."""
    before, after = (
        Revision(tree, name, variant, recompute, 29610 + position)
        for position, tree in enumerate(trees)
    )
    for each in (before, after):
        each.ask(steps=4)
    once_s = max(each.ask(steps=5)[0]["took_s"] / 5 for each in (before, after))
    steps = max(1, round(TURN_S / once_s))
    ratios = []
    for position in range(pairs):
        order = (before, after) if position % 2 == 0 else (after, before)
        took = {id(each): each.ask(steps=steps)[0]["took_s"] for each in order}
        ratios.append(took[id(after)] / took[id(before)])
    calls = [each.ask(counts=True) for each in (before, after)]
    memory = [max(rank["rss_bytes"] for rank in answer) / 1e6 for answer in calls]
    before.close()
    after.close()
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.mean(logs)
    half = T_95.get(pairs - 1, 1.96) * statistics.stdev(logs) / math.sqrt(pairs)
    low, middle, high = (math.exp(mean + offset) for offset in (-half, 0.0, half))
    shown = " -> ".join("/".join(str(int(rank["calls"])) for rank in answer) for answer in calls)
    return (
        f"{name:4} {variant:12} {recompute:12} {once_s * 1e3:8.2f} ms  "
        f"{middle:.4f} [{low:.4f}, {high:.4f}]  calls {shown}  "
        f"memory {memory[0]:.1f} -> {memory[1]:.1f} MB"
    )


@contextmanager
def tree_of(revision: str) -> Iterator[Path]:
    """Check a revision out into a temporary worktree."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "before"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main() -> None:
    """Compare the working tree with a revision."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("revision", help="the revision before")
    parser.add_argument("--workloads", default="A,C,T", help="names of benchmarks/workloads.py")
    parser.add_argument("--schedule", default="one_f_one_b")
    parser.add_argument("--recompute", default="except_last")
    parser.add_argument("--pairs", type=int, default=30)
    args = parser.parse_args()
    with tree_of(args.revision) as before:
        for name in args.workloads.split(","):
            line = compare((before, ROOT), name, args.schedule, args.recompute, args.pairs)
            print(line, flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:5])
    else:
        main()
