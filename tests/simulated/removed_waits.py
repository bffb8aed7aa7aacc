"""Removal of the package's waits, one at a time, to test that each is needed.

The waits are methods of many classes, so the call itself is removed: its function gets the code
that it would have without that line. A wait whose value is used cannot be removed and is not
listed.
"""

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import gpipe_hpc

_PACKAGE = Path(gpipe_hpc.__file__).parent
# Waits for threads and processes, for keys of a store, and for time to pass.
_OTHERS = frozenset(
    {"Event()", "_done", "_over", "_process", "_store", "changed", "done", "process"}
)


class Wait(NamedTuple):
    """A line that only waits; `of` is the source text of the object waited for."""

    path: str
    function: str
    line: int
    of: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.of}"

    @property
    def file(self) -> str:
        """Return the file within the package."""
        return str(Path(self.path).relative_to(_PACKAGE))

    @property
    def name(self) -> str:
        """Return the name under which a test lists its reason."""
        return f"{self.file} {self.function} {self.of}"


def waits() -> Iterator[Wait]:
    """Yield every wait of the package."""
    for path in sorted(_PACKAGE.rglob("*.py")):
        text = path.read_text()
        if ".wait(" in text:
            yield from _waits_in(ast.parse(text), str(path), "")


def _waits_in(node: ast.AST, path: str, function: str) -> Iterator[Wait]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        function = f"{function}.{node.name}" if function else node.name
    of = _waited_for(node)
    if of is not None and of.rpartition(".")[2] not in _OTHERS:
        assert isinstance(node, ast.Expr)
        yield Wait(path, function, node.lineno, of)
    for child in ast.iter_child_nodes(node):
        yield from _waits_in(child, path, function)


def _waited_for(node: ast.AST) -> str | None:
    """Return the object that a line waits for, or None if it does something else."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = node.value.func
        if isinstance(called, ast.Attribute) and called.attr == "wait":
            return ast.unparse(called.value)
    return None


class _Without(ast.NodeTransformer):
    """Transformer that evaluates the object and the arguments of a wait, but not the wait."""

    def __init__(self, line: int) -> None:
        self._line, self.num_found = line, 0

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        call = node.value
        if node.lineno != self._line or _waited_for(node) is None:
            return node
        assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        self.num_found += 1
        rest = ast.Tuple([call.func.value, *call.args], ast.Load())
        return ast.copy_location(ast.Expr(rest), node)


@contextmanager
def without(wait: Wait) -> Iterator[None]:
    """Context in which a wait is removed; the operation it waits for is still started."""
    removing = _Without(wait.line)
    tree = ast.fix_missing_locations(removing.visit(ast.parse(Path(wait.path).read_text())))
    assert removing.num_found == 1, f"{wait} is there {removing.num_found} times"
    code = _function_at(compile(tree, wait.path, "exec", dont_inherit=True), wait.line)
    function = _function_named(wait.path, code.co_qualname)
    own, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = own


def _function_at(code: CodeType, line: int) -> CodeType:
    """Return the outermost function around a line; inner functions are part of its code."""
    inner = [each for each in code.co_consts if isinstance(each, CodeType)]
    (found,) = (each for each in inner if _spans(each, line))
    return found if found.co_flags & inspect.CO_OPTIMIZED else _function_at(found, line)


def _spans(code: CodeType, line: int) -> bool:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return any(line == own for *_, own in code.co_lines()) or any(_spans(e, line) for e in inner)


def _function_named(path: str, qualified: str) -> FunctionType:
    words = Path(path).relative_to(_PACKAGE.parent).with_suffix("").parts
    found: Any = import_module(".".join(words).removesuffix(".__init__"))
    for word in qualified.split("."):
        found = inspect.getattr_static(found, word)
    for inside in ("__func__", "fget", "func"):
        found = getattr(found, inside, found)
    function = inspect.unwrap(found)
    assert isinstance(function, FunctionType), f"{qualified} of {path} is {function}"
    return function
