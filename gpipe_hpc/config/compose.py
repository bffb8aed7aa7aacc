"""Compose settings with Hydra, from YAML files and overrides to plain dataclasses."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import Field, field, fields, is_dataclass, make_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from gpipe_hpc.config.errors import (
    OPEN_SECTIONS,
    check_arguments,
    composing_error,
    group_error,
    is_of_composing,
    unknown_setting,
)
from gpipe_hpc.config.removed import refusal_of_removed
from gpipe_hpc.config.targets import locate
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings import OPTIMIZERS, Config, DataConfig, OptimizerConfig, refuse, suggestion

CONF_VARIABLE: Final = "GPIPE_HPC_CONF"
_CONF_MARK: Final = "# gpipe_hpc:"
_OWN_DATA: Final = "gpipe_hpc.data.own.OwnDataConfig"
# Package of the classes of data in settings of older runs, and their package today.
_MOVED: Final = ("gpipe_hpc." + "training.data.", "gpipe_hpc." + "data.")
_PROVIDER: Final = "gpipe_hpc"  # of the schema in Hydra's store

# Data that presets of conf/model refer to, by the beginning of their builder's name.
_DATA_FOR: Final = (
    ("build_mlp", "synthetic_vectors"),
    ("build_gpt", "python_source"),
    ("build_small_resnet", "digits"),
    ("build_unet", "synthetic_masks"),
    ("", "synthetic_images"),
)


def conf_dir() -> Path:
    """Return the folder of the YAML files.

    It is the first that exists of $GPIPE_HPC_CONF, ``conf/`` next to the package (a checkout or an
    editable install) and ``conf/`` in the package (an installed wheel). Raises ConfigError if there
    is none.
    """
    package = Path(__file__).resolve().parent.parent
    named = os.environ.get(CONF_VARIABLE)
    candidates = [Path(named).resolve()] if named else [package.parent / "conf", package / "conf"]
    for folder in candidates:
        config = folder / "config.yaml"
        # If installed, package.parent is site-packages: conf/ there may be of another package.
        if config.is_file() and config.read_text("utf-8").startswith(_CONF_MARK):
            return folder
    raise ConfigError(
        f"conf: found no config.yaml that starts with {_CONF_MARK!r} in "
        f"{', '.join(map(str, candidates))}; "
        + (f"correct ${CONF_VARIABLE}" if named else "reinstall the package")
    )


def presets(group: str) -> dict[str, dict[str, Any]]:
    """Return the settings of each preset of a group by its name, with interpolations unresolved."""
    return {path.stem: _preset(path) for path in sorted((conf_dir() / group).glob("*.yaml"))}


def _preset(path: Path) -> dict[str, Any]:
    return _unresolved(OmegaConf.load(path)) if path.is_file() else {}


def _unresolved(section: Any) -> dict[str, Any]:
    raw = OmegaConf.to_container(section, resolve=False)
    assert isinstance(raw, dict), f"expected settings, got {raw!r}"
    return {str(key): value for key, value in raw.items()}


def data_kind(target: object) -> type[DataConfig]:
    """Return the settings class that ``data._target_`` names; OwnDataConfig for a user's function.

    Only targets of presets in ``conf/data/`` are imported.
    """
    if not isinstance(target, str):
        remedy = "choose a data=... of conf/data, or data=own data._target_=my.module.dataset"
        raise refuse("data", "a _target_", target, remedy)
    target = _current_target(target)
    if target in _targets_of_data():
        named = locate("data", target)
        if isinstance(named, type) and issubclass(named, DataConfig):
            return named
    module, _, name = _OWN_DATA.rpartition(".")
    own: type[DataConfig] = getattr(import_module(module), name)
    return own


def _targets_of_data() -> set[Any]:
    return {each.get("_target_") for each in presets("data").values()}


def _current_target(target: str) -> str:
    """Return the current path of a class of data settings that was moved; others unchanged."""
    if target.startswith(_MOVED[0]) and target not in _targets_of_data():
        return target.replace(*_MOVED)
    return target


def overrides_of(hydra: Any) -> tuple[str, ...]:
    """Return the overrides of a job as given, from Hydra's own settings."""
    # Not resolved: interpolations in overrides refer to settings, not to Hydra's own.
    words = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    assert isinstance(words, list), f"overrides are a list, got {words!r}"
    return tuple(map(str, words))


