"""From YAML files and overrides to plain dataclasses; nothing behind this knows Hydra."""

import os
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from gpipe_hpc.config.complaints import EXPECTED, complaint
from gpipe_hpc.config.removed import refusal_of_removed
from gpipe_hpc.config.schema import Config
from gpipe_hpc.config.schemas import SCHEMAS
from gpipe_hpc.config.spelling import spell
from gpipe_hpc.errors import ConfigError

_CONF_MARK: Final = "# gpipe_hpc:"

# What presets of conf/model are trained on that refer to settings of data, by their builder.
_DATA_FOR: Final = (
    ("build_mlp", "synthetic_vectors"),
    ("build_gpt", "python_source"),
    ("build_small_resnet", "digits"),
    ("build_unet", "synthetic_masks"),
    ("", "synthetic_images"),
)


# Keywords of somebody's function: any key is welcome, without Hydra's leading plus.
_OPEN: Final = ("model", "loss", "pipeline.options")


def register_schemas() -> None:
    """Tell Hydra the schema; ``conf/`` names it as ``/schema/...`` in its defaults lists."""
    for name, schema in SCHEMAS:
        node = OmegaConf.structured(schema)
        if schema is Config:
            for section in _OPEN:
                OmegaConf.set_struct(OmegaConf.select(node, section), False)
        ConfigStore.instance().store(group="schema", name=name, node=node)


def conf_dir() -> Path:
    """Return the folder of the YAML files, from any working directory.

    The first of $GPIPE_HPC_CONF, ``conf/`` beside the package (a checkout, an editable install)
    and ``conf/`` inside it (an installed wheel). Raises ConfigError if none is there.
    """
    package = Path(__file__).resolve().parent.parent
    named = os.environ.get("GPIPE_HPC_CONF")
    candidates = [Path(named).resolve()] if named else [package.parent / "conf", package / "conf"]
    for folder in candidates:
        config = folder / "config.yaml"
        # Installed, package.parent is site-packages: a conf/ there may be anybody's.
        if config.is_file() and config.read_text("utf-8").startswith(_CONF_MARK):
            return folder
    raise ConfigError(
        f"conf: no settings found, expected a config.yaml that starts with {_CONF_MARK!r}, looked "
        f"in {', '.join(map(str, candidates))}; "
        + ("correct $GPIPE_HPC_CONF" if named else "install the package anew")
    )


def load_config(composed: DictConfig) -> Config:
    """Turn what Hydra composed into plain dataclasses; raise ConfigError where that fails."""
    _forget_misfits(composed)
    try:
        config = OmegaConf.to_object(composed)
    except InterpolationKeyError as error:
        raise ConfigError(
            f"config: {error.full_key} refers to a setting that this combination lacks, got: "
            f"{str(error).splitlines()[0]}; choose groups that fit each other "
            f"({_fitting_groups(composed)}) or set {error.full_key} by hand"
        ) from None
    except OmegaConfBaseException as error:
        raise ConfigError(f"config: {error}") from None
    assert isinstance(config, Config), f"conf/config.yaml is not under the schema: {type(config)}"
    _refuse_forced_keys(config, "")
    spell(config)
    return config


def _forget_misfits(composed: DictConfig) -> None:
    """Drop what the preset of another model than the user's would take from other data.

    `model._target_=my.module.build data=synthetic_vectors` still has model=gpt behind it, whose
    sizes refer to tokens.
    """
    presets = [_raw(OmegaConf.load(path)) for path in (conf_dir() / "model").glob("*.yaml")]
    model = _raw(composed.model)
    if model.get("_target_") in [preset["_target_"] for preset in presets]:
        return
    written = [item for preset in presets for item in preset.items()]
    for key, value in model.items():
        if (key, value) in written and _refers_to_nothing(composed.model, key):
            del composed.model[key]


def _fitting_groups(composed: DictConfig) -> str:
    """Say which data the preset goes with that the model was made from."""
    model = _raw(composed.model)
    alike: dict[str, int] = {}
    for path in sorted((conf_dir() / "model").glob("*.yaml")):
        preset = _raw(OmegaConf.load(path))
        if preset["_target_"] == model.get("_target_"):
            # Overrides aside, it is the one with which most settings agree.
            alike[path.stem] = sum(item in model.items() for item in preset.items())
    if not alike:
        return "model=mlp goes with data=synthetic_vectors, model=vgg16 with data=synthetic_images"
    builder = str(model["_target_"]).rpartition(".")[2]
    data = next(data for name, data in _DATA_FOR if builder.startswith(name))
    return f"model={max(alike, key=alike.__getitem__)} goes with data={data}"


def _raw(section: Any) -> dict[Any, Any]:
    raw = OmegaConf.to_container(section, resolve=False)
    assert isinstance(raw, dict), f"expected settings, got {raw!r}"
    return raw


def _refers_to_nothing(section: DictConfig, key: str) -> bool:
    try:
        value = section[key]
        if OmegaConf.is_config(value):
            OmegaConf.to_container(value, resolve=True)
    except InterpolationKeyError:
        return True
    return False


def _refuse_forced_keys(section: Any, path: str) -> None:
    """Refuse what ``++key=value`` forced past the schema: nothing would ever read it."""
    names = [each.name for each in fields(section)]
    for name, value in vars(section).items():
        if name not in names:
            setting = f"{path}{name}"
            raise refusal_of_removed(setting, str(value)) or ConfigError(
                f"config: unknown setting {setting}, expected one of {', '.join(names)}, got "
                f"{setting}={value!r}; correct or remove it"
            )
        if is_dataclass(value):
            _refuse_forced_keys(value, f"{path}{name}.")


def compose_config(overrides: Sequence[str] = ()) -> Config:
    """Compose the settings as the command line would, for tests and for use as a library."""
    register_schemas()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose("config", list(overrides))
    except EXPECTED as error:
        raise complaint(error) from error
    return load_config(composed)


def config_yaml(config: Config) -> str:
    """Return all settings as the YAML text that a run folder keeps."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))
