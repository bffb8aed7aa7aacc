"""What Hydra and OmegaConf complain of, said in our own form and with the nearest right name."""

import re
import types
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from gpipe_hpc.config.presets import presets_with, settings_of_presets
from gpipe_hpc.config.refusal import refuse
from gpipe_hpc.config.removed import refusal_of_removed
from gpipe_hpc.config.schema import Config, OuterConfig
from gpipe_hpc.config.schemas import SCHEMAS
from gpipe_hpc.config.spelling import nearest, suggestion
from gpipe_hpc.errors import ConfigError

_WORDS: Final = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    list: "a list",
    dict: "settings of its own",
}


_GROUPS: Final = ("data", "optimizer", "outer")


def complaint(error: Exception) -> ConfigError:
    """Return the ConfigError that says what is wrong with the command line, and the remedy."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        return _missing_preset(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(error, ConfigCompositionException):
        return _misfit(error)
    return ConfigError(f"config: {_first_line(error)}")


def _missing_preset(error: MissingConfigException) -> ConfigError:
    group, _, name = str(error.missing_cfg_file).rpartition("/")
    options = list(error.options or ())
    shown = ", ".join(options)
    return ConfigError(
        f"config: no preset {group}={name}, expected one of {shown or 'those of conf/'}, got "
        f"{name!r}; {suggestion(name, options)}choose one of them"
    )


def _unreadable(error: OverrideParseException) -> ConfigError:
    word = str(getattr(error, "override", "") or "")
    if word and "=" not in word:
        return ConfigError(
            f"config: cannot read {word!r}, expected NAME=VALUE, got no value; "
            f"{suggestion(word, settings())}write NAME=VALUE, and see --help"
        )
    return ConfigError(
        f"config: cannot read {word or 'the settings'!r}, expected NAME=VALUE with a list as "
        f"[1,2] and quotes around what holds spaces, got: {_first_line(error)}; correct it"
    )


def _misfit(error: ConfigCompositionException) -> ConfigError:
    cause = error.__cause__
    key, value = _override(error)
    in_a_file = getattr(error.__context__, "full_key", None)
    removed = refusal_of_removed(key or str(in_a_file), value)
    if removed is not None:
        return removed
    if isinstance(cause, ConfigKeyError | AttributeError) and key:
        return unknown_setting(key)
    if isinstance(cause, OmegaConfBaseException) and key:
        return wrong_type(key, value, cause, _type_of(key))
    if key and "." not in key and key not in {each.name for each in fields(Config)}:
        return unknown_setting(key)
    return ConfigError(f"config: {' '.join(str(error).split())}")


def _override(error: Exception) -> tuple[str, str]:
    """Return the name and the value that were given, as far as the message tells."""
    text = str(error)
    merging = re.search(r"Error merging override ([^=\s]+)=(.*)", text)
    if merging:
        return merging[1].lstrip("+~"), merging[2]
    could_not = re.search(r"Could not (?:override|append|delete)[^']*'([^']+)'", text)
    return (could_not[1], "") if could_not else ("", "")


def unknown_option(word: str) -> ConfigError:
    """Return the ConfigError for a word such as ``--steps=5``: settings have no dashes."""
    name, _, value = word.lstrip("-").partition("=")
    wanted = name.replace("-", "_")
    every = list(settings())
    last = {each: each.rpartition(".")[2] for each in every}
    found = wanted if wanted in last.values() else nearest(wanted, last.values())
    same = [wanted] if wanted in every and "." in wanted else []
    same = same or [each for each in every if last[each] == found]
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


def unknown_setting(key: str) -> ConfigError:
    """Return the ConfigError for a setting that is not there, with what was probably meant."""
    section, _, name = key.rpartition(".")
    own = [each for each in settings() if each.rpartition(".")[0] == section]
    kinds = presets_with(section, name) if section in _GROUPS else []
    if kinds:
        return ConfigError(
            f"config: {key} is no setting of the chosen {section}, expected one of its own, got "
            f"{key}; it belongs to {section}={', '.join(kinds)}: choose that"
        )
    names = [each.rpartition(".")[2] for each in own]
    if name == "_target_":
        return ConfigError(
            f"config: {section} takes no function of your own, expected one of "
            f"{', '.join(names)}, got {key}; only model, data and loss have a _target_"
        )
    meant = nearest(name, names)
    found = f"{section}.{meant}" if section and meant else nearest(key, settings())
    is_section = found is not None and key.startswith(f"{found}.")  # which is right already
    hint = f"did you mean {found}? " if found and not is_section else ""
    expected = ", ".join(names) if section and own else _sections()
    return ConfigError(
        f"config: unknown setting {key}, expected one of {expected}, got {key}; {hint}see --help"
    )


def wrong_type(key: str, value: object, cause: OmegaConfBaseException, hint: Any) -> ConfigError:
    """Return the ConfigError for a value of another type than `hint` says; None: any type."""
    kind = _plain(hint)
    if kind is not None and is_dataclass(kind):
        inner = [f"{key}.{each.name}" for each in fields(kind)]
        same = [each for each in settings() if each != key and each.rpartition(".")[2] == key]
        hint = f"did you mean {same[0]}={value}? " if same else ""
        return ConfigError(
            f"config: {key} is a group of settings, expected one of {', '.join(inner)}, got "
            f"{key}={value}; {hint}name the setting in it"
        )
    expected = _WORDS.get(kind) if kind is not None else None
    remedy = f"write it as {key}=[{value}]" if kind is list else f"correct {key}"
    return refuse(key, expected or _first_line(cause), value, remedy)


def settings() -> Iterator[str]:
    """Yield the dotted names of all settings, those of every kind of data and optimizer too."""
    seen: set[str] = set()
    for name, _ in _typed():
        if name not in seen:
            seen.add(name)
            yield name


def _type_of(key: str) -> Any:
    """Return what a setting is: a type, a dataclass for a group, None if it may be anything."""
    for name, kind in _typed():
        if name == key:
            return kind
    return None


def _typed() -> Iterator[tuple[str, Any]]:
    yield from _below(Config, "")
    for _, schema in SCHEMAS:
        if schema is not Config:
            group = "outer" if issubclass(schema, OuterConfig) else "optimizer"
            yield from _below(schema, f"{group}.")
    for name in settings_of_presets("data"):
        yield f"data.{name}", None


def _below(schema: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    hints = get_type_hints(schema)
    for each in fields(schema):
        kind = _plain(hints[each.name])
        yield f"{prefix}{each.name}", kind
        if kind is not None and is_dataclass(kind):
            yield from _below(kind, f"{prefix}{each.name}.")


def _plain(hint: Any) -> Any:
    """Return the type behind ``X | None`` and ``list[X]``; None for any."""
    if hint is None:
        return None
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(each for each in get_args(hint) if each is not type(None))
    origin = get_origin(hint) or hint
    return None if origin is Any else origin


def _sections() -> str:
    return ", ".join(each.name for each in fields(Config))


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


EXPECTED: Final = (HydraException, OmegaConfBaseException)
"""What composing raises for a command line that cannot be."""
