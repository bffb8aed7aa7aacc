"""Read small JSON and text files from untrusted sources with bounds on size and depth.

Files about a run (settings, manifests, links, costs, locks) are read with these functions only. A
file must be a regular file, because opening a FIFO could block forever. Its size, depth and number
of values are bounded before objects are built. For YAML, see `yaml_files`.

Raises OSError if the system refuses, and ValueError with a message of one line if the content is
not allowed. Callers add the path and the remedy.
"""

import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

MOST_BYTES: Final = 64 * 2**20
MOST_VALUES: Final = 4_000_000
MOST_DEPTH: Final = 400
MOST_DIGITS: Final = 1300
_SHOWN: Final = 100
_TOO_LARGE: Final = 2**1000  # numbers from here on are refused, because a float may overflow


def read_bytes(path: str | Path, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the bytes of a regular file; ValueError if it is not regular or too large."""
    with open_regular(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"more than {most_bytes:,} bytes")
    return content


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file for reading bytes; ValueError if it is not regular."""
    # Without O_NONBLOCK, opening a FIFO would block until another process opens it for writing.
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = os.fstat(handle).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(kind):
            raise ValueError("no regular file (a pipe, a socket or a device)")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_text(path: str | Path, most_bytes: int = MOST_BYTES) -> str:
    """Return the text of a regular file, in UTF-8."""
    return read_bytes(path, most_bytes).decode("utf-8")


def read_json(path: str | Path, most_bytes: int = MOST_BYTES) -> Any:
    """Parse a JSON file and return its content."""
    return parse_json(read_bytes(path, most_bytes))


def parse_json(text: str | bytes, most_values: int = MOST_VALUES) -> Any:
    """Parse JSON; ValueError if it is invalid or exceeds the bounds."""
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > most_values:
        raise ValueError(f"more than {most_values:,} values")
    try:
        found = json.loads(text, parse_int=_whole)
    except RecursionError:
        raise ValueError(f"nested more than {MOST_DEPTH} levels deep") from None
    _check_depth(found)
    return found


def _whole(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"a number of {len(digits):,} digits")
    return int(digits)


def _check_depth(found: Any) -> None:
    level, depth = [found], 0
    while level:
        if depth > MOST_DEPTH:
            raise ValueError(f"nested more than {MOST_DEPTH} levels deep")
        level = [part for each in level if type(each) in (list, dict) for part in parts_of(each)]
        depth += 1


def parts_of(value: Any) -> Any:
    """Return the values of a list or a dict."""
    return value.values() if type(value) is dict else value


class OrNull(NamedTuple):
    """Schema of a value that may be null or missing."""

    shape: Any


class Number(NamedTuple):
    """Schema of a number.

    Args:
        least: Smallest allowed value.
        is_whole: Only integers are allowed.
        is_finite: Infinity and NaN are not allowed.
    """

    least: float = -math.inf
    is_whole: bool = False
    is_finite: bool = True


class Values(NamedTuple):
    """Schema of an object with any keys, whose values have one schema."""

    shape: Any


_NAMES: Final = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}


def mismatch(value: Any, shape: Any, where: str = "") -> str | None:
    """Return the first difference between a value and its schema as text; None if there is none.

    A schema is a type, `OrNull`, `Number`, `Values`, a dict of schemas by key (other keys are
    allowed), or a list with the schema of its entries.

    Args:
        value: A parsed JSON or YAML value.
        shape: The schema.
        where: Name of the value in the text.
    """
    return next(_mismatches(value, shape, where), None)


def _mismatches(value: Any, shape: Any, where: str) -> Iterator[str]:
    match shape:
        case OrNull(inner):
            if value is not None:
                yield from _mismatches(value, inner, where)
        case Number(least, is_whole, is_finite):
            kinds = (int,) if is_whole else (int, float)
            is_any = type(value) is float and not (is_finite or is_whole)
            is_small = type(value) in kinds and abs(value) < _TOO_LARGE
            if not (is_any or is_small) or value < least:
                kind = "an integer" if is_whole else "a number"
                some = "" if least == -math.inf else f" of {least:g} or more"
                yield _told(where, f"{kind}{some}", value)
        case Values(inner):
            if not isinstance(value, dict):
                yield _told(where, _NAMES[dict], value)
                return
            for name, each in value.items():
                yield from _mismatches(each, inner, f"{where}.{name}".strip("."))
        case Mapping():
            if not isinstance(value, dict):
                yield _told(where, _NAMES[dict], value)
                return
            for name, inner in shape.items():
                yield from _mismatches(value.get(name), inner, f"{where}.{name}".strip("."))
        case list():
            if not isinstance(value, list):
                yield _told(where, _NAMES[list], value)
                return
            for place, each in enumerate(value):
                yield from _mismatches(each, shape[0], f"{where}[{place}]")
        case _:
            if not isinstance(value, shape):
                yield _told(where, _NAMES[shape], value)


def _told(where: str, expected: str, got: Any) -> str:
    return f"expected {expected}{f' as {where[:_SHOWN]}' if where else ''}, got {got!r:.60}"
