"""Simulated and measured step times of five schedules on two ranks.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc_per_node 2 experiments/simulator/step_times.py

Each round runs two steps of every setting. The first gives the mean cost of each op on each stage,
with which the simulator predicts the step; the second is compared with the prediction. A pair of
steps during which other processes took more than `--foreign` of the machine's time is repeated in
the next round.
"""

import argparse
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist

from gpipe_hpc import Pipeline
from gpipe_hpc.models import build_model, token_cross_entropy
from gpipe_hpc.schedule import Costs, Op, Timeline, build, simulate

SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zb_h1", "zb_v")
MICROBATCHES = (4, 8, 16)
FIELDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "input_gradient",
    Op.W: "weight_gradient",
    Op.R: "recompute",
}


def costs_of(timeline: Timeline) -> Costs:
    """Return the mean cost of each op on each stage, None for an op that never ran."""
    durations: dict[Op, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in timeline.events:
        for event in row:
            durations[event.action.op][event.action.stage].append(event.duration_s)
    return Costs(
        **{
            FIELDS[op]: [statistics.fmean(of_stage[s]) for s in range(timeline.num_stages)]
            for op, of_stage in durations.items()
        }
    )


def times_s() -> tuple[float, float, float]:
    """Return the current time, the busy time of all processors, and that of this process."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    user, nice, system, _, _, irq, softirq, stolen = fields
    busy = (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")
    return time.perf_counter(), busy, sum(os.times()[:2])


class Setting:
    """One schedule with a number of micro-batches, and the results of its rounds."""

    def __init__(self, name: str, microbatches: int, args: argparse.Namespace) -> None:
        layers = build_model(
            "gpt",
            vocab_size=512,
            block_size=args.seq_len,
            num_layers=8,
            num_heads=4,
            width=args.width,
        )
        self.name, self.microbatches = name, microbatches
        self.pipe = Pipeline(
            layers,
            token_cross_entropy,
            stages=2,
            microbatches=microbatches,
            schedule=name,
            recompute="never",
        )
        # A rank of a run has only its own row of the table.
        self.table = build(name, ranks=2, microbatches=microbatches)
        num_samples = microbatches * args.microbatch_size
        self.batch = torch.randint(0, 512, (2, num_samples, args.seq_len))
        self.foretold_s: list[float] = []
        self.measured_s: list[float] = []
        self.bubbles: list[tuple[float, float]] = []

    def step(self) -> float:
        """Run one step from a common start; return its duration on the slower rank."""
        dist.barrier()
        begin = time.perf_counter()
        self.pipe.step(*self.batch)
        duration = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
        dist.all_reduce(duration, op=dist.ReduceOp.MAX)
        return float(duration)

    def round(self, foreign: float) -> None:
        """Simulate a step from the previous one and run it; count it if it was not disturbed."""
        begin = times_s()
        self.step()
        timeline = simulate(self.table, costs_of(self.pipe.timeline()))
        measured_s = self.step()
        measured_bubble = self.pipe.timeline().bubble
        wall, busy, own = (end - start for start, end in zip(begin, times_s(), strict=True))
        # Rank 0 reads the busy time of the machine; both read their own.
        shares = torch.tensor([busy if dist.get_rank() == 0 else 0.0, own])
        dist.all_reduce(shares)
        if shares[0] - shares[1] < foreign * wall * (os.cpu_count() or 1):
            self.foretold_s.append(timeline.makespan)
            self.measured_s.append(measured_s)
            self.bubbles.append((timeline.bubble, measured_bubble))

    def line(self) -> str:
        """Return a row of the table: medians over rounds, and the range of single rounds."""
        if not self.measured_s:
            return f"| {self.name} | {self.microbatches} | 0 | | | | | | |"
        errors = [f / m - 1 for f, m in zip(self.foretold_s, self.measured_s, strict=True)]
        foretold, measured = map(statistics.median, (self.foretold_s, self.measured_s))
        bubbles = [statistics.median(each) for each in zip(*self.bubbles, strict=True)]
        return (
            f"| {self.name} | {self.microbatches} | {len(errors)} "
            f"| {1e3 * foretold:.0f} | {1e3 * measured:.0f} "
            f"| {foretold / measured - 1:+.1%} | {min(errors):+.1%} to {max(errors):+.1%} "
            f"| {bubbles[0]:.3f} | {bubbles[1]:.3f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9, help="undisturbed ones to wait for")
    parser.add_argument("--foreign", type=float, default=0.05, help="share of others' time")
    parser.add_argument("--limit-s", type=float, default=600.0, help="give up waiting for rounds")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--seq-len", type=int, default=64)
    parser.add_argument("--microbatch-size", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    settings = [Setting(name, m, args) for name in SCHEDULES for m in MICROBATCHES]
    for setting in settings:
        setting.step()  # the first step copies inputs to detect layers that write in place
    num_tried, begin = 0, time.monotonic()
    while waiting := [each for each in settings if len(each.measured_s) < args.rounds]:
        for setting in waiting:
            setting.round(args.foreign)
            num_tried += 1
        is_late = torch.tensor(float(time.monotonic() - begin > args.limit_s))
        dist.all_reduce(is_late, op=dist.ReduceOp.MAX)
        if is_late:
            break
    if dist.get_rank() == 0:
        print("| schedule | M | rounds | simulated, ms | measured, ms | error ", end="")
        print("| of single rounds | simulated bubble | measured bubble |\n" + 9 * "|---" + "|")
        for setting in settings:
            print(setting.line())
        num_counted = sum(len(setting.measured_s) for setting in settings)
        print(f"\n{num_counted} of {num_tried} pairs of steps were undisturbed")


if __name__ == "__main__":
    main()
