"""Commands of runs that trade exactness for speed."""

import json

import pytest
import torch

from gpipe_hpc.checkpoint import read_facts
from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner.costs.layer_trial import LayerWeight
from gpipe_hpc.trainer.pipeline_request import request_of
from gpipe_hpc.verify.run import verify
from tests.support import product, train_here

SMALL = ("model=resnet_small", "data=digits", "pipeline.replicas=2", "train.batch_size=32")


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_metrics_say_when_parameters_were_averaged_and_what_was_sent(tmp_path):
    folder = tmp_path / "run"
    train_here(2, *SMALL, "train.steps=4", "outer=local_sgd", "outer.every=2", f"run.dir={folder}")
    steps = [line for line in lines(folder) if "loss" in line]
    assert [line["outer_step"] for line in steps] == [0, 1, 0, 1]
    assert [line["outer_sent_bytes"] > 0 for line in steps] == [False, True, False, True]


def read_last(folder):
    newest = max((folder / "checkpoints").glob("step_*"))
    return read_facts(newest), newest


STREAMING = ("outer=diloco", "outer.every=4", "outer.parts=2", "outer.behind=1")


def test_a_run_ends_with_replicas_that_hold_the_same(tmp_path, stored_tensors):
    """One that stops on the way goes on later from what each replica has, as if it had not."""
    words = (*SMALL, *STREAMING, "outer.bucket_bytes=100kB", "train.steps=8", "lr.warmup_steps=0")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    train_here(2, *words, f"run.dir={whole}", "train.validate_every=8")
    train_here(2, *words, f"run.dir={parted}", "train.stop_at=5")
    facts, _ = read_last(parted)
    assert facts["apart"]["differ"], "in mid-run each keeps its own"
    train_here(2, *words, f"run.dir={parted}", "train.validate_every=8")
    ends = []
    for folder in (whole, parted):
        facts, newest = read_last(folder)
        assert facts["apart"] == {"replicas": 2, "differ": False}
        ends.append(stored_tensors(newest))
    weights = {name for name in ends[0] if name.startswith("model.layers.")}
    assert weights and all(torch.equal(ends[0][name], ends[1][name]) for name in weights)
    assert [line["outer_step"] for line in lines(whole) if "loss" in line][-1] == 1


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["outer=diloco", "train.steps=100"], r"outer\.every.*divisor of train\.steps=100.*=50 or"),
        (
            ["outer=diloco", "outer.every=10", "train.steps=9223372036854775807"],
            r"outer\.every.*set outer\.every=7 or",
        ),
        (["outer.compress=gzip"], r"outer\.compress.*none, bfloat16.*gzip"),
        (["outer.qsgd_levels=3"], r"outer\.qsgd_levels"),
        (["outer.topk_fraction=0.7"], r"outer\.topk_fraction"),
        (["outer=diloco", "outer.evry=64"], r"outer\.every"),
        (["outer=dilocco"], r"diloco"),
        (
            ["outer=diloco", "train.steps=64", "lr.scaling=adascale", "lr.base_batch_size=8"],
            r"bad lr\.scaling.*outer\.every=64.*got .adascale.*outer=allreduce",
        ),
        (
            ["outer=local_sgd", "train.steps=64", "pipeline.normalise_over_replicas=true"],
            r"bad pipeline\.normalise_over_replicas.*outer\.every=16.*outer=allreduce",
        ),
        (
            ["outer=local_sgd", "train.steps=64", "outer.shard=flat"],
            r"bad outer\.shard.*outer\.every=16",
        ),
        (["outer.shard=flat", "outer.compress=topk"], r"outer\.shard=flat.*outer\.compress=topk"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(words, told):
    with pytest.raises(ConfigError, match=told):
        check_config(compose_config([*SMALL, *words]), 2)


def test_a_validation_between_outer_steps_is_doubted():
    words = ["outer=diloco", "train.steps=128", "train.validate_every=100"]
    doubts = check_config(compose_config([*SMALL, *words]), 2)
    assert any("validate_every=100 is not a multiple of outer.every=64" in each for each in doubts)


def test_what_one_replica_has_no_use_for_is_doubted():
    words = ["pipeline.replicas=1", "outer.compress=topk", "outer.order=rank"]
    doubts = check_config(compose_config([*SMALL, words[0], words[1]]), 1)
    assert any(
        "outer.compress=topk has no effect with pipeline.replicas=1" in each for each in doubts
    )
    doubts = check_config(compose_config([*SMALL, words[0], words[2]]), 1)
    assert any("outer.order=rank has no effect with pipeline.replicas=1" in each for each in doubts)
    doubts = check_config(compose_config([*SMALL, words[0]]), 1)
    assert not any("outer." in each for each in doubts)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["outer.powersgd_rank=4"],
            "outer.powersgd_rank is only used with outer.compress=powersgd",
        ),
        (
            ["outer.compress=qsgd", "outer.topk_fraction=0.1"],
            "outer.topk_fraction is only used with",
        ),
        (["outer.compress=topk", "outer.qsgd_levels=9"], "outer.qsgd_levels is only used with"),
        (
            ["outer=diloco", "train.steps=64", "outer.mix=0.1"],
            "outer.mix is only used with outer.behind",
        ),
        (["outer.compress=topk", "outer.topk_fraction=0.1"], None),
    ],
)
def test_what_nothing_looks_at_is_doubted(words, said):
    doubts = check_config(compose_config([*SMALL, *words]), 2)
    found = [each for each in doubts if "has no effect" in each]
    assert (len(found) == 1 and said in found[0]) if said else not found


