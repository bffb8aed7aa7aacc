"""What a run folder holds is read by the export, not run."""

import sys
from pathlib import Path

import pytest
import yaml
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline
from gpipe_hpc.config import build_stored_model, compose_config
from gpipe_hpc.config.targets import trusted_function
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.export import export_checkpoint
from gpipe_hpc.export.__main__ import _stored_model, export_run
from gpipe_hpc.models import build_mlp
from gpipe_hpc.report.__main__ import write_report
from gpipe_hpc.verify.run import verify
from tests.support import train_here

EVIL = """
from pathlib import Path
from torch import nn
Path({mark!r}).touch()
def build(**_):
    return [nn.Linear(2, 2)]
"""


@pytest.fixture
def run(tmp_path: Path):
    """Return a function that makes a run folder whose settings name a target."""
    pytest.importorskip("safetensors", reason="safetensors is not installed")

    def make(target, **keywords):
        settings = {"model": {"_target_": target, **keywords}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
        pipe = Pipeline(build_mlp(widths=(2, 2)), nn.MSELoss())
        path = tmp_path / "checkpoints" / "step_00000000"
        if not path.exists():
            pipe.save(path)
        return tmp_path

    return make


def export(folder, trust=False):
    return export_run(compose_config([f"run.dir={folder}", f"export.trust={trust}"]))


@pytest.mark.parametrize(
    "target",
    [
        "os.system",
        "builtins.eval",
        "subprocess.run",
        "evil.build",
        "gpipe_hpc.evil.build",
        "gpipe_hpc.models.evil.build",
        "gpipe_hpc.config.targets.import_module",
        "gpipe_hpc.config.build_target",
        "gpipe_hpc.models.huggingface.library.import_module",
        "gpipe_hpc.models.huggingface.library.transformers_part",
        "gpipe_hpc.models.LayerSpec",
        "gpipe_hpc.models.zoo.names.partial",
        "gpipe_hpc.models._target_",
        "gpipe_hpc.models.__import__",
        "gpipe_hpc.models.nn",
        "gpipe_hpc.models",
        "",
        None,
        3,
        ["os.system"],
        {"_target_": "os.system"},
    ],
)
def test_a_target_that_is_no_model_of_ours_is_refused_and_not_imported(
    run, tmp_path, monkeypatch, target
):
    """It was imported and called, whatever it was."""
    mark = tmp_path / "mark"
    (tmp_path / "evil.py").write_text(EVIL.format(mark=str(mark)))
    monkeypatch.syspath_prepend(tmp_path)
    folder = run(target, command=f"touch {mark}")
    with pytest.raises(ConfigError, match=r"_target_ of .*config\.yaml is not called.*export\.tr"):
        export(folder)
    assert not mark.exists() and "evil" not in sys.modules
    assert not (folder / "exported").exists()


def test_a_target_within_a_trusted_one_is_not_called(run, tmp_path):
    """Hydra's instantiate follows nested targets, so stored settings do not reach it."""
    mark = tmp_path / "mark"
    inner = {"_target_": "os.mkdir", "_args_": [str(mark)]}
    with pytest.raises(ConfigError):
        export(run("gpipe_hpc.models.build_mlp", widths=inner))
    with pytest.raises(ConfigError):
        export(run("gpipe_hpc.models.build_mlp", widths=[2, inner]))
    assert not mark.exists()


def test_resume_verify_and_report_call_nothing_of_a_run_folder(tmp_path, monkeypatch, tiny):
    """Its config.yaml may be anybody's: it is compared and shown, and what it names is not run."""
    words = [*tiny, "train.steps=2", f"run.dir={tmp_path}/run"]
    train_here(1, *words, "train.stop_at=1")
    mark, path = tmp_path / "mark", tmp_path / "run" / "config.yaml"
    (tmp_path / "evil.py").write_text(EVIL.format(mark=str(mark)))
    monkeypatch.syspath_prepend(tmp_path)
    text = path.read_text()
    hostile = yaml.safe_load(text)
    for section in ("model", "data", "loss", "optimizer"):
        hostile[section] = {"_target_": "evil.build", "x": "${oc.env:HOME}"}
    for stored in (yaml.safe_dump(hostile), text + f"x: !!python/object/apply:os.mkdir ['{mark}']"):
        path.write_text(stored)
        verify(compose_config([*words, "verify.steps=1"]))
        write_report(compose_config([f"run.dir={tmp_path}/run"]))
        train_here(1, *words)
        assert not mark.exists() and "evil" not in sys.modules


def test_with_trust_a_model_of_ones_own_is_exported(run, tmp_path, monkeypatch):
    mark = tmp_path / "mark"
    (tmp_path / "mine_of_test_trust.py").write_text(EVIL.format(mark=str(mark)))
    monkeypatch.syspath_prepend(tmp_path)
    folder = run("mine_of_test_trust.build")
    assert (export(folder, trust=True) / "model.safetensors").exists()
    assert mark.exists()


def test_a_model_of_ours_is_exported(run):
    folder = run("gpipe_hpc.models.build_mlp", widths=[2, 2])
    assert (export(folder) / "model.safetensors").exists()


def test_every_preset_is_trusted(repository):
    trusted = []
    for preset in sorted((repository / "conf" / "model").glob("*.yaml")):
        settings = yaml.safe_load(preset.read_text())
        if settings["_target_"] is not None:  # model=own, where the user names it
            trusted_function(settings, str(preset))
            trusted.append(preset.stem)
    assert {"gpt", "bert48", "resnet_small"} <= {*trusted}


def test_what_settings_refer_to_is_not_looked_up(tmp_path, monkeypatch):
    """Resolvers read the environment, and others may be registered that do more."""
    monkeypatch.setenv("SECRET", "gpipe_hpc.models.build_mlp")
    settings = tmp_path / "config.yaml"
    settings.write_text("model: {_target_: gpipe_hpc.models.build_mlp, x: '${oc.env:SECRET}'}")
    assert _stored_model(settings)["x"] == "${oc.env:SECRET}"
    for text in ("model: {_target_: '${oc.env:SECRET}'}", "model: '${oc.create:{_target_: x}}'"):
        settings.write_text(text)
        with pytest.raises(ConfigError):
            build_stored_model(_stored_model(settings), "config.yaml", trusts=False)


@pytest.mark.parametrize("text", ["", "[", "model: 3", "a: &a [*a]", "!!python/object:x.Y {}"])
def test_settings_that_are_none_are_refused(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"is not a run folder; its config\.yaml cannot be used"):
        _stored_model(tmp_path / "config.yaml")


def test_yaml_makes_no_objects(tmp_path):
    mark = tmp_path / "mark"
    (tmp_path / "config.yaml").write_text(f"model: !!python/object/apply:os.mkdir ['{mark}']")
    with pytest.raises(ConfigError):
        _stored_model(tmp_path / "config.yaml")
    assert not mark.exists()


def test_a_damaged_newest_one_is_passed_over_with_a_warning(run, caplog):
    folder = run("gpipe_hpc.models.build_mlp", widths=[2, 2])
    pipe = Pipeline(build_mlp(widths=(2, 2)), nn.MSELoss())
    pipe.steps_done = 1
    newest = pipe.save(folder / "checkpoints" / "step_00000001")
    (newest / ".metadata").write_bytes(b"")
    assert export(folder).name == "step_00000000"
    assert f"damaged checkpoint, resuming from {folder}/checkpoints/step_00000000" in caplog.text


class Keeping(nn.Linear):
    """A layer with a state that no file of safetensors can hold."""

    def get_extra_state(self):
        return {"calls": 3}

    def set_extra_state(self, state):
        pass


def test_extra_states_are_left_out_with_a_warning(tmp_path, caplog):
    """It ended in an AttributeError: the state has no shape."""
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    layers = [LayerSpec(Keeping, 2, 2)]
    Pipeline(layers, nn.MSELoss()).save(tmp_path / "kept")
    folder = export_checkpoint(tmp_path / "kept", layers, tmp_path / "exported")
    found = safetensors.load_file(folder / "model.safetensors")
    assert found.keys() == {"layers.0.weight", "layers.0.bias"}
    assert "layers.0._extra_state is left out" in caplog.text


def test_a_second_export_is_told_a_name_that_is_free(run):
    """The name was fixed: who was told to name another folder could not."""
    pytest.importorskip("safetensors", reason="safetensors is not installed")
    folder = run("gpipe_hpc.models.build_mlp", widths=[2, 2])
    first = export(folder)
    with pytest.raises(ConfigError, match=r"export.out, expected a new folder.*set export\.out="):
        export(folder)
    with pytest.raises(ConfigError) as refusal:
        export(folder)
    name = str(refusal.value).rpartition("export.out=")[2]
    again = export_run(compose_config([f"run.dir={folder}", f"export.out={name}"]))
    assert again != first and (again / "model.safetensors").exists()
