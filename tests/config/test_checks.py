"""Checks of composed settings: which raise an error, which only warn, and the messages."""

import re

import pytest

from gpipe_hpc.config import check_config, compose_config
from gpipe_hpc.errors import ConfigError

REFUSED = [
    ("pipeline.microbatches=0", "pipeline.microbatches, expected at least 1, got 0"),
    ("pipeline.stages=3", "expected stages x replicas = world size"),
    ("pipeline.replicas=3", "expected stages x replicas = world size"),
    ("pipeline.schedule=gpip", "pipeline.schedule, expected one of gpipe, one_f_one_b"),
    ("pipeline.recompute=sometimes", "expected one of always, except_last, never"),
    (
        "pipeline.partition=fast",
        "expected time, simulated, parameters, uniform or the number of layers",
    ),
    ("pipeline.partition=[1,2,3]", "expected 2 "),
    ("pipeline.partition=[-1,12]", "counts of at least 0"),
    ("pipeline.memory_bytes=[8GB,0]", "pipeline.memory_bytes, expected at least 1"),
    ("pipeline.memory_bytes=[nan]", "pipeline.memory_bytes, expected at least 1"),
    ("pipeline.paces=guessed", "pipeline.paces, expected one of measured, got 'guessed'"),
    ("pipeline.paces=[]", "pipeline.paces"),
    ("pipeline.paces=[1,0]", "pipeline.paces"),
    ("pipeline.paces=[1,a]", "pipeline.paces"),
    ("pipeline.paces=[1,true]", "pipeline.paces"),
    ("pipeline.paces=2", "pipeline.paces"),
    ("pipeline.paces={a:1}", "pipeline.paces"),
    ("pipeline.partition=null", "pipeline.partition"),
    ("train.batch_size=0", "train.batch_size, expected at least 1, got 0"),
    ("train.steps=-1", "train.steps, expected at least 0, got -1"),
    ("train.accumulation=0", "train.accumulation"),
    ("train.clip_norm=0", "train.clip_norm, expected more than 0"),
    ("train.device=gpu", "train.device, expected auto, cpu, cuda (NVIDIA and AMD), xpu"),
    ("optimizer.lr=nan", "optimizer.lr"),
    ("optimizer.betas=[0.9]", "optimizer.betas, expected two numbers"),
    ("optimizer.betas=[0.9,1.0]", "optimizer.betas, expected 0 or more, less than 1"),
    ("lr.decay=linear", "lr.decay, expected one of cosine, constant"),
    ("lr.start_ratio=-1", "lr.start_ratio, expected at least 0"),
    ("lr.base_batch_size=0", "lr.base_batch_size, expected at least 1"),
    ("lr.min_ratio=1.5", "lr.min_ratio, expected 0 to 1"),
    ("data.vocab_size=128", "data.vocab_size, expected 256 or more"),
    ("model.vocab_size=10", "model.vocab_size, expected at least data.vocab_size=256, got 10"),
    ("model.block_size=4", "model.block_size, expected at least data.seq_len"),
    ("~model._target_", "model, expected a _target_"),
    ("loss.beta=1", "loss, expected a _target_"),
    ("checkpoint.keep=0", "checkpoint.keep, expected at least 1"),
    ("comm.timeout_s=0", "comm.timeout_s, expected more than 0"),
    ("comm.backend=mpi4py", "comm.backend, expected one of auto, mpi, gloo"),
    ("draw.format=pdf", "draw.format, expected one of"),
    ("outer.order=rnak", "outer.order, expected one of backend, rank, got 'rnak'; did you mean"),
    ("plan.precisions={float33: 1e10}", "plan.precisions, expected float32, "),
    ("plan.precisions={bfloat16: 0.5}", "plan.precisions, expected float32, "),
    ("plan.precisions={bfloat16: true}", "plan.precisions, expected float32, "),
    ("outer.shard=zero", "outer.shard, expected one of none, flat, oss, got 'zero'"),
]


@pytest.mark.parametrize(("override", "message"), REFUSED, ids=[each[0] for each in REFUSED])
def test_invalid_setting_is_rejected_by_name(override, message):
    config = compose_config([override])
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_config(config, world_size=2)


