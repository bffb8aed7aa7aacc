"""From where on the time of a step counts."""

from gpipe_hpc.trainer import loop
from tests.support import metrics, train_here


def test_a_step_behind_anything_else_counts_from_its_own_beginning(tiny, tmp_path, monkeypatch):
    """Validations, saves and the review of the cut are no part of the next step."""
    found = []

    class Noted(loop.StepLine):
        def __new__(cls, trained, timed, since, times, known):
            found.append((trained.step, since is None))
            return super().__new__(cls, trained, timed, since, times, known)

    monkeypatch.setattr(loop, "StepLine", Noted)
    monkeypatch.setattr(loop, "REVIEW_AFTER", 7)
    own = ("train.steps=10", "train.validate_every=4", "checkpoint.every=3")
    train_here(1, *tiny, *own, f"run.dir={tmp_path}")
    assert [step for step, is_alone in found if is_alone] == [1, 4, 5, 7, 8, 9, 10]
    lines = [line for line in metrics(tmp_path) if "loss" in line]
    assert all(line["step_time_s"] > 0 for line in lines) and len(lines) == 10
