"""A signal to one rank while the ranks start ends all in a way that they can go on from."""

import signal

import pytest

from tests.support import patience

MINE = '''
import os
import time

from torch import nn

from gpipe_hpc import LayerSpec


def build(victim):
    """Take long on the rank that is told to stop."""
    if os.environ["RANK"] == str(victim):
        open("building", "w").close()
        time.sleep(60)
    return [LayerSpec(nn.Linear, 8, 8), LayerSpec(nn.Linear, 8, 8)]
'''


@pytest.mark.parametrize("victim", [0, 1])
def test_sigterm_to_one_rank_asks_for_all_to_be_started_again(start_ranks, tmp_path, until, victim):
    """The other rank ended with code 1, and nothing asked for the job to be queued again."""
    (tmp_path / "mine.py").write_text(MINE)
    words = (
        *("model=mlp", "model._target_=mine.build", f"+model.victim={victim}"),
        *("data=synthetic_vectors", "data.width=8", "data.num_classes=8", "train.batch_size=8"),
        *("train.validate_every=0", "pipeline.microbatches=2", "pipeline.partition=uniform"),
        *("checkpoint.every=0", "run.dir=run"),
    )
    ranks = start_ranks(2, *words, env={"PYTHONPATH": str(tmp_path)})
    until((tmp_path / "building").exists, 60, "it builds the model")
    ranks.commands[victim].signal(signal.SIGTERM)
    assert ranks.wait(30 * patience()).codes == [75, 75], ranks.outputs
    assert (tmp_path / "run" / "REQUEUE").read_text() == "0\n"
    assert not (tmp_path / "run" / "LOCK").exists()
    assert f"rank {victim} on " in ranks.outputs[1 - victim]
    assert "stopped by SIGTERM before the first step" in ranks.outputs[1 - victim]
    assert not any("Traceback" in output for output in ranks.outputs)


@pytest.mark.parametrize("victim", [0, 1])
def test_sigterm_to_one_rank_ends_those_that_wait_for_all(
    start_ranks, free_port, until, tmp_path, victim
):
    """The other rank waited for comm.timeout_s, or ended with code 1 as the store was gone."""
    words = ("model=mlp", "data=synthetic_vectors", "run.dir=run", "pipeline.stages=3")
    port = {"MASTER_PORT": str(free_port())}
    ranks = start_ranks(3, *words, "comm.timeout_s=300", ranks=[0, 1], env=port)
    # Rank 0 says so after a while, when rank 1 has come.
    until(lambda: "for rank 2 of 3" in ranks.commands[0].output, 90, "it waits for rank 2")
    ranks.commands[victim].signal(signal.SIGTERM)
    codes = ranks.wait(30 * patience()).codes
    assert (codes[victim], codes[1 - victim]) == (128 + signal.SIGTERM, 75), ranks.outputs
    assert f"rank {victim} on " in ranks.outputs[1 - victim]
    assert "stopped by SIGTERM before the first step" in ranks.outputs[1 - victim]
    assert not any("Traceback" in output for output in ranks.outputs)
