"""The losses of the README's first run, with a text that is the same on every machine."""

import pytest

from tests.support import losses, train_here

# If any of them changes, every seeded run of a user trains something else.
LOSSES = [5.571990, 5.439636, 5.208228, 4.981524, 4.802590, 4.646997]


def test_the_seeded_losses_of_the_first_run_stay_as_they_are(tmp_path):
    """All settings are the defaults; the weights and the order of the samples are drawn."""
    for number in range(20):
        lines = (f"def f{number}_{i}(x):\n    return x * {i * number % 97}\n" for i in range(60))
        (tmp_path / f"module_{number}.py").write_text("\n".join(lines))
    train_here(
        2,
        f"data.root={tmp_path}",
        f"run.dir={tmp_path / 'run'}",
        "train.stop_at=6",
        "train.device=cpu",
    )
    assert losses(tmp_path / "run") == pytest.approx(LOSSES, rel=1e-4)
