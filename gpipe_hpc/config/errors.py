"""Check the names on a command line before Hydra does, and shorten Hydra's own messages."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache
from types import MappingProxyType
from typing import Final

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException

from gpipe_hpc.config.removed import refusal_of_removed
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings import (
    OPTIMIZERS,
    Config,
    ImageDataConfig,
    Setting,
    TokenDataConfig,
    nearest,
    refuse,
    settings_of,
    suggestion,
)

OPEN_SECTIONS: Final = (
    "model",
    "data",
    "loss",
    "pipeline.options",
    "pipeline.pins",
    "plan.precisions",
)
"""Sections that contain keywords of a function: any key may be set, without Hydra's plus sign."""

GROUPS: Final = ("model", "data", "optimizer", "outer")
"""Sections of which ``NAME=PRESET`` chooses a preset."""


@cache
def all_settings() -> Mapping[str, Setting]:
    """Return all settings by dotted name, including those of every optimizer and common data."""
    found = [setting for kind in OPTIMIZERS.values() for setting in settings_of(kind, "optimizer.")]
    for kind in (TokenDataConfig, ImageDataConfig):
        found += settings_of(kind, "data.")
    return MappingProxyType({each.name: each for each in (*settings_of(Config), *found)})


# Settings of other trainers, with what to do here instead.
_ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tokenizer": "data=text uses bytes as tokens; for another tokenizer, write its token ids "
        "to files and read them with data=tokens data.paths=[FOLDER] (docs/how-to/data.md)"
    }
)


def check_arguments(words: Sequence[str]) -> None:
    """Raise ConfigError for arguments of a command line that name no setting.

    Hydra checks values and names of presets. Its own messages about names give advice that does not
    apply here (``+train.step=5``).
    """
    parser = OverridesParser.create()
    for word in words:
        if not word.lstrip("+~").partition("=")[0].strip():
            raise ConfigError(
                f"config: cannot read {word!r}, expected NAME=VALUE, got no name; correct or "
                f"remove it"
            )
        try:
            override = parser.parse_override(word)
        except HydraException as error:
            raise _unreadable(word, error) from None
        _check_name(word, override)


def _unreadable(word: str, error: Exception) -> ConfigError:
    if "=" not in word:
        return ConfigError(
            f"config: cannot read {word!r}, expected NAME=VALUE, got no value; "
            f"{suggestion(word, all_settings())}write NAME=VALUE, and see --help"
        )
    return ConfigError(
        f"config: cannot read {word!r}: {_one_line(error)}; write NAME=VALUE, a list as [1,2], and "
        f"quotes around a value with spaces"
    )


def _check_name(word: str, override: Override) -> None:
    name, known = override.key_or_group, all_settings()
    section = name.partition(".")[0]
    if section == "hydra" or name.startswith("hydra/") or "/" in name or "@" in word:
        return
    if name in GROUPS and not word.startswith("~"):
        _check_preset(name, override)
        return
    if any(name.startswith(f"{each}.") for each in OPEN_SECTIONS):
        return
    value = word.partition("=")[2]
    removed = refusal_of_removed(name, value)
    if removed is not None:
        raise removed
    above = next((n for n in _parents(name) if n in known), None)
    if above is not None:
        raise ConfigError(
            f"config: {above} is a single setting, expected {above}=VALUE, got {word}; leave out "
            f"{name.removeprefix(above)}"
        )
    is_group = name in _group_names()
    if name not in known and not is_group:
        raise unknown_setting(name)
    if word.startswith("~"):
        raise ConfigError(
            f"config: {name} cannot be removed, because every setting has a value, got {word}; "
            f"leave this out for the default"
        )
    if word.startswith("+") and not word.startswith("++"):
        raise ConfigError(
            f"config: {name} exists already and cannot be added, got {word}; write {name}=VALUE"
        )
    if not is_group or name in OPEN_SECTIONS or override.is_sweep_override():
        return
    if not isinstance(override.value(), dict) and "${" not in value:
        raise group_error(name, value)


def _check_preset(group: str, override: Override) -> None:
    value = None if override.is_sweep_override() else override.value()
    if not override.is_sweep_override() and not isinstance(value, str | dict):
        raise refuse(group, "the name of a preset", value, f"choose one, as {group}=NAME")


def _parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[:number]) for number in range(len(parts) - 1, 1, -1))


@cache
def _group_names() -> frozenset[str]:
    """Return the dotted names of all sections."""
    found = {each.name for each in fields(Config)} | set(OPEN_SECTIONS)
    return frozenset(found | {parent for name in all_settings() for parent in _parents(name)})


