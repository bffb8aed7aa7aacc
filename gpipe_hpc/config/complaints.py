"""What Hydra and OmegaConf complain of, said in our own form and with the nearest right name."""

import re
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from types import MappingProxyType
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from gpipe_hpc.config.presets import presets, presets_with, settings_of_presets
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


def complaint(error: Exception, words: Sequence[str] = ()) -> ConfigError:
    """Return the ConfigError that says what is wrong with the command line, and the remedy.

    `words`: the command line.
    """
    for word in words:
        found = _no_setting(word)
        if found is not None:
            return found
    if not isinstance(error, EXPECTED):
        return _no_name(words) or misfit(error)
    if isinstance(error, MissingConfigException) and error.missing_cfg_file is not None:
        return _missing_preset(error)
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(error, ConfigCompositionException):
        return _misfit(error)
    return misfit(error)


def misfit(error: BaseException, section: str = "") -> ConfigError:
    """Return the ConfigError for what Hydra or OmegaConf say, where we know no better.

    `section`: where they have looked, if not at all settings.
    """
    setting = getattr(error, "full_key", None)
    if setting and section:
        setting = f"{section}.{setting}"
    if setting and isinstance(error, MissingMandatoryValue):
        return refuse(setting, "a value", "???", f"set {setting}, or leave it out")
    where = f"bad {setting}" if setting else "the settings cannot be composed"
    return ConfigError(
        f"config: {where}, expected what the schema takes (see --help), got: {_first_line(error)}; "
        f"correct or remove it"
    )


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


def _no_setting(word: str) -> ConfigError | None:
    """Return the ConfigError for a word that names nothing, or something below a setting."""
    name = word.lstrip("+~").partition("=")[0]
    if not name.strip():
        return ConfigError(
            f"config: cannot read {word!r}, expected NAME=VALUE, got no name; correct or remove it"
        )
    parts = name.split(".")
    for number in range(2, len(parts)):
        above = ".".join(parts[:number])
        if _is_value(above):
            return ConfigError(
                f"config: {above} is a setting by itself, expected {above}=VALUE, got {word}; "
                f"leave out .{'.'.join(parts[number:])}"
            )
    return None


def _is_value(name: str) -> bool:
    """Say whether a setting of the schema is one value, with no others in it."""
    kinds = [kind for known, kind in _typed() if known == name]
    return bool(kinds) and all(kind in _WORDS and kind is not dict for kind in kinds)


def _no_name(words: Sequence[str]) -> ConfigError | None:
    """Return the ConfigError for the first preset that is chosen by a number, say."""
    parser = OverridesParser.create()
    for word in words:
        name, _, _ = word.partition("=")
        if name not in ("model", *_GROUPS):
            continue
        value = parser.parse_override(word).value()
        if not isinstance(value, str):
            expected = f"one of {', '.join(presets(name))}"
            return refuse(name, expected, value, f"choose one of them, as {name}=NAME")
    return None


def _misfit(error: ConfigCompositionException) -> ConfigError:
    cause = error.__cause__
    key, value = _override(error)
    deleted = re.match(r"(?:Could not delete.*?'|Error merging override ~)([\w.]+)", str(error))
    if deleted is not None:
        return taken_away(f"~{deleted[1]}")
    if str(error).startswith("Could not append") and key in settings():
        return ConfigError(
            f"config: {key} is a setting that there is, expected it without the +, got "
            f"+{key}; write {key}=VALUE"
        )
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
    return ConfigError(
        f"config: the settings cannot be composed, expected what the schema takes (see --help), "
        f"got: {' '.join(str(error).split())}; correct or remove it"
    )


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


def taken_away(word: str) -> ConfigError:
    """Return the ConfigError for ``~train.steps``: a setting of the schema cannot be left away."""
    name = word.lstrip("~").partition("=")[0].partition("@")[0]
    if name not in settings():
        return unknown_setting(name)
    return ConfigError(
        f"config: {name} cannot be taken away, expected a value for every setting, got {word}; "
        f"leave the word out for the default"
    )


# What others have settings for, and how it is done here.
_ELSEWHERE: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tokenizer": "data=text takes bytes as tokens; for another tokenizer write its numbers to "
        "files and read them with data=tokens data.paths=[FOLDER] (docs/how-to/data.md)"
    }
)


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
    if name in _ELSEWHERE:
        return ConfigError(
            f"config: unknown setting {key}, expected one of {', '.join(names)}, got {key}; "
            f"{_ELSEWHERE[name]}"
        )
    meant = nearest(name, names)
    found = f"{section}.{meant}" if section and meant else nearest(key, settings())
    is_section = found is not None and key.startswith(f"{found}.")  # which is right already
    hint = f"did you mean {found}? " if found and not is_section else ""
    expected = ", ".join(names) if section and own else _sections()
    return ConfigError(
        f"config: unknown setting {key}, expected one of {expected}, got {key}; {hint}see --help"
    )


def no_group(key: str, value: object) -> ConfigError:
    """Return the ConfigError for one value in place of a group of settings."""
    inner = [each for each in settings() if each.startswith(f"{key}.")] or [f"{key}.NAME"]
    same = [each for each in settings() if each != key and each.rpartition(".")[2] == key]
    hint = f"did you mean {same[0]}={value}? " if same else ""
    return ConfigError(
        f"config: {key} is a group of settings, expected one of {', '.join(inner)}, got "
        f"{key}={value}; {hint}name the setting in it"
    )


def wrong_type(key: str, value: object, cause: OmegaConfBaseException, hint: Any) -> ConfigError:
    """Return the ConfigError for a value of another type than `hint` says; None: any type."""
    kind = _plain(hint)
    if kind is not None and is_dataclass(kind):
        return no_group(key, value)
    expected = _WORDS.get(kind) if kind is not None else None
    if kind is list and str(value).startswith("["):
        return refuse(key, "a list of what it takes", value, f"correct it: {_first_line(cause)}")
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


_COMPOSE: Final = frozenset({"hydra", "omegaconf", "antlr4", "yaml"})


def of_composing(error: Exception) -> bool:
    """Say whether an error came out of Hydra: it does not raise its own kinds alone."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    module = str(frames[-1].f_globals.get("__name__", "")) if frames else ""
    return isinstance(error, EXPECTED) or module.partition(".")[0] in _COMPOSE


EXPECTED: Final = (HydraException, OmegaConfBaseException)
"""What composing raises for a command line that cannot be."""
