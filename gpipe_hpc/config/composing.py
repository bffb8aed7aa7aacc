"""From YAML files and overrides to plain dataclasses; nothing behind this knows Hydra."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING as MISSING_DEFAULT
from dataclasses import Field, field, fields, is_dataclass, make_dataclass
from types import MappingProxyType
from typing import Any, Final, NamedTuple, get_origin, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from gpipe_hpc.config.complaints import complaint, misfit, no_group, of_composing, taken_away
from gpipe_hpc.config.data import DataConfig
from gpipe_hpc.config.kinds import data_config
from gpipe_hpc.config.presets import as_written, conf_dir, current_target, preset, presets
from gpipe_hpc.config.removed import refusal_of_removed
from gpipe_hpc.config.schema import Config
from gpipe_hpc.config.schemas import SCHEMAS
from gpipe_hpc.config.spelling import spell
from gpipe_hpc.errors import ConfigError

# What presets of conf/model are trained on that refer to settings of data, by their builder.
_DATA_FOR: Final = (
    ("build_mlp", "synthetic_vectors"),
    ("build_gpt", "python_source"),
    ("build_small_resnet", "digits"),
    ("build_unet", "synthetic_masks"),
    ("", "synthetic_images"),
)


# Keywords of somebody's function: any key is welcome, without Hydra's leading plus.
_OPEN: Final = ("model", "data", "loss", "pipeline.options", "pipeline.pins", "plan.precisions")


_OURS: Final = "gpipe_hpc"  # what Hydra is told of who has given it a schema


def register_schemas() -> None:
    """Tell Hydra the schema; ``conf/`` names it as ``/schema/...`` in its defaults lists.

    Once in a process: that takes a quarter of the time in which settings are composed.
    """
    stored = ConfigStore.instance().repo.get("schema", {})
    if all(getattr(stored.get(f"{name}.yaml"), "provider", "") == _OURS for name, _ in SCHEMAS):
        return
    for name, schema in SCHEMAS:
        node = OmegaConf.structured(_composed() if schema is Config else schema)
        if schema is Config:
            for section in _OPEN:
                OmegaConf.set_struct(OmegaConf.select(node, section), False)
        ConfigStore.instance().store(group="schema", name=name, node=node, provider=_OURS)


def _composed() -> type:
    """Return the schema while settings are composed: the kind of data gives its types later."""
    hints = get_type_hints(Config) | {"data": dict[str, Any]}
    found: list[Any] = []
    for each in fields(Config):
        own = field(default_factory=dict) if each.name == "data" else _same_default(each)
        found.append((each.name, hints[each.name], own))
    return make_dataclass("Composed", found)


def _same_default(each: Field[Any]) -> Any:
    if each.default_factory is not MISSING_DEFAULT:
        return field(default_factory=each.default_factory)
    return field(default=each.default)


class Told(NamedTuple):
    """What Hydra was told: overrides as they were given, and the preset of each group."""

    words: Sequence[str] = ()
    choices: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def of(cls, hydra: Any) -> "Told":
        """Return what Hydra's own settings say."""
        # Not resolved: words may hold interpolations, which mean settings, not Hydra's own.
        words = OmegaConf.to_container(hydra.overrides.task, resolve=False)
        assert isinstance(words, list), f"overrides are a list, got {words!r}"
        return cls(tuple(map(str, words)), dict(hydra.runtime.choices))


def load_config(composed: DictConfig, told: Told, *, reads_data: bool = True) -> Config:
    """Turn what Hydra composed into plain dataclasses; raise ConfigError where that fails.

    `reads_data`: without, the kind of data is not loaded, nor its settings looked at.
    """
    _refuse_taken_away(told)
    _forget_replaced(composed, told)
    try:
        plain = OmegaConf.to_object(composed)
    except InterpolationKeyError as error:
        raise ConfigError(
            f"config: {error.full_key} refers to a setting that this combination lacks, expected "
            f"one that there is, got: {str(error).splitlines()[0]}; choose groups that fit each "
            f"other ({_fitting_groups(composed)}) or set {error.full_key} by hand"
        ) from None
    except OmegaConfBaseException as error:
        raise misfit(error) from None
    assert is_dataclass(plain), f"conf/config.yaml is not under the schema: {type(plain)}"
    _refuse_forced_keys(plain, "")
    _refuse_misplaced(plain, "")
    for name, section in vars(plain).items():
        try:
            OmegaConf.structured(section) if is_dataclass(section) else None
        except OmegaConfBaseException as error:  # what lists hold was not looked at
            raise misfit(error, name) from None
    found = vars(plain)
    chosen = preset("data", told.choices.get("data"))
    data = data_config(found["data"], chosen) if reads_data else DataConfig()
    config = Config(**found | {"data": data})
    spell(config)
    return config


