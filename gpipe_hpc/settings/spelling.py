"""Common spellings of names and numbers.

Case does not matter: ``pipeline.schedule=1F1B``, ``train.precision=bf16``,
``pipeline.memory_bytes=24GB``.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from gpipe_hpc.schedule import canonical_schedule
from gpipe_hpc.settings.fields import Choices, Spelling, lower, refuse

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


def number_or(word: str) -> Spelling:
    """Return the spelling of a whole number, None, or one word in their place."""

    def parse(value: Any, setting: str) -> int | str | None:
        if isinstance(value, str) and lower(value.strip()) == word:
            return word
        if value is None or (isinstance(value, int) and not isinstance(value, bool)):
            return value
        raise refuse(setting, f"a whole number, null or {word}", value, "correct it")

    return Spelling(parse)


def canonical_precision(name: Any, setting: str = "") -> Any:
    """Return our name of a precision; anything else as it is."""
    if isinstance(name, Mapping):
        return {canonical_precision(each): value for each, value in name.items()}
    return _PRECISIONS.get(lower(name), lower(name)) if isinstance(name, str) else name


def named_schedule(name: Any, setting: str) -> Any:
    """Return the canonical name of a schedule, or of each in a list; anything else as it is."""
    if isinstance(name, list):
        return [named_schedule(each, setting) for each in name]
    return canonical_schedule(name) if isinstance(name, str) else name


def num_bytes(value: Any, setting: str) -> float:
    """Return a number of bytes, given as a number or as text such as 24GB or 16GiB.

    kB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB of 1024. Raises ConfigError.
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
    """Return a number of bytes for all ranks, or a list with that of each; None as it is.

    Raises ConfigError.
    """
    if not isinstance(value, list | tuple):
        return None if value is None else num_bytes(value, setting)
    if not value or None in value:
        raise refuse(setting, "bytes, or those of each rank", value, "write them as [24GB,80GB]")
    return [num_bytes(each, setting) for each in value]


def lowered(value: Any, setting: str) -> Any:
    """Return a name in lower case; anything else as it is."""
    return lower(value)


BYTES: Final = Spelling(num_bytes)
BYTES_OF_RANKS: Final = Spelling(bytes_of_ranks)
LOWER: Final = Spelling(lowered)
PRECISION: Final = Spelling(canonical_precision)
SCHEDULE: Final = Spelling(named_schedule)
PRECISIONS: Final = Choices("float32", "bfloat16", "float16")
"""The precisions of forward passes."""