@pytest.mark.parametrize("override", ["data.paths=[]", "data.dtype=int8"])
def test_invalid_text_data_setting_is_rejected(override):
    config = compose_config(["data=text", "data.paths=[a.txt]", override])
    with pytest.raises(ConfigError, match=override.split("=")[0]):
        check_config(config, world_size=2)


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        (["pipeline.stages=2", "pipeline.replicas=2"], 4),
        (["pipeline.replicas=2"], 8),
        (["pipeline.partition=[3,8]"], 2),
        (["pipeline.partition=[3,3,3,2]"], 2),  # two stages per rank
        (["train.steps=0", "train.clip_norm=null"], 1),
    ],
)
def test_valid_settings_pass_without_warnings(overrides, world_size):
    assert check_config(compose_config(overrides), world_size) == []


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["lr.warmup_steps=500", "train.steps=100"], "lr.warmup_steps=500 is longer"),
        (["train.stop_at=400"], "train.stop_at=400 is greater than"),
        (["train.batch_size=7"], "some micro-batches stay empty"),
        (["trace.from_step=400"], "trace.from_step=400 is after the last step, 300"),
        (["trace.from_step=9", "train.stop_at=8"], "no step is traced"),
        (
            ["pipeline.ranks=8"],
            "pipeline.ranks=8 is only used by commands that start no ranks; this run has 2 ranks",
        ),
    ],
)
def test_doubtful_setting_gives_one_warning(overrides, words):
    (warning,) = check_config(compose_config(overrides), world_size=2)
    assert words in warning


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("comm.timeout_s=1e300", "more than 0, at most 1000000"),
        ("comm.timeout_s=inf", "more than 0"),
        ("comm.timeout_s=nan", "more than 0"),
        ("comm.timeout_s=-1", "more than 0"),
        ("train.steps=9223372036854775808", "0 to 9223372036854775807"),
        ("pipeline.microbatches=100000000000000000000", "1 to 9223372036854775807"),
        ("bench.microbatches=[0]", "at least 1"),
        ("bench.ranks=[2,100000000000000000000]", "to 9223372036854775807"),
        ("train.log_every=0", "at least 1"),
    ],
)
def test_number_out_of_range_is_rejected(override, expected):
    """Regression: a timeout of 1e300 s caused an OverflowError during start-up."""
    with pytest.raises(ConfigError, match=f"{override.partition('=')[0]}.*{expected}"):
        check_config(compose_config([override]), 1)


def test_integer_without_a_range_must_fit_in_64_bits():
    """Regression: a data seed of 31 digits ended in NumPy's OverflowError."""
    words = ["model=mlp", "data=synthetic_vectors", "data.seed=-1000000000000000000000"]
    with pytest.raises(
        ConfigError, match=r"bad data\.seed, expected .*9223372036854775807, got -1"
    ):
        check_config(compose_config(words), 1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model=mlp", "data=synthetic_vectors", "model.widths=[6,8,10]"), r"widths.*data\.width"),
        (("model=mlp", "data=synthetic_vectors", "model.widths=[64,3]"), r"widths.*num_classes=10"),
        (("model=resnet_small", "data=digits", "model.num_classes=3"), r"num_classes, expected at"),
        (("model=resnet_small", "data=digits", "model.num_classes=1"), r"num_classes, expected at"),
        (("model=resnet_small", "data=digits", "model.in_channels=3"), r"in_channels, expected da"),
    ],
)
def test_sizes_of_a_built_in_model_must_match_the_data(words, message):
    """Regression: classes beyond the outputs were reported as a failed action of the first step."""
    with pytest.raises(ConfigError, match=message):
        check_config(compose_config(words), 1)


@pytest.mark.parametrize(
    "words",
    [
        ("model=unet_tiny", "data=synthetic_masks"),
        ("model=resnet_small", "data=digits", "loss={_target_:my.loss}"),
    ],
)
def test_single_output_is_allowed_for_masks_or_an_own_loss(words):
    words = [*words, "model.num_classes=1"]
    assert check_config(compose_config(words), 1) == []


@pytest.mark.parametrize(
    ("steps", "every", "nearest", "longer"), [(10, 4, 5, 12), (7, 2, 1, 8), (7, 5, 7, 10)]
)
def test_local_sgd_must_end_with_an_outer_step(steps, every, nearest, longer):
    settings = ["outer=local_sgd", f"outer.every={every}", "pipeline.replicas=2"]
    with pytest.raises(ConfigError, match=f"set outer.every={nearest} or train.steps={longer}"):
        check_config(compose_config([*settings, f"train.steps={steps}"]), 2)
    check_config(compose_config([*settings, f"train.steps={longer}"]), 2)