@pytest.mark.parametrize("words", [["outer.compress=topk"], ["outer=local_sgd"]])
def test_verify_refuses_what_is_not_exact(words):
    with pytest.raises(
        ConfigError, match=r"exact reduction.*got outer\.\w+=\w+, with which.*outer=allreduce"
    ):
        verify(compose_config([*SMALL, *words, "train.steps=16"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "least"),
    [
        product(["outer.compress=bfloat16"], 0.9),
        product(["outer.compress=float16"], 0.9),
        product(["outer.compress=qsgd"], 0.9),
        (["outer.compress=powersgd"], 0.75),
        product(["outer.compress=topk"], 0.7),
        product(["outer=local_sgd"], 0.83),
        (["outer=diloco", "outer.every=16"], 0.87),
        product(
            [
                *("outer=diloco", "outer.every=16", "outer.parts=2", "outer.behind=1"),
                *("outer.compress=qsgd", "outer.bucket_bytes=100kB"),
            ],
            0.87,
        ),
    ],
)
def test_real_digits_are_learnt_nearly_as_well(words, least, tmp_path):
    """Ten classes of real images, 80 steps, in which plain sums come to 0.94.

    Those that hold back most, top-k of a hundredth and rank 2, have had too few steps: once they
    came to 0.79 and 0.83.
    """
    folder = tmp_path / "run"
    more = ["train.steps=80", "train.batch_size=64"]
    train_here(2, *SMALL, *more, *words, f"run.dir={folder}")
    assert lines(folder)[-1]["validation_accuracy"] > least


@pytest.mark.parametrize(
    ("words", "states"),
    [
        (["outer.compress=topk"], 1),
        (["outer=local_sgd"], 1),
        (["outer=diloco"], 2),
        (["outer=diloco", "outer.behind=2"], 3),
        (["outer=diloco", "outer.behind=2", "outer.parts=4"], 2.25),
        (["outer=diloco", "outer.compress=qsgd"], 3),
        (["outer=diloco", "pipeline.replicas=1"], 0),
        (["outer.compress=topk", "pipeline.replicas=1"], 0),
        ([], 0),
    ],
)
def test_a_plan_counts_what_is_kept_between_steps(words, states):
    """Residual, anchor, momentum: a float32 of each parameter, as the run's own state says."""
    request = request_of(compose_config([*SMALL, *words]))
    memory = request.kept_states.among(request.replicas)
    assert memory.outer_states + memory.local_sgd_states == states
    weight = LayerWeight("weight", 10, 20, is_trained=True)
    assert memory.of_weights([weight]) == memory._replace(
        outer_states=0, local_sgd_states=0
    ).of_weights([weight]) + (40 * states)
