"""Inject causes into runs of four ranks, and compare the first advice of the report with the truth.

    python -m experiments.causes [CAUSE ...]

The truth is the mean step of a run with the cause, minus the mean of two runs without it, one
before and one after, because other load changes. Runs stay in `out/`.
"""

import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Final, NamedTuple

from gpipe_hpc.report.accounting import Account, account_of
from gpipe_hpc.report.findings import Finding, findings_of
from gpipe_hpc.report.record import read_record

_LINK: Final = ("--rate", "1e9", "--ranks", "2")  # 125 MB per second, two ranks on each host
_OUT: Final = Path(__file__).parent / "out"


class Cause(NamedTuple):
    """A cause: settings that inject it, and the first advice that the report must give.

    `checkpoint_every` is in steps; without the cause only the last checkpoint is written. `delay_s`
    is the delay of a link between two hosts, if the runs use two.
    """

    settings: tuple[str, ...]
    said: str
    checkpoint_every: int = 0
    delay_s: float | None = None


CAUSES: Final = {
    "slow layer": Cause(("model.slow_layer=5", "model.more_s=0.1"), "Layer 5 (Sleeper) is slow"),
    "slow rank": Cause(("model.slow_rank=2", "model.factor=2.0"), "Rank 2 on "),
    "slow reader": Cause(("data.sleep_s=0.04",), "Reading data delays each step"),
    "stalled checkpoint": Cause(
        ("model.saving_s=2.5",), "Each checkpoint delays the run", checkpoint_every=4
    ),
    "slow link": Cause((), "Waiting for transfers takes", delay_s=0.1),
}


class RunReport(NamedTuple):
    """The report of a run: its breakdown of a step, and its findings."""

    account: Account
    findings: list[Finding]


def see(folder: Path) -> RunReport:
    """Return the report of a run."""
    record = read_record(folder)
    account = account_of(record)
    assert account is not None, "steps were done"
    return RunReport(account, findings_of(record, account))


def train(
    folder: Path, settings: tuple[str, ...], checkpoint_every: int, delay_s: float | None
) -> None:
    """Run a training with a cause."""
    words = [
        *("-m", "gpipe_hpc.train", "model=own", "data=own", f"run.dir={folder}"),
        "model._target_=experiments.causes.injected.build",
        "data._target_=experiments.causes.injected.SlowItems",
        "loss._target_=experiments.causes.injected.loss",
        *("train.batch_size=16", "train.steps=16", "train.validate_every=0"),
        *("train.validate_batches=1", "train.num_threads=1", "train.clip_norm=null"),
        *("pipeline.partition=uniform", "pipeline.microbatches=4"),
        *("train.device=cpu", f"checkpoint.every={checkpoint_every}", *settings),
    ]
    ahead = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    if delay_s is not None:
        # Ranks of both hosts would otherwise send through shared memory of their machine.
        words.append("comm.shared_memory=false")
        ahead = ["-m", "experiments.two_hosts", *_LINK, "--delay", str(delay_s), "--"]
    done = subprocess.run(
        [sys.executable, *ahead, *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])


def run(name: str) -> None:
    """Run a training without a cause, with it, and without it again."""
    cause, folder = CAUSES[name], _folder(name)
    shutil.rmtree(folder, ignore_errors=True)
    no_delay_s = None if cause.delay_s is None else 0.0
    train(folder / "before", (), 0, no_delay_s)
    train(folder / "with", cause.settings, cause.checkpoint_every, cause.delay_s)
    train(folder / "after", (), 0, no_delay_s)


def row(name: str) -> str:
    """Return the line of the table for a cause."""
    cause, folder = CAUSES[name], _folder(name)
    seen = see(folder / "with")
    usual_s = fmean(see(folder / each).account.step_s for each in ("before", "after"))
    truth_s = seen.account.step_s - usual_s
    first = seen.findings[0]
    mark = "" if first.what.startswith(cause.said) else " (another cause)"
    return (
        f"| {name} | {first.what}{mark} | {1e3 * first.gain_s:.0f} | {1e3 * truth_s:.0f} "
        f"| {first.gain_s / truth_s - 1:+.1%} |"
    )


def _folder(name: str) -> Path:
    return _OUT / name.replace(" ", "_")


def main() -> None:
    """Print a line of the table for each cause."""
    print("| injected | the report's first advice | predicted saving, ms | truth, ms | error |")
    print("|---|---|---|---|---|", flush=True)
    for name in sys.argv[1:] or list(CAUSES):
        run(name)
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
