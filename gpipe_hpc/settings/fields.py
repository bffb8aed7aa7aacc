"""Definition of settings as fields of dataclasses, and checks of their values.

The annotation of a field gives its type and, in ``Annotated``, the allowed values (`Range`,
`Choices`), how often users need it (`Level`), and a function that parses other spellings. The
docstring below the field is its description. Help, the reference page and all checks of single
values are generated from these::

    steps: Annotated[int, Range(0), Level.EVERYDAY] = 300
    'Number of optimizer steps of the whole run.'

Case does not matter in names, and common spellings are accepted: ``pipeline.schedule=1F1B``,
``train.precision=bf16``, ``pipeline.memory_bytes=24GB``.
"""

import ast
import inspect
import math
import re
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin, get_type_hints

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.schedule import canonical_schedule

LARGEST: Final = 2**63 - 1
"""Largest integer of a setting: the largest int64 of torch."""


class Level(Enum):
    """How often users need a setting. A field without a level has `EXPERT`."""

    EVERYDAY = "everyday"
    CLUSTER = "cluster"
    EXPERT = "expert"


@dataclass(frozen=True)
class Range:
    """Range of a number, or of each number in a list.

    Args:
        least: Lower bound.
        most: Upper bound.
        excludes_least: `least` itself is not allowed.
        excludes_most: `most` itself is not allowed.
    """

    least: float
    most: float = math.inf
    excludes_least: bool = False
    excludes_most: bool = False

    def __contains__(self, value: float) -> bool:
        most = min(self.most, LARGEST) if isinstance(value, int) else self.most
        is_above = value > self.least if self.excludes_least else value >= self.least
        is_below = value < most if self.excludes_most else value <= most
        return is_above and is_below and math.isfinite(value)

    def __str__(self) -> str:
        least, most = (int(n) if n % 1 == 0 else n for n in (self.least, self.most))
        if self.excludes_most:
            return f"{least} or more, less than {most}"
        if self.excludes_least:
            return f"more than {least}" + (f", at most {most}" if most != math.inf else "")
        return f"at least {least}" if most == math.inf else f"{least} to {most}"


@dataclass(frozen=True, init=False)
class Choices:
    """The strings that a setting may have as its value."""

    names: tuple[str, ...]

    def __init__(self, *names: str) -> None:
        object.__setattr__(self, "names", names)

    def __str__(self) -> str:
        return ", ".join(self.names)


@dataclass(frozen=True)
class Setting:
    """A setting as defined by its field.

    Args:
        name: Dotted name.
        kind: Type, without ``Annotated``.
        default: Default value.
        schema: Dataclass of the field.
        level: How often users need it.
        range: Allowed numbers.
        choices: Allowed strings.
        spelling: `spelling(value, name)` returns the canonical value, or raises ConfigError.
    """

    name: str
    kind: Any
    default: Any = None
    schema: Any = None
    level: Level = Level.EXPERT
    range: Range | None = None
    choices: Choices | None = None
    spelling: Callable[[Any, str], Any] | None = None

    @property
    def meaning(self) -> str:
        """Return the docstring below the field, as one line."""
        assert self.schema is not None, f"{self.name} is no field"
        return _meanings(self.schema).get(self.name.rpartition(".")[2], "")

    @property
    def plain_kind(self) -> Any:
        """Return the type without ``| None``, for a list `list`; None if any type is allowed."""
        kind = self.kind
        if get_origin(kind) in (Union, types.UnionType):
            kind = next(each for each in get_args(kind) if each is not type(None))
        return None if kind is Any else get_origin(kind) or kind

    def normalised(self, value: Any, name: str = "") -> Any:
        """Return the canonical form of a value; raise ConfigError if it cannot be parsed."""
        if self.spelling is not None:
            return self.spelling(value, name or self.name)
        if self.choices is None:
            return value
        return list(map(lower, value)) if isinstance(value, list) else lower(value)

    def check_kind(self, value: Any, name: str) -> None:
        """Raise ConfigError if a keyword argument is not of the setting's type.

        On the command line, Hydra checks types.
        """
        expected = misfit(self.kind, value)
        if expected is not None:
            raise refuse(name, expected, value, f"correct {name}")

    def check(self, value: Any, name: str = "") -> None:
        """Raise ConfigError if a value is out of range or not among the choices.

        Values of another type are accepted: types are checked elsewhere, and some settings accept
        either a number or a word.

        Args:
            value: The value, or a list of values.
            name: Name of the setting in the message.
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
    """Return the settings of a dataclass and of its nested dataclasses, with dotted names."""
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
                spelling=next(filter(callable, marks), None),
            )
        )
    return tuple(found)


def normalise(section: Any, prefix: str = "") -> None:
    """Replace the values of a dataclass and its nested dataclasses by canonical ones, in place."""
    for setting, value in _values(section):
        setattr(section, setting.name, setting.normalised(value, f"{prefix}{setting.name}"))
    for name, inner in _sections(section):
        normalise(inner, f"{prefix}{name}.")


def check_values(section: Any, prefix: str = "") -> None:
    """Check the values of a dataclass and its nested dataclasses against their ranges and choices.

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
"""Names of types in messages."""


