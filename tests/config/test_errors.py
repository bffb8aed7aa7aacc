"""Errors of the command line: one line of our own, with the nearest valid name."""

import shutil

import pytest

from gpipe_hpc.comm.watchdog.tracebacks import users_traceback
from gpipe_hpc.config import compose_config, conf_dir, run_jobs
from gpipe_hpc.config.errors import is_of_composing
from gpipe_hpc.errors import ConfigError

CASES = {
    "pipeline.microbatch=4": r"unknown setting pipeline\.microbatch.*mean pipeline\.microbatches\?",
    "optimiser.lr=3": r"unknown setting optimiser\.lr.*did you mean optimizer\.lr\?",
    "bench.dir=x": r"unknown setting bench\.dir.*got bench\.dir; see --help",
    "lr.warmup=3": r"did you mean lr\.warmup_steps\?",
    "train.batch_size=abc": r"bad train\.batch_size: Value 'abc' .* converted to Integer; correct",
    "optimizer.lr=": r"bad optimizer\.lr: Value '' of type 'str' could not be converted to Float",
    "pipeline.offload=perhaps": r"bad pipeline\.offload: Value 'perhaps' is not a valid bool",
    "lr=3e-4": r"lr is a group of settings.*did you mean optimizer\.lr=3e-4\?",
    "train=5": r"train is a group of settings, got train=5; .*set one of train\.steps",
    "optimizer.momentum=1": r"optimizer\.momentum is not a setting .*=sgd or optimizer=rms",
    "outer.algorithm=ring": r"outer\.algorithm was removed, .*got outer\.algorithm=ring",
    "data.tokenizer=gpt2": r"unknown setting data\.tokenizer; data=text uses",
    "preflight.limit_s=3": r"preflight\.limit_s was removed.*leave it out: comm\.reach_s",
    "outer.every=x": r"bad outer\.every: Value 'x'",
    "model=gtp": r"no preset model=gtp.*did you mean gpt\?",
    "data.paths=README.md": r"data\.paths is not a setting of the.*data=text or data=tokens",
    "optimizer._target_=a.b": r"optimizer has no _target_.*only model, data and loss",
    "lr._target_=a.b": r"lr has no _target_",
    "foo": r"cannot read 'foo', expected NAME=VALUE",
    "a=[1": r"cannot read 'a=\[1': .*; write NAME=VALUE, a list as \[1,2\], and quotes around",
    "pipeline.memory_bytes=much": r"bad pipeline\.memory_bytes.*24GB",
    "train.fuse_accumulation=true": r"fuse_accumulation was removed.*leave it out: auto",
    "comm.loopback=false": r"comm\.loopback was removed.*comm\.interface",
    "metrics.project=mine": r"metrics\.project was removed.*WANDB_PROJECT",
    "report.format=markdown": r"report\.format was removed.*report\.out=report\.md",
    "comm.ports=29600-29699": r"comm\.ports was removed.*ip_local_port_range.*firewall",
    "++train.fuse_accumulation=true": r"fuse_accumulation was removed.*leave it out",
    "pipeline.memory_bytes=1.2.3GB": r"bad pipeline\.memory_bytes",
    "optimizer=1.5": r"bad optimizer, expected the name of a preset, got 1\.5; choose",
    "outer=[[],{}]": r"bad outer, expected the name of a preset, got .*; choose",
    "model=null": r"bad model, expected the name of a preset, got None; choose",
    "~train": r"train cannot be removed, .*got ~train; leave this out",
    "~lr.decay": r"lr\.decay cannot be removed",
    "~trace.keep=all": r"trace\.keep cannot be removed",
    "~nope": r"unknown setting nope",
    "+lr.decay=constant": r"lr\.decay exists already.*got \+lr.*write lr\.decay=",
    "": r"cannot read '', expected NAME=VALUE, got no name; correct",
    "~": r"cannot read '~', expected NAME=VALUE, got no name; correct",
    "outer.weights.below=3": r"outer\.weights is a single setting.*leave out \.below",
    "train.steps=???": r"bad train\.steps: .*missing mandatory value.*; correct",
    "bench.backends=[[],[]]": r"bad bench\.backends\[0\]: Cannot convert .*; correct",
    "bench.ranks=[a]": r"bad bench\.ranks\[0\]: Value 'a' .*Integer; correct it",
    "lr=${train.seed}": r"lr is a group of settings, got lr=0; .*set one of lr\.warmup_steps",
    "trace=${pipeline}": r"trace is a group of settings, got trace=\(another group\)",
    "train.batch_ramp=${lr}": r"train\.batch_ramp is a group of settings",
    "model=${lr}": r"Interpolation key 'lr' not found; correct",
    "train.seed=${model}": r"bad train\.seed: .*; correct",
    "model.width=${nope}": r"model\.width refers to .*nope.*; choose groups",
    "pipeline.memory_bytes=[8GB,much]": r"bad pipeline\.memory_bytes.*24GB",
    "pipeline.memory_bytes=[]": r"bad pipeline\.memory_bytes.*\[24GB,80GB\]",
    "pipeline.memory_bytes=[8GB,null]": r"bad pipeline\.memory_bytes.*\[24GB,80GB\]",
}


@pytest.mark.parametrize("word", CASES)
def test_command_line_error_is_one_line_with_a_suggestion(word):
    """Regression: Hydra advised +pipeline.microbatch=4, which was then rejected."""
    with pytest.raises(ConfigError, match=CASES[word]) as refusal:
        compose_config([word])
    text = str(refusal.value)
    assert text.startswith("config: ") and "\n" not in text and "append to your config" not in text
    # Commands print this traceback above the error; frames of Hydra would not help a user.
    assert users_traceback(refusal.value) == ""


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("--steps=5", "train.steps=5"),
        ("--batch-size=8", "train.batch_size=8"),
        ("--lr", "optimizer.lr=..."),
        ("-pipeline.stages=4", "pipeline.stages=4"),
        ("--schedul=gpipe", "pipeline.schedule=gpipe"),
    ],
)
def test_option_with_dashes_suggests_the_setting(monkeypatch, capsys, word, meant):
    """Regression: `plan --steps=5` printed the usage of Hydra's own command line."""
    monkeypatch.setattr("sys.argv", ["plan", word])
    assert run_jobs(lambda job: 0, "plan") == 2
    output = capsys.readouterr()
    assert f"config: cannot read '{word}', expected NAME=VALUE" in output.err
    assert f"did you mean {meant}?" in output.err and "usage:" not in output.err + output.out


def test_removed_setting_in_a_file_is_reported_as_removed(tmp_path, monkeypatch):
    """Regression: it was rejected as an unknown key, in Hydra's words."""
    folder = shutil.copytree(conf_dir(), tmp_path / "conf")
    text = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(f"{text}\ntrain:\n  fuse_accumulation: true\n")
    monkeypatch.setenv("GPIPE_HPC_CONF", str(folder))
    with pytest.raises(ConfigError, match=r"train\.fuse_accumulation was removed"):
        compose_config()


def test_single_value_for_a_list_is_rejected():
    with pytest.raises(ConfigError, match=r"bad data\.paths: Invalid value assigned: str.*list"):
        compose_config(["data=tokens", "data.paths=a.bin"])


def test_error_outside_hydra_is_not_a_composition_error():
    """Only errors raised within Hydra are user errors; a bug of gpipe_hpc keeps its traceback."""
    with pytest.raises(ZeroDivisionError) as raised:
        _ = 1 / 0
    assert not is_of_composing(raised.value)