def register_schemas() -> None:
    """Register the settings in Hydra's ConfigStore.

    ``conf/`` refers to them as ``/schema/...``. Done once in a process: it takes a quarter of the
    time of composing.
    """
    schemas = {"config": _composed(), **OPTIMIZERS}
    stored = ConfigStore.instance().repo.get("schema", {})
    if all(getattr(stored.get(f"{n}.yaml"), "provider", "") == _PROVIDER for n in schemas):
        return
    for name, schema in schemas.items():
        node = OmegaConf.structured(schema)
        if name == "config":
            for section in OPEN_SECTIONS:
                OmegaConf.set_struct(OmegaConf.select(node, section), False)
        ConfigStore.instance().store(group="schema", name=name, node=node, provider=_PROVIDER)


def _composed() -> type:
    """Return the schema for composing, while presets still choose data and optimizer."""
    changed: dict[str, tuple[Any, Any]] = {
        "data": (dict[str, Any], field(default_factory=dict)),
        "optimizer": (OptimizerConfig, MISSING),
    }
    hints = get_type_hints(Config, include_extras=True)
    found = [
        (each.name, *changed.get(each.name, (hints[each.name], _copy(each))))
        for each in fields(Config)
    ]
    return make_dataclass("Composed", found)


def _copy(each: "Field[Any]") -> Any:
    factory: Any = each.default_factory
    return field(default_factory=factory)


def compose_config(overrides: Sequence[str] = (), *, reads_data: bool = True) -> Config:
    """Compose settings from overrides, as the command line does.

    Args:
        overrides: Settings as ``NAME=VALUE``.
        reads_data: If False, model and data stay empty, and torch is not loaded.
    """
    check_arguments(overrides)
    register_schemas()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose("config", list(overrides), return_hydra_config=True)
    except Exception as error:
        if not is_of_composing(error):
            raise
        raise composing_error(error) from None
    hydra = composed.hydra
    with open_dict(composed):
        del composed["hydra"]
    return load_config(composed, hydra, reads_data=reads_data)


def load_config(composed: DictConfig, hydra: Any, *, reads_data: bool = True) -> Config:
    """Convert settings that Hydra composed into plain dataclasses; may raise ConfigError.

    Args:
        composed: The settings.
        hydra: Hydra's own settings.
        reads_data: If False, model and data stay empty, and torch is not loaded.
    """
    kind = DataConfig
    if reads_data:
        _drop_replaced(composed, hydra)
        kind = data_kind(_unresolved(composed.data).get("_target_"))
        _fill_defaults(composed, kind)
    else:
        composed.model, composed.data = {}, {}
    try:
        plain = OmegaConf.to_object(composed)
    except InterpolationKeyError as error:
        raise ConfigError(
            f"config: {error.full_key} refers to a setting that this combination does not have: "
            f"{str(error).splitlines()[0]}; choose groups that fit each other "
            f"({_fitting_groups(composed)}) or set {error.full_key}"
        ) from None
    except OmegaConfBaseException as error:
        raise composing_error(error) from None
    assert is_dataclass(plain), f"conf/config.yaml is not under the schema: {type(plain)}"
    _refuse_forced_keys(plain, "")
    _refuse_misplaced(plain, "")
    found = vars(plain)
    for name, section in found.items():
        try:
            OmegaConf.structured(section) if is_dataclass(section) else None
        except OmegaConfBaseException as error:  # to_object does not check the items of lists
            raise composing_error(error, name) from None
    data = _typed_data(kind, found["data"]) if reads_data else kind()
    config = Config(**found | {"data": data})
    config.normalise()
    return config


def _drop_replaced(composed: DictConfig, hydra: Any) -> None:
    """Remove the keywords of a preset whose ``_target_`` the user has replaced.

    With ``model._target_=my.module.build``, sizes from the preset model=gpt are not passed on: only
    keywords that the user has set are.
    """
    for section in ("model", "data"):
        chosen = _preset(conf_dir() / section / f"{hydra.runtime.choices.get(section)}.yaml")
        now = _unresolved(composed[section])
        if _current_target(str(now.get("_target_"))) == str(chosen.get("_target_")):
            continue
        kept = _named_by_user(section, overrides_of(hydra))
        for key, value in chosen.items():
            if key not in kept and key != "_target_" and key in now and now[key] == value:
                del composed[section][key]


def _named_by_user(section: str, words: Sequence[str]) -> set[str]:
    """Return the keywords of a section that overrides set."""
    found: set[str] = set()
    for override in OverridesParser.create().parse_overrides(list(words)):
        top, _, rest = override.key_or_group.partition(".")
        if top == section and rest:
            found.add(rest.partition(".")[0])
        elif top == section and isinstance(value := override.value(), dict):
            found |= set(map(str, value))
    return found


