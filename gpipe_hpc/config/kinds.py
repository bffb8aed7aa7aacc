"""From the data section as it was composed to the settings of its kind."""

from collections.abc import Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any, Final, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe_hpc.config.complaints import unknown_setting, wrong_type
from gpipe_hpc.config.data import DataConfig
from gpipe_hpc.config.presets import current_target, targets
from gpipe_hpc.config.refusal import refuse
from gpipe_hpc.config.targets import locate

_OWN: Final = "gpipe_hpc.training.data.own.OwnDataConfig"


def data_config(settings: Mapping[str, Any], chosen: Mapping[str, Any]) -> DataConfig:
    """Return the settings of the kind of data that ``data._target_`` names, with their types.

    `chosen`: what the preset says that they come from. A target that no preset of ``conf/data/``
    has, or that is no kind, is a user's own data set, and settings that are none of ours are its
    keywords. Raises ConfigError.
    """
    target = settings.get("_target_")
    if not isinstance(target, str):
        remedy = "choose a data=... of conf/data, or data=own data._target_=my.module.dataset"
        raise refuse("data", "a _target_", target, remedy)
    target = current_target(target)
    given = {name: value for name, value in settings.items() if name != "_target_"}
    if target == chosen.get("_target_") or target in targets("data"):
        named = locate("data", target)
        if isinstance(named, type) and issubclass(named, DataConfig):
            return _typed(named, given)
    kind = _own_kind()
    ours = {each.name for each in fields(kind)} - {"target", "keywords"}
    keywords = {name: value for name, value in given.items() if name not in ours}
    known = {name: value for name, value in given.items() if name in ours}
    return _typed(kind, {"target": target, "keywords": keywords, **known})


def _own_kind() -> type[DataConfig]:
    module, _, name = _OWN.rpartition(".")
    kind: type[DataConfig] = getattr(import_module(module), name)
    return kind


def _typed(kind: type[DataConfig], given: Mapping[str, Any]) -> DataConfig:
    node = OmegaConf.structured(kind)
    hints = get_type_hints(kind)
    for name, value in given.items():
        if name not in hints:
            raise unknown_setting(f"data.{name}")
        try:
            node[name] = value
        except OmegaConfBaseException as error:
            raise wrong_type(f"data.{name}", value, error, hints[name]) from None
    typed = OmegaConf.to_object(node)
    assert isinstance(typed, DataConfig), f"a kind of data, got {type(typed).__name__}"
    return typed
