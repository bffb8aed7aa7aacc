"""The calls of the package that order streams, keep memory for one, or let the host wait."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gpipe_hpc
from tests.played.device import Site

_PACKAGE = Path(gpipe_hpc.__file__).parent
ORDERING = frozenset(
    {"wait_event", "wait_stream", "record_event", "record", "lend", "synchronize", "query"}
)
_DEVICES = _PACKAGE / "comm" / "device.py"


class Call(NamedTuple):
    """A call of a method, and the lines that it may be said to come from."""

    method: str
    path: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{Path(self.path).relative_to(_PACKAGE)}:{self.first} {self.method}"

    def is_at(self, site: Site) -> bool:
        method, (path, line) = site
        return (method, path) == (self.method, self.path) and self.first <= line <= self.last


def calls() -> Iterator[Call]:
    """Yield every call by such a name, outside of the module that knows devices."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        if path == _DEVICES:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr in ORDERING:
                last = node.end_lineno or node.lineno
                yield Call(node.func.attr, str(path), node.lineno, last)
