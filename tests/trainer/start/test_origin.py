"""What a run goes on from: copies in memory go before a checkpoint, if they fit the model."""

from pathlib import Path

import pytest

from gpipe_hpc import run_on_threads
from gpipe_hpc.checkpoint import read_facts
from gpipe_hpc.checkpoint.in_memory import CopySet
from gpipe_hpc.config import compose_config
from gpipe_hpc.trainer.run.identity import RunIdentity, run_id
from gpipe_hpc.trainer.start import open_session
from tests.support import train_here

SETTINGS = (
    "model=mlp",
    "data=synthetic_vectors",
    "train.batch_size=8",
    "train.steps=6",
    "pipeline.microbatches=2",
    "pipeline.partition=uniform",
    "checkpoint.every=2",
    "train.validate_every=0",
    "run.dir=run",
)


class Misfits:
    """Copies of step 4, of a model that was cut otherwise."""

    def __init__(self, facts):
        about = {"extra": facts["extra"], "partition": facts["partition"]}
        self._found = CopySet(4, about, 0, {})

    def find(self):
        return self._found

    def restore(self, found, pipe, optimizer):
        assert found is self._found

    def forget_others(self):
        pass


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """Return the folder of a run of two ranks that was stopped after step 4."""
    monkeypatch.chdir(tmp_path)
    train_here(2, *SETTINGS, "train.stop_at=4")
    return tmp_path / "run"


def opened(run):
    """Open the session of a second start; return the steps done and the position, by rank."""
    config = compose_config(list(SETTINGS))
    facts = read_facts(run / "checkpoints" / "step_00000004")

    def body(world):
        copies = Misfits(facts)
        session = open_session(config, world, RunIdentity(run, run_id(run), False), None, copies)
        session.close()
        return session.pipe.steps_done, session.position

    return run_on_threads(2, body)


def test_copies_of_another_cut_lead_to_the_newest_checkpoint(begun):
    assert opened(begun) == [(4, 32)] * 2


def test_copies_of_another_cut_and_a_damaged_checkpoint_lead_to_the_one_before(begun, caplog):
    """The run ended with the message that the newest is damaged, though an older one was whole."""
    for path in (begun / "checkpoints" / "step_00000004").glob("*.distcp"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    assert opened(begun) == [(2, 16)] * 2
    assert "copies in memory do not fit the model" in caplog.text
    assert "damaged checkpoint, resuming from" in caplog.text
    names = sorted(path.name for path in Path(begun / "checkpoints").iterdir())
    assert names == ["abandoned_step_00000004", "step_00000002"], "its name is free for the new one"
