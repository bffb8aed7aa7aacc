"""Which settings a run may change when it goes on."""

import json

import pytest

from gpipe_hpc.config import compose_config, config_yaml
from gpipe_hpc.trainer.run.changed_settings import changes, read_settings, settings_of


@pytest.fixture(scope="module")
def differences():
    """Return a function: the changes from one list of overrides to another."""
    plain = compose_config()

    def between(before, now):
        first, second = (compose_config(words) if words else plain for words in (before, now))
        return changes(json.loads(json.dumps(settings_of(first))), second)

    return between


def test_nothing_differs_from_itself(differences):
    assert differences(["model=gpt2"], ["model=gpt2"]) == []


def test_settings_that_change_no_step_are_passed_over(differences):
    settings = [
        "train.stop_at=7",
        "train.build_on=device",
        "train.log_every=3",
        "train.validate_every=9",
        "checkpoint.every=3",
        "run.dir=elsewhere",
        "comm.timeout_s=5",
        "data.workers=3",
        "trace.steps=2",
    ]
    assert differences([], settings) == []


@pytest.mark.parametrize("how", ["shard=flat", "order=rank", "hierarchy=host"])
def test_a_run_may_sum_in_another_exact_way(differences, how):
    """A checkpoint holds whole tensors, but resume=auto was refused with another outer.shard."""
    (change,) = differences([], [f"outer.{how}"])
    assert change.setting == f"outer.{how.partition('=')[0]}" and change.is_layout
    (change,) = differences([], ["outer.compress=qsgd"])
    assert not change.is_layout


def test_the_layout_and_the_length_may_change(differences):
    settings = [
        "train.steps=7",
        "train.accumulation=2",
        "pipeline.stages=3",
        "pipeline.replicas=2",
        "pipeline.schedule=one_f_one_b",
        "pipeline.microbatches=3",
        "pipeline.partition=uniform",
    ]
    found = differences([], settings)
    assert all(change.is_layout for change in found)
    assert {change.setting for change in found} == {each.partition("=")[0] for each in settings}


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ("train.seed=7", "train.seed: was 0, is 7"),
        ("train.batch_size=64", "train.batch_size: was 32, is 64"),
        ("train.clip_norm=null", "train.clip_norm: was 1.0, is None"),
        ("train.precision=bfloat16", "train.precision: was float32, is bfloat16"),
        ("optimizer.betas=[0.8,0.9]", "optimizer.betas: was [0.9, 0.95], is [0.8, 0.9]"),
        ("lr.warmup_steps=1", "lr.warmup_steps: was 20, is 1"),
        ("data.seq_len=64", "data.seq_len: was 128, is 64"),
        ("+model.mine=3", "model.mine: was not set, is 3"),
        ("+loss._target_=a.b", "loss._target_: was not set, is a.b"),
        (
            "pipeline.normalise_over_replicas=true",
            "pipeline.normalise_over_replicas: was False, is True",
        ),
    ],
)
def test_what_a_run_trains_may_not_change(differences, setting, shown):
    found = {str(change): change for change in differences([], [setting])}
    assert not found[shown].is_layout


def test_what_is_of_the_data_is_known(differences):
    """checkpoint.data=new or any allows it."""
    found = differences([], ["data=idx", "data.path=x", "model=resnet_small", "train.seed=1"])
    of_data = {change.setting for change in found if change.is_of_data}
    assert {"kind of data", "data.seq_len", "train.seed"} <= of_data
    assert not any(setting.startswith("model.") for setting in of_data)


def test_a_run_that_met_a_corrupt_sample_may_pass_over_it(differences):
    data = ["data=jsonl", "data.paths=[x]"]
    found = differences(data, [*data, "data.corrupt=skip", "data.max_corrupt=3"])
    assert len(found) == 2 and all(change.is_layout for change in found)


def test_other_kinds_are_seen_though_no_setting_differs(differences):
    """Those of IDX files and of Fashion-MNIST have the same settings."""
    same = ["data.path=x", "model=resnet_small"]
    found = [str(x) for x in differences(["data=idx", *same], ["data=fashion_mnist", *same])]
    assert "kind of data: was IdxConfig, is FashionMnistConfig" in found
    found = [str(change) for change in differences([], ["optimizer=sgd"])]
    assert "kind of optimizer: was AdamWConfig, is SGDConfig" in found
    assert "optimizer.eps: was 1e-08, is not set" in found


def test_settings_of_a_file_are_compared_too(tmp_path):
    """A checkpoint of an older version says nothing of them."""
    (tmp_path / "config.yaml").write_text(config_yaml(compose_config(["train.seed=4"])))
    found = changes(read_settings(tmp_path / "config.yaml"), compose_config())
    assert [str(change) for change in found] == ["train.seed: was 4, is 0"]


def test_a_setting_that_an_older_version_did_not_know_is_no_difference(tmp_path):
    config = compose_config()
    text = config_yaml(config).replace("  clip_norm: 1.0\n", "")
    (tmp_path / "config.yaml").write_text(text)
    assert (
        "clip_norm" not in text and changes(read_settings(tmp_path / "config.yaml"), config) == []
    )


@pytest.mark.parametrize("was", [False, True])
def test_a_removed_setting_stops_no_run_and_is_told_where_it_did_something(tmp_path, was):
    text = config_yaml(compose_config())
    text = text.replace("\ntrain:\n", f"\ntrain:\n  fuse_accumulation: {str(was).lower()}\n")
    (tmp_path / "config.yaml").write_text(text)
    found = changes(read_settings(tmp_path / "config.yaml"), compose_config())
    assert "fuse_accumulation" in text and len(found) == was
    for change in found:
        assert change.is_layout
        assert "fuse_accumulation: was True, is removed: autograd accumulates" in str(change)


@pytest.mark.parametrize("text", ["", "{", "[]", "a: ${"])
def test_settings_that_cannot_be_read_refuse_nothing(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    assert changes(read_settings(tmp_path / "config.yaml"), compose_config()) == []
    assert changes(read_settings(tmp_path / "none.yaml"), compose_config()) == []
