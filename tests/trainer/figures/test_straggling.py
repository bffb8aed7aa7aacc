"""A rank that gets slow is noticed, once, and none where all get slow."""

import re

import pytest

from gpipe_hpc.report.markdown import render_markdown
from gpipe_hpc.report.record import read_record
from gpipe_hpc.report.sections import report_of
from gpipe_hpc.trainer.figures.straggling import StragglerDetector
from tests.support import losses, metrics, train_here


def events(busy, others):
    """Return what is said at which step."""
    watched, found = StragglerDetector(), {}
    for step, (own_s, other_s) in enumerate(zip(busy, others, strict=True), 1):
        said = watched.add(step, own_s, other_s)
        if said is not None:
            found[step] = said
    return found, watched


def test_a_rank_that_gets_slow_is_told_once_with_its_step_and_how_much():
    busy = [1.0] * 30 + [1.5] * 20 + [1.0] * 10
    found, watched = events(busy, [1.0] * 60)
    (begun, over) = found.values()
    assert begun.first_step == 31 and begun.factor == pytest.approx(1.5) and not begun.is_over
    assert over.first_step == 51 and over.is_over
    assert list(found) == [35, 55] and watched.factor == 0


def test_what_has_become_slow_does_not_become_usual():
    found, watched = events([1.0] * 30 + [1.5] * 500, [1.0] * 530)
    assert len(found) == 1 and watched.factor == pytest.approx(1.5)


def test_longer_steps_of_all_ranks_make_no_straggler():
    longer = [1.0] * 30 + [2.0] * 30
    assert events(longer, longer)[0] == {}
    assert len(events(longer, [1.0] * 60)[0]) == 1


def test_a_rank_that_waits_for_slow_others_is_none():
    assert events([1.0] * 60, [1.0] * 30 + [2.0] * 30)[0] == {}


@pytest.mark.parametrize("often", [2, 5])
def test_single_slow_steps_make_no_straggler(often):
    assert events([2.0 if n % often == 0 else 1.0 for n in range(100)], [1.0] * 100)[0] == {}


def test_one_rank_is_held_against_itself():
    assert len(events([1.0] * 20 + [1.4] * 20, [0.0] * 40)[0]) == 1
    assert events([0.0] * 40, [0.0] * 40)[0] == {}


def test_a_run_of_one_rank_has_no_straggler(tiny, tmp_path, monkeypatch):
    """Longer sequences were told as a slow host that "the other ranks" did not share."""
    monkeypatch.setattr(StragglerDetector, "add", lambda *_: pytest.fail("there is no other rank"))
    train_here(1, *tiny, "train.steps=4", f"run.dir={tmp_path}")
    assert len(losses(tmp_path)) == 4


def test_a_run_tells_a_straggler_in_its_log_and_in_its_metrics(tiny, tmp_path, monkeypatch, caplog):
    """By clocks that are given: one rank takes half as long again from step 12 to 24."""
    real = StragglerDetector.add

    def add(self, step, busy_s, others_s):
        return real(self, step, 1.5 if self is built[0] and 12 <= step <= 24 else 1.0, 1.0)

    def new(self):
        made(self)
        built.append(self)

    built, made = [], StragglerDetector.__init__
    monkeypatch.setattr(StragglerDetector, "__init__", new)
    monkeypatch.setattr(StragglerDetector, "add", add)
    train_here(2, *tiny, "pipeline.stages=2", "train.steps=32", f"run.dir={tmp_path}")
    said = [r.getMessage() for r in caplog.records if "computed" in r.getMessage()]
    assert len(said) == 2
    assert re.match(
        r"straggler: rank [01] has computed 1.50 times as long as before since step 12", said[0]
    )
    assert re.match(r"rank [01] has computed at its normal speed again since step 25", said[1])
    told = {line["step"]: line for line in metrics(tmp_path) if "straggles" in line}
    # A rank tells the others at the edge of the step after.
    assert sorted(told) == list(range(17, 30))
    assert {line["straggles"] for line in told.values()} == {1.5}
    assert f"rank {told[17]['straggling_rank']} " in said[0]
    assert all(f"peak_memory_bytes/{r}" in told[17] for r in (0, 1))
    report = render_markdown(report_of(read_record(tmp_path)))
    assert "computed up to 1.50 times as long as before" in report
