"""Whether all ranks were started with one configuration."""

import pytest

from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.config import compose_config
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.preflight.settings import check_settings, shared_settings
from gpipe_hpc.trainer.loop import run_training
from gpipe_hpc.trainer.signals import StopRequest

TINY = ("model.num_layers=2", "model.width=16", "model.num_heads=2", "data=synthetic")


def composed(*words):
    return compose_config([*TINY, *words])


def compare(*words_of_rank):
    configs = [composed(*words) for words in words_of_rank]
    run_on_threads(len(configs), lambda world: check_settings(world, configs[world.rank]))
    return [shared_settings(config) for config in configs]


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("optimizer.lr=0.5", "optimizer.lr on every rank, got 0.001 on rank 0 and 0.5 on rank 2"),
        ("train.steps=7", "train.steps on every rank, got 300 on rank 0 and 7 on rank 2"),
        ("train.batch_size=64", "train.batch_size on every rank"),
        ("optimizer=sgd", "kind of optimizer on every rank, got AdamWConfig on rank 0 and SGD"),
        ("data=python_source", "kind of data on every rank"),
        ("+model.tied=true", "settings of model on every rank"),
        ("model.dropout=0.5", "model.dropout on every rank"),
        ("pipeline.schedule=one_f_one_b", "pipeline.schedule on every rank"),
        ("checkpoint.every=7", "checkpoint.every on every rank"),
        ("preflight.before_run=false", "preflight.before_run on every rank"),
    ],
)
def test_a_rank_that_was_started_otherwise_is_named(word, told):
    """Only what lays out the pipeline was compared: replicas trained with rates of their own."""
    with pytest.raises(ConfigError, match=f"start: expected the same {told}") as caught:
        compare((), (), (word,))
    assert "both on " in str(caught.value)


def test_what_a_host_may_have_for_itself_is_left_to_it():
    there = ("train.device=cpu", "comm.interface=lo", "run.dir=/b", "data.workers=1")
    one, other = compare((), (*there, "checkpoint.neighbour_dir=/b", "comm.secret_file=/b/secret"))
    assert one == other


def test_copies_of_a_model_may_be_anywhere(tmp_path):
    one, other = compare(*((f"+model.folder={tmp_path}/{host}",) for host in "ab"))
    assert one == other


def test_a_run_of_unequal_settings_writes_nothing(tmp_path):
    configs = [composed(f"optimizer.lr={lr}", f"run.dir={tmp_path}/run") for lr in (0.1, 0.2)]
    with pytest.raises(ConfigError, match=r"same optimizer.lr on every rank, got 0.1 on rank 0"):
        run_on_threads(2, lambda world: run_training(configs[world.rank], world, StopRequest()))
    assert not (tmp_path / "run").exists()
