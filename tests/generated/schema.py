"""The schema as a list: each setting with its type, its default and what it may be.

Nothing is listed here by name that the schema, the checks or ``conf/`` tell: a new setting is among
these once it is a field.
"""

import types
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from hypothesis import strategies as st

from gpipe_hpc.config.checks import CHOICES, RANGES
from gpipe_hpc.config.presets import preset, presets
from gpipe_hpc.config.schema import Config
from gpipe_hpc.config.schemas import SCHEMAS
from tests.generated.values import FLOATS, NUMBERS, PATHS, TEXTS

_GROUPS = ("model", "data", "optimizer", "outer")


class Setting(NamedTuple):
    name: str
    kind: Any  # its type; Any where that is free
    default: Any = None


def _default(each: Any) -> Any:
    if each.default is not MISSING:
        return each.default
    return None if each.default_factory is MISSING else each.default_factory()


def below(schema: Any, prefix: str) -> list[Setting]:
    """Return the settings of a dataclass, those of the groups in it too."""
    hints = get_type_hints(schema)
    found = []
    for each in fields(schema):
        kind, name = hints[each.name], f"{prefix}{each.name}"
        found += (
            below(kind, f"{name}.") if is_dataclass(kind) else [Setting(name, kind, _default(each))]
        )
    return found


@cache
def of_run() -> list[Setting]:
    """Return the settings that every run has, whatever is chosen for its groups."""
    found = below(Config, "")
    return [each for each in found if each.name.partition(".")[0] not in _GROUPS]


@cache
def of_choice(group: str, name: str) -> list[Setting]:
    """Return the settings that a run has with a preset of a group."""
    schemas = dict(SCHEMAS)
    if group in ("optimizer", "outer"):
        return below(schemas.get(name, schemas["outer"]), f"{group}.")
    written = preset(group, name)
    target = written.get("_target_")
    if target is None:
        return [Setting(f"{group}.{key}", Any, value) for key, value in written.items()]
    module, _, called = target.rpartition(".")
    built = getattr(import_module(module), called)
    if is_dataclass(built):
        return below(built, f"{group}.")
    hints = get_type_hints(built)
    return [Setting(f"{group}.{key}", hints.get(key, Any), value) for key, value in written.items()]


def names_of(group: str) -> list[str]:
    """Return the presets of a group."""
    return list(presets(group))


def groups() -> list[str]:
    """Return the names that stand for several settings, as ``train`` and ``train.batch_ramp``."""
    every = {each.name for each in of_run()}
    return sorted({name.rpartition(".")[0] for name in every} - {""} | set(_GROUPS))


def fitting(setting: Setting) -> st.SearchStrategy[Any]:
    """Draw what the type of a setting, its range and its choices allow; small, near the least."""
    if setting.name in CHOICES:
        return st.sampled_from(CHOICES[setting.name])
    return _of_kind(setting.kind, setting)


def _of_kind(kind: Any, setting: Setting) -> st.SearchStrategy[Any]:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return st.one_of(*(_of_kind(each, setting) for each in inner))
    least, most = RANGES.get(setting.name, (0, 4))
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
        return st.just(setting.default)  # what else would do, only a choice or its own type tells
    if origin in (list, tuple) or str(kind).startswith("collections.abc.Sequence"):
        one = _of_kind(inner[0], setting) if inner else st.integers(1, 4)
        return st.lists(one, max_size=3)
    if origin is dict:
        return st.dictionaries(st.sampled_from("abc"), st.integers(0, 2), max_size=2)
    kept = st.just(setting.default)
    return st.one_of(kept, st.integers(0, 4), st.floats(0, 4), st.lists(st.integers(0, 4)), kept)


def extreme(setting: Setting) -> st.SearchStrategy[Any]:
    """Draw what the type of a setting allows, and little else speaks for."""
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
