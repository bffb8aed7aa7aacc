"""Buckets that leave within the last backward shorten a step: as drawn, and as planned."""

import re
import sys
from collections.abc import Callable

import pytest

from gpipe_hpc import plan
from gpipe_hpc.draw import __main__ as draw

SIZES = ("pipeline.stages=4", "pipeline.schedule=gpipe", "pipeline.recompute=never")


@pytest.fixture
def number_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., float]:
    """Return a function that runs a command and finds a number in what it prints."""

    def run(command: Callable[[], None], pattern: str, *words: str) -> float:
        monkeypatch.setattr(sys, "argv", ["command", *words])
        with pytest.raises(SystemExit) as ended:
            command()
        told = capsys.readouterr()
        assert ended.value.code == 0, told
        (found,) = re.findall(pattern, told.out)
        return float(found)

    return run


@pytest.mark.parametrize("schedule", ["gpipe", "one_f_one_b"])
def test_a_drawing_hides_what_a_run_hides(schedule: str, number_in: Callable[..., float]):
    """The page said so, but one bucket and four gave one makespan, with overlap and without."""

    def makespan(buckets: int, overlap: str, *more: str) -> float:
        own = (f"draw.buckets={buckets}", f"outer.overlap={overlap}", "draw.costs.reduction=2")
        words = (*SIZES, f"pipeline.schedule={schedule}", "pipeline.microbatches=8", *own, *more)
        return number_in(draw.main, r"makespan ([\d.]+)", *words)

    # 8 x (F + B) of 3, and 3 stages of these to fill and drain: 33. Backwards last 2.
    assert makespan(1, "true") == makespan(1, "false") == 35
    assert makespan(2, "true") == 34  # of two halves one is summed within
    assert makespan(4, "true") == 33.5
    assert makespan(4, "false") == 35
    assert makespan(4, "true", "outer.shard=flat", "pipeline.replicas=2") == 33.5


def test_a_plan_hides_what_a_run_hides(number_in: Callable[..., float]):
    model = ("model=mlp", "data=synthetic_vectors", "pipeline.partition=uniform")
    machine = ("plan.flops_per_s=1e7", "plan.link_bytes_per_s=1e5", "pipeline.replicas=2")

    def step_s(overlap: str, bucket_bytes: str) -> float:
        own = (f"outer.overlap={overlap}", f"outer.bucket_bytes={bucket_bytes}")
        words = (*model, *SIZES, "pipeline.stages=2", *machine, *own)
        return number_in(plan.main, r"expected step time ([\d.]+) s", *words)

    within, behind = step_s("true", "4e3"), step_s("false", "4e3")
    assert within < behind
    assert step_s("true", "25e6") == pytest.approx(behind, rel=1e-3)