def _refuse_taken_away(told: Told) -> None:
    """Refuse ``~train``: only keywords of somebody's function may be left out.

    Hydra takes the section away, and the schema's own defaults would stand in its place in silence.
    """
    for word in told.words:
        name = word[1:].partition("=")[0]
        if word.startswith("~") and not name.startswith(tuple(f"{each}." for each in _OPEN)):
            raise taken_away(word)


def _forget_replaced(composed: DictConfig, told: Told) -> None:
    """Drop what a preset says for a target that another has taken the place of.

    `model._target_=my.module.build` still has the sizes of model=gpt behind it: only keywords that
    the user has set himself are meant for his function.
    """
    for section in ("model", "data"):
        chosen = preset(section, told.choices.get(section))
        now = as_written(composed[section])
        if current_target(str(now.get("_target_"))) == str(chosen.get("_target_")):
            continue
        given = _given(section, told.words)
        for key, value in chosen.items():
            if key not in given and key != "_target_" and key in now and now[key] == value:
                del composed[section][key]


def _given(section: str, words: Sequence[str]) -> set[str]:
    """Return the settings of a section that overrides name."""
    found: set[str] = set()
    for override in OverridesParser.create().parse_overrides(list(words)):
        top, _, rest = override.key_or_group.partition(".")
        if top == section and rest:
            found.add(rest.partition(".")[0])
        elif top == section and isinstance(value := override.value(), dict):
            found |= set(map(str, value))
    return found


def _fitting_groups(composed: DictConfig) -> str:
    """Say which data the preset goes with that the model was made from."""
    model = as_written(composed.model)
    # Overrides aside, it is the one with which most settings agree.
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


def _refuse_misplaced(section: Any, path: str) -> None:
    """Refuse what stands for a group and is none, or another one, as in ``lr=${train.seed}``.

    OmegaConf does not look at the type of what a reference brings.
    """
    hints = get_type_hints(type(section))
    for name, value in vars(section).items():
        kind: type = get_origin(hints[name]) or hints[name]
        if not (kind is dict or is_dataclass(kind)):
            continue
        is_data = path + name == "data"  # not yet of its own class
        if not isinstance(value, dict if is_data else kind):
            other = is_dataclass(value) or isinstance(value, dict)
            raise no_group(f"{path}{name}", "(another group)" if other else value)
        if is_dataclass(value):
            _refuse_misplaced(value, f"{path}{name}.")


def compose_config(overrides: Sequence[str] = (), *, reads_data: bool = True) -> Config:
    """Compose the settings as the command line would, for tests and for use as a library.

    `reads_data`: without, the kind of data, and with it torch, is not loaded.
    """
    register_schemas()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            composed = compose("config", list(overrides), return_hydra_config=True)
    except Exception as error:
        if not of_composing(error):
            raise
        raise complaint(error, overrides) from None
    told = Told.of(composed.hydra)
    with open_dict(composed):
        del composed["hydra"]
    return load_config(composed, told, reads_data=reads_data)


def written(config: Config) -> dict[str, Any]:
    """Return all settings as a run folder's file has them, of plain dicts, lists and values."""
    told = vars(config) | {"data": config.data.written()}
    return {name: _plain(each) for name, each in told.items()}


def _plain(value: Any) -> Any:
    # A run asks for this several times, and OmegaConf takes thirty times as long.
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return list(map(_plain, value)) if isinstance(value, list | tuple) else value


def config_yaml(config: Config) -> str:
    """Return all settings as the YAML text that a run folder keeps."""
    return OmegaConf.to_yaml(OmegaConf.create(written(config)))
