"""The package's calls that order streams, keep memory for a stream, or block the host."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import gpipe_hpc
from tests.simulated.device import Site
from tests.simulated.locations import Where

_PACKAGE = Path(gpipe_hpc.__file__).parent
ORDERING = frozenset(
    {
        "wait_event",
        "wait_stream",
        "record_event",
        "record",
        "keep_for_stream",
        "synchronize",
        "query",
        "use",
    }
)
_DEVICES = _PACKAGE / "device" / "device.py"


class Call(NamedTuple):
    """A call of a method, and the lines to which it may be attributed."""

    method: str
    path: str
    function: str
    first: int
    last: int

    def __str__(self) -> str:
        return f"{self.file}:{self.first} {self.method}"

    @property
    def file(self) -> str:
        """Return the file within the package."""
        return str(Path(self.path).relative_to(_PACKAGE))

    @property
    def name(self) -> str:
        """Return the name under which a test lists its reason."""
        return f"{self.file} {self.function} {self.method}"

    @property
    def sites(self) -> frozenset[Site]:
        """Return the locations under which a simulated device may record it."""
        lines = range(self.first, self.last + 1)
        return frozenset((self.method, Where(self.path, line)) for line in lines)


def calls() -> Iterator[Call]:
    """Yield every call of one of these methods outside of the device module."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        text = path.read_text()
        # Parsing all files takes a second, and every worker of the tests does it.
        if path != _DEVICES and any(f".{name}(" in text for name in ORDERING):
            yield from _calls_in(ast.parse(text), str(path), "")


def _calls_in(node: ast.AST, path: str, function: str) -> Iterator[Call]:
    if isinstance(node, ast.FunctionDef):
        function = node.name
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if is_method and node.func.attr in ORDERING:
        yield Call(node.func.attr, path, function, node.lineno, node.end_lineno or node.lineno)
    for child in ast.iter_child_nodes(node):
        yield from _calls_in(child, path, function)