def unknown_setting(key: str) -> ConfigError:
    """Return the error for an unknown setting, with the most similar known name."""
    section, _, name = key.rpartition(".")
    own = [each.rpartition(".")[2] for each in all_settings() if each.startswith(f"{section}.")]
    if name == "_target_":
        return ConfigError(
            f"config: {section} has no _target_, expected one of {', '.join(own)}, got {key}; only "
            f"model, data and loss accept a _target_"
        )
    if name in _ELSEWHERE:
        return ConfigError(f"config: unknown setting {key}; {_ELSEWHERE[name]}")
    meant = nearest(name, own)
    found = (
        f"{section}.{meant}"
        if section and meant
        else nearest(key, {*all_settings(), *_group_names()})
    )
    is_section = found is not None and key.startswith(f"{found}.")  # this part is right
    hint = f"did you mean {found}? " if found and not is_section else ""
    expected = ", ".join(own) if section and own else ", ".join(e.name for e in fields(Config))
    return ConfigError(
        f"config: unknown setting {key}, expected one of {expected}, got {key}; {hint}see --help"
    )


def unknown_option(word: str) -> ConfigError:
    """Return the error for an option such as ``--steps=5``, with the setting probably meant."""
    name, _, value = word.lstrip("-").partition("=")
    wanted = name.replace("-", "_")
    last = {each: each.rpartition(".")[2] for each in all_settings()}
    found = wanted if wanted in last.values() else nearest(wanted, last.values())
    same = [wanted] if wanted in last else [each for each in last if last[each] == found]
    meant = min(same, key=_by_use, default=None)
    hint = f"did you mean {meant}={value or '...'}? " if meant else ""
    return ConfigError(
        f"config: cannot read {word!r}, expected NAME=VALUE, got an option with a dash; {hint}see "
        f"--help"
    )


_MUCH_USED: Final = ("train", "pipeline", "optimizer", "data", "model")


def _by_use(setting: str) -> int:
    section = setting.partition(".")[0]
    return _MUCH_USED.index(section) if section in _MUCH_USED else len(_MUCH_USED)


def group_error(key: str, value: object) -> ConfigError:
    """Return the error for a single value in place of a section of settings."""
    inner = [each for each in all_settings() if each.startswith(f"{key}.")] or [f"{key}.NAME"]
    same = [each for each in all_settings() if each.rpartition(".")[2] == key]
    hint = f"did you mean {same[0]}={value}? " if same else ""
    return ConfigError(
        f"config: {key} is a group of settings, got {key}={value}; {hint}set one of "
        f"{', '.join(inner)}"
    )


def composing_error(error: BaseException, section: str = "") -> ConfigError:
    """Convert an error of Hydra or OmegaConf into a ConfigError with a message of one line.

    Args:
        error: The error.
        section: Section of the settings that were composed; empty for all settings.
    """
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        group, _, name = str(error.missing_cfg_file).rpartition("/")
        options = list(error.options or ())
        return ConfigError(
            f"config: no preset {group}={name}, expected one of {', '.join(options)}, got "
            f"{name!r}; {suggestion(name, options)}choose one of them"
        )
    cause: BaseException = error
    if isinstance(error, HydraException):
        inner = error.__cause__ or error.__context__
        cause = inner if isinstance(inner, OmegaConfBaseException) else error
    setting = getattr(cause, "full_key", None)
    if setting and section:
        setting = f"{section}.{setting}"
    removed = refusal_of_removed(str(setting))
    if removed is not None:
        return removed
    if isinstance(cause, ConfigKeyError | ConfigAttributeError) and setting:
        return _of_another_optimizer(setting)
    where = f"bad {setting}: " if setting and setting != "_dummy_" else ""
    return ConfigError(f"config: {where}{_one_line(cause)}; correct it, or see --help")


def _of_another_optimizer(setting: str) -> ConfigError:
    """Return the error for a setting that the chosen optimizer does not have."""
    name = setting.removeprefix("optimizer.")
    kinds = [kind for kind, schema in OPTIMIZERS.items() if hasattr(schema(), name)]
    if name == setting or not kinds:
        return unknown_setting(setting)
    return ConfigError(
        f"config: {setting} is not a setting of the chosen optimizer; use it with "
        f"optimizer={' or optimizer='.join(kinds)}, or leave it out"
    )


def _one_line(error: BaseException) -> str:
    """Return a message of Hydra or OmegaConf in one line, without details about the schema."""
    details = ("full_key:", "object_type=", "reference_type=")
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(details))


_PACKAGES: Final = frozenset({"hydra", "omegaconf", "antlr4", "yaml"})


def is_of_composing(error: Exception) -> bool:
    """Return whether an error was raised by Hydra, OmegaConf or their parsers."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    is_known = isinstance(error, HydraException | OmegaConfBaseException)
    return is_known or module.partition(".")[0] in _PACKAGES
