"""The names that everybody uses, and what was probably meant by a name that nobody knows."""

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from gpipe_hpc.config.refusal import refuse
from gpipe_hpc.schedule import canonical_schedule

if TYPE_CHECKING:
    from gpipe_hpc.config.schema import Config

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


def spell(config: "Config") -> None:
    """Put the project's own names and numbers in place of the field's spellings of them.

    Case does not matter: ``pipeline.schedule=1F1B``, ``train.precision=bf16``,
    ``pipeline.memory_bytes=24GB``.
    """
    pipeline, train = config.pipeline, config.train
    pipeline.stages = _number_or(pipeline.stages, "fit", "pipeline.stages")
    pipeline.schedule = canonical_schedule(pipeline.schedule)
    config.draw.compare = [canonical_schedule(name) for name in config.draw.compare]
    pipeline.recompute = _lower(pipeline.recompute)
    if isinstance(pipeline.paces, str):
        pipeline.paces = _lower(pipeline.paces)
    if isinstance(pipeline.partition, str):
        pipeline.partition = _lower(pipeline.partition)
    train.precision = canonical_precision(train.precision)
    precisions = config.plan.precisions.items()
    config.plan.precisions = {canonical_precision(name): rate for name, rate in precisions}
    train.device = _lower(train.device)
    train.num_threads = _number_or(train.num_threads, "auto", "train.num_threads")
    pipeline.memory_bytes = bytes_of_ranks(pipeline.memory_bytes, "pipeline.memory_bytes")
    config.preflight.bytes = num_bytes(config.preflight.bytes, "preflight.bytes")
    config.outer.compress = canonical_precision(config.outer.compress)
    config.outer.bucket_bytes = num_bytes(config.outer.bucket_bytes, "outer.bucket_bytes")


def _number_or(value: Any, word: str, setting: str) -> int | str | None:
    """Return a whole number, None, or the one word that there is for it; refuse all else."""
    if isinstance(value, str) and _lower(value.strip()) == word:
        return word
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise refuse(setting, f"a whole number, null or {word}", value, "correct it")


def canonical_precision(name: str) -> str:
    """Return our name of a precision; an unknown one as it is."""
    return _PRECISIONS.get(name.lower(), _lower(name))


def num_bytes(value: Any, setting: str) -> float | None:
    """Return a number of bytes, given as a number or as text such as 24GB or 16GiB.

    kB, MB, GB, TB are powers of 1000; KiB, MiB, GiB, TiB of 1024. Raises ConfigError.
    """
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    match = _BYTES.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is not None:
        try:
            return float(match[1]) * _UNITS[match[2].lower().removesuffix("b")]
        except ValueError:
            pass
    raise refuse(setting, "bytes", value, "write them as 16e9, 24GB or 24GiB")


def bytes_of_ranks(value: Any, setting: str) -> float | list[float] | None:
    """Return a number of bytes for all ranks, or a list with that of each. Raises ConfigError."""
    if not isinstance(value, list | tuple):
        return num_bytes(value, setting)
    found = [num_bytes(each, setting) for each in value]
    known = [each for each in found if each is not None]
    if not known or len(known) < len(found):
        raise refuse(setting, "bytes, or those of each rank", value, "write them as [24GB,80GB]")
    return known


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like one, None if none is."""
    lowered = {each.lower(): each for each in known}
    found = get_close_matches(name.lower(), lowered, n=1, cutoff=0.6)
    return lowered[found[0]] if found else None


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean NAME?; ``, or nothing."""
    found = nearest(name, known)
    return f"did you mean {found}? " if found is not None else ""


def _lower(name: str) -> str:
    return name.lower().replace("-", "_")
