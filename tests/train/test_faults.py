"""What goes wrong: every rank says what in seconds, ends with a code that is not 0, and is gone."""

import signal
import socket

import pytest

from tests.support import has_begun
from tests.train.mine import MINE

pytestmark = pytest.mark.slow


# One of each place that refuses: what each setting may be is asked in tests/config.
BAD_SETTINGS = {
    "unknown key": (["pipeline.stagez=2"], ["stagez"]),
    "stages x replicas": (
        ["pipeline.stages=3"],
        ["stages x replicas = world size", "got 3 x 1", "pipeline.stages"],
    ),
    "partition adds up": (
        ["pipeline.partition=[3,3]"],
        ["wrong sum of layers", "5 layers", "6 = 3 + 3"],
    ),
    "no checkpoint": (["checkpoint.resume=nowhere"], ["checkpoint.resume", "nowhere"]),
    "empty folder": (
        ["checkpoint.resume=."],
        ["checkpoint.resume", "neither a checkpoint nor a run folder"],
    ),
    "no data": (["data=text", "data.paths=[nowhere/*.txt]"], ["nowhere/*.txt"]),
    "bad run folder": (["run.dir=/proc/run"], ["run.dir", "/proc/run"]),
    "no such model": (["model._target_=nowhere.build"], ["model._target_", "nowhere.build"]),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings_are_refused_on_every_rank(start_ranks, tiny, name):
    overrides, parts = BAD_SETTINGS[name]
    ranks = start_ranks(2, *tiny, "train.steps=3", "run.dir=run", *overrides).wait(20)
    for code, output in zip(ranks.codes, ranks.outputs, strict=True):
        assert code not in (0, None)
        for part in parts:
            assert part in output, output
        assert "Traceback" not in output, output
    assert set(ranks.codes) == {2}, "one refusal, one code: also of a rank that was told of it"


def test_more_stages_than_layers_are_refused(start_ranks):
    model = ("model=mlp", "data=synthetic_vectors", "model.widths=[64,10]", "run.dir=run")
    for partition in ("parameters", "time"):
        ranks = start_ranks(2, *model, f"pipeline.partition={partition}").wait(20)
        for code, output in zip(ranks.codes, ranks.outputs, strict=True):
            assert code == 2
            assert "more stages than layers: the model has 1 layers, got 2" in output
            assert "Traceback" not in output, output


def test_unreadable_data_is_named(start_ranks, tiny, tmp_path):
    (tmp_path / "a.txt").mkdir()
    text = ("data=text", "data.paths=[a.txt]", "train.steps=3", "run.dir=run")
    ranks = start_ranks(2, "model.num_layers=1", *text).wait(20)
    assert all(ranks.codes)
    assert all("a.txt" in output for output in ranks.outputs), ranks.outputs
    (tmp_path / "b.txt").write_bytes(b"too short")
    short = ("data=text", "data.paths=[b.txt]", "train.steps=3", "run.dir=run")
    ranks = start_ranks(2, "model.num_layers=1", *short).wait(20)
    assert all(ranks.codes)
    assert all("b.txt" in output or "seq_len" in output for output in ranks.outputs), ranks.outputs


@pytest.mark.parametrize("change", ["model.width=32", "model.num_layers=2"])
def test_a_checkpoint_of_another_model_is_refused(train, start_ranks, tiny, change):
    train(1, *tiny, "train.steps=1", "run.dir=first")
    other = (change, "checkpoint.resume=first", "run.dir=second", "train.steps=3")
    ranks = start_ranks(2, *tiny, *other).wait(20)
    for code, output in zip(ranks.codes, ranks.outputs, strict=True):
        assert code not in (0, None)
        assert "of another model" in output and "layers." in output, output


def test_ranks_with_different_settings_are_refused(start_ranks, start, tiny, free_port):
    """Somebody changed the settings on one machine."""
    port = str(free_port())
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    ranks = [
        start(
            *tiny,
            "train.steps=3",
            "run.dir=run",
            f"train.seed={rank}",
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port},
        )
        for rank in range(2)
    ]
    for command in ranks:
        assert command.wait(20).code not in (0, None)
        assert "same train.seed on every rank" in command.output, command.output


