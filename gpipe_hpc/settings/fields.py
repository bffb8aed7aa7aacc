"""How a setting is defined, read and checked.

A setting is a field of a dataclass. Its annotation holds the type and, in ``Annotated``, what is
allowed (`Range`, `Choices`) and how often users need it (`Level`); the docstring below the field
says what it means. Help, the reference page and all checks of single values follow from these::

    steps: Annotated[int, Range(0), Level.EVERYDAY] = 300
    'Optimizer steps of the whole run.'
"""

import ast
import inspect
import math
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from gpipe_hpc.errors import ConfigError

LARGEST: Final = 2**63 - 1
"""The largest whole number of a setting: that of an integer of torch."""


class Level(Enum):
    """How often users need a setting. A field without a level is `EXPERT`."""

    EVERYDAY = "everyday"
    CLUSTER = "cluster"
    EXPERT = "expert"


@dataclass(frozen=True)
class Range:
    """The least and the largest value of a number, or of each number of a list.

    Args:
        least: Allowed itself, unless `excludes_least`.
        most: Allowed itself.
        excludes_least: The value must be greater than `least`.
    """

    least: float
    most: float = math.inf
    excludes_least: bool = False

    def __contains__(self, value: float) -> bool:
        most = min(self.most, LARGEST) if isinstance(value, int) else self.most
        is_above = value > self.least if self.excludes_least else value >= self.least
        return is_above and value <= most and math.isfinite(value)

    def __str__(self) -> str:
        least, most = (int(n) if n % 1 == 0 else n for n in (self.least, self.most))
        if self.excludes_least:
            return f"more than {least}" + (f", at most {most}" if most != math.inf else "")
        return f"at least {least}" if most == math.inf else f"{least} to {most}"


