"""A table that no memory can hold is refused in one line, by each command that would build it."""

import re
import sys

import pytest

from gpipe_hpc import plan
from gpipe_hpc.bench import __main__ as bench
from gpipe_hpc.draw import __main__ as draw
from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule import num_stages
from gpipe_hpc.trainer.command import run_command
from gpipe_hpc.trainer.signals import StopRequest
from gpipe_hpc.verify import __main__ as verify

COMMANDS = {
    "train": lambda: run_command(StopRequest()),
    "plan": plan.main,
    "draw": draw.main,
    "bench": bench.main,
    "verify": verify.main,
}
SMALL = ("model=mlp", "model.widths=[6,8,3]", "data=synthetic_vectors", "data.width=6")
SIZES = ("data.num_classes=3", "train.batch_size=8", "pipeline.partition=uniform")
LARGE = {
    "micro-batches": ("pipeline.microbatches=9223372036854775807",),
    "passes": ("pipeline.microbatches=3000000", "train.accumulation=3000000"),
}


@pytest.mark.parametrize("large", LARGE)
@pytest.mark.parametrize("command", COMMANDS)
def test_too_many_micro_batches_are_refused(command, large, monkeypatch, capsys, tmp_path):
    """It ended in a traceback of a MemoryError."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"gpipe_hpc.{command}", *SMALL, *SIZES, *LARGE[large]])
    with pytest.raises(SystemExit) as ended:
        COMMANDS[command]()
    said = capsys.readouterr().err
    assert ended.value.code == 2, said
    assert len(re.findall(r"^gpipe_hpc: ", said, re.MULTILINE)) == 1 and "Traceback" not in said
    assert "; lower pipeline.microbatches, train.accumulation or pipeline.stages" in said
    assert not list(tmp_path.iterdir()), "nothing is left of a refused start"


def test_the_largest_table():
    assert num_stages("gpipe", ranks=4, microbatches=1_000_000) == 4
    with pytest.raises(ScheduleError, match="1000001 micro-batches on 4 rank"):
        num_stages("gpipe", ranks=4, microbatches=1_000_001)
