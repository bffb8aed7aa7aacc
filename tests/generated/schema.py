"""All settings with types, defaults and allowed values, derived from the configuration.

No setting is listed here by name, so each new field is included.
"""

import types
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from typing import Any, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from gpipe_hpc.config.compose import presets
from gpipe_hpc.schedule import schedule_names
from gpipe_hpc.settings import OPTIMIZERS, Config, Outer, Setting, settings_of
from tests.generated.values import FLOATS, NUMBERS, PATHS, TEXTS

_GROUPS = ("model", "data", "optimizer", "outer")


@cache
def of_run() -> list[Setting]:
    """Return the settings of every run, which do not depend on the chosen presets."""
    return [each for each in settings_of(Config) if each.name.partition(".")[0] not in _GROUPS]


@cache
def of_choice(group: str, name: str) -> list[Setting]:
    """Return the settings that a run has because it uses a preset of a group."""
    if group == "outer":
        return list(settings_of(Outer, "outer."))
    if group == "optimizer":
        return list(settings_of(OPTIMIZERS[name], "optimizer."))
    written = presets(group)[name]
    target = written.get("_target_")
    if target is None:
        return [Setting(f"{group}.{key}", Any, value) for key, value in written.items()]
    module, _, called = target.rpartition(".")
    built = getattr(import_module(module), called)
    if is_dataclass(built):
        return list(settings_of(built, f"{group}."))
    hints = get_type_hints(built)
    return [Setting(f"{group}.{key}", hints.get(key, Any), value) for key, value in written.items()]


def names_of(group: str) -> list[str]:
    """Return the names of the presets of a group."""
    return list(presets(group))


def groups() -> list[str]:
    """Return the prefixes shared by several settings, such as ``train``."""
    every = {each.name for each in of_run()}
    return sorted({name.rpartition(".")[0] for name in every} - {""} | set(_GROUPS))


def fitting(setting: Setting) -> st.SearchStrategy[Any]:
    """Draw a small valid value of a setting, near its lower limit."""
    if setting.name == "pipeline.schedule":
        return st.sampled_from(schedule_names())
    if setting.choices is not None and setting.kind is str:
        return st.sampled_from(setting.choices.names)
    return _of_kind(setting.kind, setting)


def _of_kind(kind: Any, setting: Setting) -> st.SearchStrategy[Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of(*(_of_kind(each, setting) for each in inner))
    found = setting.range
    least, most = (0, 4) if found is None else (found.least, found.most)
    if kind is type(None):
        return st.none()
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(int(least), int(min(most, least + 4)))
    if kind is float:
        few = (least, min(most, least + 0.1), min(most, least + 1), setting.default)
        return st.sampled_from([each for each in few if isinstance(each, int | float)])
    if kind is str:
        return st.just(setting.default)  # the type alone does not show other valid strings
    if origin in (list, tuple) or str(kind).startswith("collections.abc.Sequence"):
        one = _of_kind(inner[0], setting) if inner else st.integers(1, 4)
        return st.lists(one, max_size=3)
    if origin is dict:
        return st.dictionaries(st.sampled_from("abc"), st.integers(0, 2), max_size=2)
    kept = st.just(setting.default)
    return st.one_of(kept, st.integers(0, 4), st.floats(0, 4), st.lists(st.integers(0, 4)), kept)


def extreme(setting: Setting) -> st.SearchStrategy[Any]:
    """Draw a value that has the type of a setting but may be out of its range."""
    return _extreme(setting.kind)


def _extreme(kind: Any) -> st.SearchStrategy[Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of(*(_extreme(each) for each in inner))
    if kind is type(None):
        return st.none()
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.sampled_from([each for each in NUMBERS if isinstance(each, int)])
    if kind is float:
        return st.sampled_from((*NUMBERS, *FLOATS))
    if kind is str:
        return st.sampled_from((*PATHS, *TEXTS))
    if origin in (list, tuple) or str(kind).startswith("collections.abc.Sequence"):
        one = _extreme(inner[0]) if inner else st.sampled_from(NUMBERS)
        return st.lists(one, max_size=5)
    return st.one_of(st.sampled_from((*NUMBERS, *FLOATS, *TEXTS, True, None, {}, [], [1, 2])))
