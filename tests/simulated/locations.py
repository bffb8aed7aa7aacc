"""Location of a call: the line of the package, or else of the test."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch

import gpipe_hpc

_PACKAGE = str(Path(gpipe_hpc.__file__).parent) + "/"
_ROOT = str(Path(gpipe_hpc.__file__).parent.parent) + "/"
_HERE = str(Path(__file__).parent) + "/"
_TESTS = _HERE + "test_"
_TORCH = str(Path(torch.__file__).parent) + "/"


class Where(NamedTuple):
    """A line of a file."""

    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.path.removeprefix(_ROOT)}:{self.line}"


class _Caller(threading.local):
    """The location on whose behalf a thread works, or None."""

    where: Where | None = None


_caller = _Caller()


@contextmanager
def inherit(caller: Where) -> Iterator[None]:
    """Context in which code outside of package and tests is attributed to the given location."""
    before, _caller.where = _caller.where, caller
    try:
        yield
    finally:
        _caller.where = before


def where() -> Where:
    """Return the innermost running line of the package, or of a test if there is none."""
    frame: FrameType | None = sys._getframe(1)
    other: Where | None = None
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGE):
            return Where(path, frame.f_lineno)
        is_own = path.startswith(_HERE) and not path.startswith(_TESTS)
        if other is None and not is_own and not path.startswith((_TORCH, "<")):
            other = Where(path, frame.f_lineno)
        frame = frame.f_back
    return _caller.where or other or Where("?", 0)