def test_a_loss_that_is_nan_stops_all_and_keeps_the_last_checkpoint(
    start_ranks, train, mine, tmp_path, stored_tensors
):
    # Call 14 of the layer is micro-batch 1 (of 4) in step 4.
    nan = ("model.kind=poison", "model.stage=3", "model.at=14", "checkpoint.every=2")
    ranks = start_ranks(2, *MINE, *nan, env=mine).wait(20)
    for code, output in zip(ranks.codes, ranks.outputs, strict=True):
        assert code == 4, "what starts runs again can tell it from a crash"
        assert "step 4, rank 1, micro-batch 1 of replica 0: the loss is " in output
        assert "step_00000002" in output
    assert (tmp_path / "run" / "NON_FINITE").read_text().startswith("step 4, rank 1, micro-batch 1")
    kept = tmp_path / "run" / "checkpoints"
    assert [path.name for path in kept.iterdir()] == ["step_00000002"]
    assert all(
        tensor.isfinite().all() for tensor in stored_tensors(kept / "step_00000002").values()
    )
    assert "2 steps done" in train(2, *MINE, "checkpoint.resume=run", env=mine)


@pytest.mark.parametrize("kind", ["backward", "forward"])
def test_an_exception_in_a_stage_reaches_every_rank(start_ranks, mine, kind):
    fault = (f"model.kind={kind}", "model.stage=2", "model.at=7")
    ranks = start_ranks(4, *MINE, *fault, env=mine).wait(25)
    op = kind[0].upper()
    for code, output in zip(ranks.codes, ranks.outputs, strict=True):
        assert code not in (0, None)
        # Others are told on which host to look.
        at = "rank 2" if output == ranks.outputs[2] else f"rank 2 on {socket.gethostname()}"
        assert f"{at}, stage 2, micro-batch 2" in output, output
        assert f"2{op}2" in output and "what the user got wrong" in output, output


def test_a_model_that_cannot_be_built_says_why(start_ranks, mine):
    ranks = start_ranks(2, *MINE, "model._target_=mine.fail", env=mine).wait(20)
    assert all(ranks.codes)
    assert all("no model today" in output for output in ranks.outputs), ranks.outputs


def test_a_rank_that_never_comes_is_named(start_ranks, tiny):
    settings = (*tiny, "train.steps=3", "run.dir=run", "comm.timeout_s=6")
    for present, missing in (([0, 2], 1), ([1, 2], 0)):
        ranks = start_ranks(3, *settings, ranks=present).wait(20)
        for code, output in zip(ranks.codes, ranks.outputs, strict=True):
            assert code not in (0, None)
            assert f"missing rank {missing}" in output, output


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_killed_rank_is_named_by_the_others(start_ranks, tiny, tmp_path, until, victim):
    ranks = start_ranks(3, *tiny, "train.steps=100000", "run.dir=run")
    until(lambda: has_begun(tmp_path / "run"), 30, "it trains")
    ranks.commands[victim].signal(signal.SIGKILL)
    ranks.wait(20)
    for rank, (code, output) in enumerate(zip(ranks.codes, ranks.outputs, strict=True)):
        assert code not in (0, None)
        if rank != victim:
            assert f"rank {victim}" in output, output
            told = ("died", "no sign of life", f"lost rank {victim}")  # as it was seen first
            assert any(words in output for words in told), output


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_hangs_is_named(start_ranks, tiny, tmp_path, until, victim):
    ranks = start_ranks(2, *tiny, "train.steps=100000", "run.dir=run", "comm.timeout_s=5")
    until(lambda: has_begun(tmp_path / "run"), 30, "it trains")
    ranks.commands[victim].signal(signal.SIGSTOP)
    other = ranks.commands[1 - victim]
    assert other.wait(30).code not in (0, None)
    assert f"rank {victim}" in other.output.partition("PeerError")[2], other.output
    assert ranks.commands[victim].code is None
    ranks.commands[victim].signal(signal.SIGCONT)
    assert ranks.commands[victim].wait(20).code not in (0, None)