def misfit(hint: Any, value: object) -> str | None:
    """Return the name of the expected type; None if the value has it, or if any type is allowed."""
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
    """Return an error with a setting's name, the allowed values, the given value and the remedy."""
    return ConfigError(f"config: bad {setting}, expected {expected}, got {got!r}; {remedy}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most similar to `name`; None if none is similar."""
    lowered = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean NAME? `` for the most similar known name, or an empty string."""
    found = nearest(name, known)
    return f"did you mean {found}? " if found is not None else ""


def lower(name: Any) -> Any:
    """Return a string in lower case with underscores for dashes; other values unchanged."""
    return name.lower().replace("-", "_") if isinstance(name, str) else name


T = TypeVar("T")


def _mark(kind: type[T], marks: Iterable[Any]) -> T | None:
    return next((mark for mark in marks if isinstance(mark, kind)), None)


def _marks(schema: type) -> dict[str, tuple[Any, ...]]:
    """Return the ``Annotated`` metadata of each field, which it may inherit from a base class."""
    found: dict[str, tuple[Any, ...]] = {}
    for base in reversed(schema.__mro__):
        if is_dataclass(base):
            hints = get_type_hints(base, include_extras=True)
            own = {name: hints[name] for name in base.__annotations__}
            found |= {n: get_args(h)[1:] for n, h in own.items() if get_origin(h) is Annotated}
    return found


@cache
def _meanings(schema: Any) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass and its bases, by field name."""
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


_PRECISIONS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "fp32": "float32",
        "f32": "float32",
        "single": "float32",
        "bf16": "bfloat16",
        "fp16": "float16",
        "f16": "float16",
        "half": "float16",
    }
)
_BYTES: Final = re.compile(r"([\d._]+(?:e[+-]?\d+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_UNITS: Final[Mapping[str, int]] = MappingProxyType(
    {
        "": 1,
        **{letter: 1000**power for power, letter in enumerate("kmgt", 1)},
        **{f"{letter}i": 1024**power for power, letter in enumerate("kmgt", 1)},
    }
)


def number_or(word: str) -> Callable[[Any, str], Any]:
    """Return a parser for settings whose value is an integer, null or one word."""

    def parse(value: Any, setting: str) -> int | str | None:
        if isinstance(value, str) and lower(value.strip()) == word:
            return word
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise refuse(setting, f"a whole number, null or {word}", value, "correct it")

    return parse


def canonical_precision(name: Any, setting: str = "") -> Any:
    """Return the canonical name of a precision such as ``bf16``; other values unchanged."""
    if isinstance(name, Mapping):
        return {canonical_precision(each): value for each, value in name.items()}
    return _PRECISIONS.get(lower(name), lower(name)) if isinstance(name, str) else name


def named_schedule(name: Any, setting: str) -> Any:
    """Return the canonical name of a schedule, or of each in a list; other values unchanged."""
    if isinstance(name, list):
        return [named_schedule(each, setting) for each in name]
    return canonical_schedule(name) if isinstance(name, str) else name


def num_bytes(value: Any, setting: str) -> float:
    """Return a number of bytes, given as a number or as a string such as 24GB or 16GiB.

    kB, MB, GB and TB are powers of 1000; KiB, MiB, GiB and TiB are powers of 1024. Raises
    ConfigError for other strings.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    match = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        try:
            return float(match[1]) * _UNITS[match[2].lower().removesuffix("b")]
        except ValueError:
            pass
    raise refuse(setting, "bytes", value, "write them as 16e9, 24GB or 24GiB")


def bytes_of_ranks(value: Any, setting: str) -> float | list[float] | None:
    """Return a number of bytes, or a list with that of each rank; None unchanged.

    Raises ConfigError for a value that is not a number of bytes.
    """
    if not isinstance(value, list | tuple):
        return None if value is None else num_bytes(value, setting)
    if not value or None in value:
        raise refuse(setting, "bytes, or those of each rank", value, "write them as [24GB,80GB]")
    return [num_bytes(each, setting) for each in value]


def lowered(value: Any, setting: str) -> Any:
    """Return a string in lower case; other values unchanged."""
    return lower(value)


PRECISIONS: Final = Choices("float32", "bfloat16", "float16")
"""Precisions of forward passes."""
