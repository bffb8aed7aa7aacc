"""Inject causes into runs of four ranks, and compare the report's first advice with the truth.

    python -m experiments.causes [CAUSE ...]

The truth is what a mean step takes with the cause, less what it takes without.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final, NamedTuple

from gpipe_hpc.report.accounting import Account, account_of
from gpipe_hpc.report.findings import Finding, findings_of
from gpipe_hpc.report.record import read_record

_LINK: Final = ["--rate", "1e9", "--ranks", "2"]  # 125 MB a second, two ranks on each host


class Cause(NamedTuple):
    """A cause: settings that inject it, and what the report's first advice must say.

    `beside`: settings of the run without it, too. `delay_s`: of a link between two hosts, where the
    runs are on two.
    """

    settings: tuple[str, ...]
    said: str
    beside: tuple[str, ...] = ("checkpoint.every=0",)
    delay_s: float | None = None


CAUSES: Final = {
    "slow layer": Cause(("model.slow_layer=5", "model.more_s=0.02"), "Layer 5 (Sleeper) is slow"),
    "slow rank": Cause(("model.slow_rank=2", "model.factor=2.0"), "Rank 2 on "),
    "slow reader": Cause(("data.sleep_s=0.01",), "Reading data holds each step up"),
    "stalled checkpoint": Cause(
        ("model.saving_s=1.5",), "Each checkpoint holds the run up", ("checkpoint.every=6",)
    ),
    "slow link": Cause((), "Waiting for transfers takes", delay_s=0.03),
}


class Seen(NamedTuple):
    """What the report of a run says: its account of a step, and its findings."""

    account: Account
    findings: list[Finding]


def train(folder: Path, settings: tuple[str, ...], delay_s: float | None, ranks: int = 4) -> Seen:
    """Train with a cause; return what the report then says."""
    words = [
        *("-m", "gpipe_hpc.train", "model=own", "data=own", f"run.dir={folder}"),
        "model._target_=experiments.causes.injected.build",
        "data._target_=experiments.causes.injected.SlowItems",
        "loss._target_=experiments.causes.injected.loss",
        *("train.batch_size=16", "train.steps=25", "train.validate_every=0"),
        *("train.validate_batches=1", "train.num_threads=1", "train.clip_norm=null"),
        *("pipeline.partition=uniform", "pipeline.microbatches=4"),
        *("train.device=cpu", *settings),
    ]
    ahead = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    if delay_s is not None:
        ahead = ["-m", "experiments.two_hosts", *_LINK, "--delay", str(delay_s), "--"]
    done = subprocess.run(
        [sys.executable, *ahead, *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    record = read_record(folder)
    account = account_of(record)
    assert account is not None, "steps were done"
    return Seen(account, findings_of(record, account))


def main() -> None:
    """Print a line of the table for each cause."""
    wanted = sys.argv[1:] or list(CAUSES)
    print("| injected | the report's first advice | gain told, ms | truth, ms | error |")
    print("|---|---|---|---|---|")
    usual: dict[tuple[object, ...], Seen] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name in wanted:
            cause = CAUSES[name]
            is_far = cause.delay_s is not None
            how = (is_far, cause.beside)
            if how not in usual:
                near = Path(scratch) / f"usual{len(usual)}"
                usual[how] = train(near, cause.beside, 0.0 if is_far else None)
            folder = Path(scratch) / name.replace(" ", "_")
            seen = train(folder, (*cause.beside, *cause.settings), cause.delay_s)
            first = seen.findings[0]
            truth_s = seen.account.step_s - usual[how].account.step_s
            error = first.gain_s / truth_s - 1
            mark = "" if first.what.startswith(cause.said) else " (another cause)"
            print(
                f"| {name} | {first.what}{mark} | {1e3 * first.gain_s:.0f} | {1e3 * truth_s:.0f} "
                f"| {error:+.1%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