def _fill_defaults(composed: DictConfig, kind: type[DataConfig]) -> None:
    """Add the defaults of the chosen data, to which settings of the model may refer."""
    defaults = OmegaConf.to_container(OmegaConf.structured(kind))
    assert isinstance(defaults, dict)
    for name in ("target", "keywords") if _is_own(kind) else ():
        del defaults[name]
    composed.data = OmegaConf.merge(OmegaConf.create(defaults), composed.data)


def _is_own(kind: type[DataConfig]) -> bool:
    return f"{kind.__module__}.{kind.__qualname__}" == _OWN_DATA


def _typed_data(kind: type[DataConfig], settings: Mapping[str, Any]) -> DataConfig:
    """Return the settings of the chosen data as its dataclass; may raise ConfigError.

    With data=own, settings that are no fields are keywords of the user's function.
    """
    given = {name: value for name, value in settings.items() if name != "_target_"}
    node = OmegaConf.structured(kind)
    if _is_own(kind):
        ours = {each.name for each in fields(kind)}
        keywords = {name: given.pop(name) for name in [*given] if name not in ours}
        given |= {"target": settings["_target_"], "keywords": keywords}
    for name in given:
        if name not in node:
            raise _unknown_data_setting(kind, name)
        try:
            node[name] = given[name]
        except OmegaConfBaseException as error:
            raise composing_error(error, "data") from None
    typed = OmegaConf.to_object(node)
    assert isinstance(typed, DataConfig), f"a kind of data, got {type(typed).__name__}"
    return typed


def _unknown_data_setting(kind: type[DataConfig], name: str) -> ConfigError:
    if name == "tokenizer":
        return unknown_setting("data.tokenizer")
    removed = refusal_of_removed(f"data.{name}")
    if removed is not None:
        return removed
    own = [each.name for each in fields(kind)]
    others = [
        preset
        for preset, values in presets("data").items()
        if isinstance(values.get("_target_"), str)
        and name in {each.name for each in fields(data_kind(values["_target_"]))}
    ]
    remedy = f"{suggestion(f'data.{name}', [f'data.{each}' for each in own])}see --help"
    if others:
        remedy = f"use it with data={' or data='.join(others)}"
    return ConfigError(
        f"config: data.{name} is not a setting of the chosen data, expected one of "
        f"{', '.join(own)}, got data.{name}; {remedy}"
    )


def _fitting_groups(composed: DictConfig) -> str:
    """Return a sentence that names data for the chosen model preset."""
    model = _unresolved(composed.model)
    # The preset that shares most settings; others may be overrides.
    alike = {
        name: sum(item in model.items() for item in each.items())
        for name, each in presets("model").items()
        if each.get("_target_") == model.get("_target_")
    }
    if not alike:
        return "model=mlp goes with data=synthetic_vectors, model=vgg16 with data=synthetic_images"
    builder = str(model["_target_"]).rpartition(".")[2]
    data = next(data for name, data in _DATA_FOR if builder.startswith(name))
    return f"model={max(alike, key=alike.__getitem__)} goes with data={data}"


def _refuse_forced_keys(section: Any, path: str) -> None:
    """Raise ConfigError for unknown settings that ``++NAME=VALUE`` added to the schema."""
    names = [each.name for each in fields(section)]
    for name, value in vars(section).items():
        if name not in names:
            setting = f"{path}{name}"
            raise refusal_of_removed(setting, str(value)) or unknown_setting(setting)
        if is_dataclass(value):
            _refuse_forced_keys(value, f"{path}{name}.")


def _refuse_misplaced(section: Any, path: str) -> None:
    """Raise ConfigError for a value where a section is expected, such as ``lr=${train.seed}``.

    OmegaConf does not check the type of an interpolated value.
    """
    hints = get_type_hints(type(section))
    for name, value in vars(section).items():
        kind = hints[name]
        is_free = not is_dataclass(kind)
        expects_group = not is_free or getattr(kind, "__origin__", None) is dict
        if expects_group and not isinstance(value, dict if is_free else kind):
            other = is_dataclass(value) or isinstance(value, dict)
            raise group_error(f"{path}{name}", "(another group)" if other else value)
        if is_dataclass(value):
            _refuse_misplaced(value, f"{path}{name}.")


def written(config: Config) -> dict[str, Any]:
    """Return all settings as plain dicts, lists and values, as in the config.yaml of a run."""
    plain = vars(config) | {"data": config.data.written()}
    return {name: _plain(each) for name, each in plain.items()}


def _plain(value: Any) -> Any:
    # Called several times in a run; OmegaConf takes thirty times as long.
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def config_yaml(config: Config) -> str:
    """Return all settings as the YAML text of a run's config.yaml."""
    return OmegaConf.to_yaml(OmegaConf.create(written(config)))