@dataclass(frozen=True, init=False)
class Choices:
    """The names that a setting may have."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def __str__(self) -> str:
        return ", ".join(self.names)


@dataclass(frozen=True)
class Spelling:
    """Other spellings of a value: `parse(value, setting)` returns ours, or raises ConfigError."""

    parse: Callable[[Any, str], Any]


@dataclass(frozen=True)
class Setting:
    """A setting as its field defines it; `kind` is its type without ``Annotated``."""

    name: str
    kind: Any
    default: Any = None
    schema: Any = None
    level: Level = Level.EXPERT
    range: Range | None = None
    choices: Choices | None = None
    spelling: Spelling | None = None

    @property
    def meaning(self) -> str:
        """Return the docstring below the field, as one line."""
        assert self.schema is not None, f"{self.name} is no field"
        return _meanings(self.schema).get(self.name.rpartition(".")[2], "")

    @property
    def plain_kind(self) -> Any:
        """Return the type behind ``X | None`` and ``list[X]``; None if it is free."""
        kind = self.kind
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(each for each in get_args(kind) if each is not type(None))
        return None if kind is Any else get_origin(kind) or kind

    def normalised(self, value: Any, name: str = "") -> Any:
        """Return a value in our own spelling; ConfigError for one that cannot be read."""
        if self.spelling is not None:
            return self.spelling.parse(value, name or self.name)
        if self.choices is None:
            return value
        return list(map(lower, value)) if isinstance(value, list) else lower(value)

    def check_kind(self, value: Any, name: str) -> None:
        """Raise ConfigError if a value is not of the setting's type.

        For keywords in Python: Hydra checks types of the command line.
        """
        expected = misfit(self.kind, value)
        if expected is not None:
            raise refuse(name, expected, value, f"correct {name}")

    def check(self, value: Any, name: str = "") -> None:
        """Raise ConfigError if a value is out of range or not among the choices.

        `name`: what the message calls the setting. Values of another type pass: what composes
        settings checks the types, and some settings take a word in place of a number.
        """
        name = name or self.name
        for each in value if isinstance(value, list | tuple) else [value]:
            is_name = isinstance(each, str) or (self.plain_kind is str and each is not None)
            if self.choices is not None and is_name and each not in self.choices.names:
                remedy = f"{suggestion(str(each), self.choices.names)}choose one of them"
                raise refuse(name, f"one of {self.choices}", each, remedy)
            if not isinstance(each, int | float) or isinstance(each, bool):
                continue
            if self.range is not None and each not in self.range:
                off = ", or null for none" if type(None) in get_args(self.kind) else ""
                is_long = isinstance(each, int) and each > LARGEST
                allowed = Range(self.range.least, LARGEST) if is_long else self.range
                raise refuse(name, str(allowed), value, f"set {name} within it{off}")
            if isinstance(each, int) and not -LARGEST <= each <= LARGEST:
                raise refuse(name, f"{-LARGEST} to {LARGEST}", each, f"correct {name}")


def settings_of(schema: Any, prefix: str = "") -> tuple[Setting, ...]:
    """Return the settings of a dataclass, and of the dataclasses within it, by dotted names."""
    return _settings_of(schema, prefix)


@cache
def _settings_of(schema: Any, prefix: str) -> tuple[Setting, ...]:
    hints, all_marks = get_type_hints(schema), _marks(schema)
    found: list[Setting] = []
    for each in fields(schema):
        kind, marks = hints[each.name], all_marks.get(each.name, ())
        name = f"{prefix}{each.name}"
        if is_dataclass(kind):
            found += settings_of(kind, f"{name}.")
            continue
        default = each.default
        if each.default_factory is not MISSING:
            default = each.default_factory()
        found.append(
            Setting(
                name,
                kind,
                default,
                schema,
                level=_mark(Level, marks) or Level.EXPERT,
                range=_mark(Range, marks),
                choices=_mark(Choices, marks),
                spelling=_mark(Spelling, marks),
            )
        )
    return tuple(found)


def normalise(section: Any, prefix: str = "") -> None:
    """Replace the values of a dataclass, and of those within it, by our spellings, in place."""
    for setting, value in _values(section):
        setattr(section, setting.name, setting.normalised(value, f"{prefix}{setting.name}"))
    for name, inner in _sections(section):
        normalise(inner, f"{prefix}{name}.")


def check_values(section: Any, prefix: str = "") -> None:
    """Check each value of a dataclass, and of those within it, by its own range and choices.

    Raises ConfigError that names the setting.
    """
    for setting, value in _values(section):
        setting.check(value, f"{prefix}{setting.name}")
    for name, inner in _sections(section):
        check_values(inner, f"{prefix}{name}.")


def _values(section: Any) -> Iterator[tuple[Setting, Any]]:
    for setting in settings_of(type(section)):
        if "." not in setting.name:
            yield setting, getattr(section, setting.name)


def _sections(section: Any) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(section).items() if is_dataclass(value))


KIND_NAMES: Final = MappingProxyType(
    {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
)
"""What messages call the types of values."""


def misfit(hint: Any, value: object) -> str | None:
    """Return what a value should be by its annotation; None if it fits, or the type is free."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        wrong = [misfit(each, value) for each in inner]
        return None if None in wrong else next(filter(None, wrong))
    if hint is type(None):
        return None if value is None else "null"
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        return f"at most {LARGEST}"
    if hint in KIND_NAMES:
        taken = (int, float) if hint is float else hint
        fits = isinstance(value, taken) and (hint is bool or not isinstance(value, bool))
        return None if fits else KIND_NAMES[hint]
    if origin in (list, Sequence) and inner:
        if not isinstance(value, list | tuple):
            return f"a list, each {KIND_NAMES.get(inner[0], 'of an allowed type')}"
        return next(filter(None, (misfit(inner[0], each) for each in value)), None)
    return None


def refuse(setting: str, expected: str, got: object, remedy: str) -> ConfigError:
    """Return the error that names a setting, what is allowed, what came, and the remedy."""
    return ConfigError(f"config: bad {setting}, expected {expected}, got {got!r}; {remedy}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like `name`; None if there is none."""
    lowered = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean NAME? ``, or nothing."""
    found = nearest(name, known)
    return f"did you mean {found}? " if found is not None else ""


def lower(name: Any) -> Any:
    """Return a name in lower case with underscores; other values as they are."""
    return name.lower().replace("-", "_") if isinstance(name, str) else name


T = TypeVar("T")


def _mark(kind: type[T], marks: Iterable[Any]) -> T | None:
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def _marks(schema: type) -> dict[str, tuple[Any, ...]]:
    """Return what ``Annotated`` adds to each field; a field without keeps that of a base class."""
    found: dict[str, tuple[Any, ...]] = {}
    for base in reversed(schema.__mro__):
        if is_dataclass(base):
            hints = get_type_hints(base, include_extras=True)
            own = {name: hints[name] for name in base.__annotations__}
            found |= {n: get_args(h)[1:] for n, h in own.items() if get_origin(h) is Annotated}
    return found


@cache
def _meanings(schema: Any) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and of those that it extends."""
    found: dict[str, str] = {}
    for base in reversed(schema.__mro__):
        if is_dataclass(base):
            found |= dict(_own_meanings(base))
    return found


def _own_meanings(schema: Any) -> Iterator[tuple[str, str]]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(schema)))
    body = tree.body[0]
    assert isinstance(body, ast.ClassDef)
    for field, below in zip(body.body, body.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            yield field.target.id, " ".join(str(below.value.value).split())
