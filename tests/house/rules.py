"""Structural rules for finished rooms; each function returns descriptions of the violations."""

import ast
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

from tests.house.rooms import PACKAGE, edges, imports, is_upward, module_name, room

MOST_NAMES: Final = 25
VERSION: Final = f"{PACKAGE}.__version__"
SMALL: Final = 60  # lines
# Folders in which small files are allowed: one schedule, model or callback per file.
LEAVES: Final = ("families", "zoo", "callbacks")
# Files outside device/ that may import ctypes, each with its reason.
CTYPES: Final[dict[str, str]] = {}

Files = Mapping[str, str]


def broken(files: Files, finished: Collection[str]) -> list[str]:
    """Return all violations of the rules in finished rooms and in imports of finished rooms."""
    inside = {path: text for path, text in files.items() if room(path) in finished}
    return [
        *imports_past_the_face(files, inside),
        *large_faces(inside),
        *upward_imports(files, inside),
        *cycles(inside),
        *names_used_twice(inside),
        *small_files(files, inside),
        *uses_of_ctypes(inside),
        *patches(inside),
    ]


def folder_of(path: str) -> str:
    """Return the path of the package that contains a file, or of a top-level module itself."""
    return "/".join(path.split("/")[:2])


def imports_past_the_face(files: Files, inside: Files) -> Iterator[str]:
    for importer, imported, line in edges(files):
        face = f"{folder_of(imported)}/__init__.py"
        is_outside = folder_of(importer) != folder_of(imported)
        if imported in inside and is_outside and imported not in (face, folder_of(imported)):
            yield f"{importer}:{line}: imports {imported}, expected only the face {face}"


def large_faces(inside: Files) -> Iterator[str]:
    for path, text in inside.items():
        if path == f"{folder_of(path)}/__init__.py" and len(names_of(text)) > MOST_NAMES:
            yield f"{path}: exports {len(names_of(text))} names, expected at most {MOST_NAMES}"


def names_of(face: str) -> set[str]:
    """Return the names in `__all__` of an ``__init__.py``, or all imported names if it has none."""
    tree = ast.parse(face)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
    return {name for _, _, name in imports(tree) if name}


def upward_imports(files: Files, inside: Files) -> Iterator[str]:
    """Yield imports of finished rooms by earlier rooms; imports by finished rooms are exempt."""
    own_face = f"{PACKAGE}/__init__.py"
    for importer, imported, line in edges(files):
        is_checked = imported in inside and own_face not in (importer, imported)
        if is_checked and is_upward(importer, imported):
            yield f"{importer}:{line}: {room(importer)} imports upwards, {imported}"


def unusual_imports(files: Files) -> list[str]:
    """Return relative imports, and imports from the package's interface for users."""
    modules = set(map(module_name, files))
    found = []
    for path, text in files.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                is_face = node.module == PACKAGE and not {*names} <= {*modules, VERSION}
                if node.level or is_face:
                    found.append(f"{path}:{node.lineno}: {ast.unparse(node)}")
    return found


def cycles(inside: Files) -> Iterator[str]:
    """Yield each group of files that import each other, including under TYPE_CHECKING."""
    after: defaultdict[str, set[str]] = defaultdict(set)
    for importer, imported, _ in edges(inside):
        after[importer].add(imported)
    reached = {path: _reachable(path, after) for path in inside}
    groups = {
        frozenset(other for other in reached[path] if path in reached[other])
        for path in inside
        if path in reached[path]
    }
    yield from (f"import each other: {', '.join(sorted(group))}" for group in groups)


def _reachable(start: str, after: Mapping[str, set[str]]) -> set[str]:
    found: set[str] = set()
    left = [start]
    while left:
        new = after.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def names_used_twice(inside: Files) -> Iterator[str]:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, text in inside.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    for name, found in places.items():
        if len(found) > 1:
            yield f"class {name} is defined {len(found)} times: {', '.join(found)}"


def small_files(files: Files, inside: Files) -> Iterator[str]:
    users = importers(files)
    for path in inside:
        parts = PurePosixPath(path)
        is_exempt = parts.name.startswith("__") or set(parts.parts) & set(LEAVES)
        num_lines = len(files[path].splitlines())
        if not is_exempt and num_lines <= SMALL and len(users[path]) == 1:
            (user,) = users[path]
            yield f"{path}: {num_lines} lines with one importer, fold it into {user}"


def importers(files: Files) -> dict[str, set[str]]:
    """Return the files that import each file, except ``__init__.py`` files."""
    users: defaultdict[str, set[str]] = defaultdict(set)
    for importer, imported, _ in edges(files):
        if not importer.endswith("/__init__.py"):
            users[imported].add(importer)
    return users


def uses_of_ctypes(inside: Files) -> Iterator[str]:
    for path in files_with_ctypes(inside):
        if path not in CTYPES:
            yield f"{path}: ctypes belongs in {PACKAGE}/device/"


def files_with_ctypes(files: Files) -> Iterator[str]:
    for path, text in files.items():
        modules = {module.split(".")[0] for _, module, _ in imports(ast.parse(text))}
        if "ctypes" in modules and room(path) != "device":
            yield path


def patches(inside: Files) -> Iterator[str]:
    """Yield assignments to attributes of other packages; the standard library is exempt."""
    for path, text in inside.items():
        tree = ast.parse(text)
        foreign = foreign_names(tree)
        for node in ast.walk(tree):
            targets: list[ast.expr] = []
            if isinstance(node, ast.Assign | ast.Delete):
                targets = list(node.targets)
            elif isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
                targets = [ast.Attribute(node.args[0], "")]
            for target in targets:
                root = ast.unparse(target).split(".")[0].split("[")[0]
                if isinstance(target, ast.Attribute) and root in foreign:
                    yield f"{path}:{node.lineno}: patches {foreign[root]}"


def foreign_names(tree: ast.Module) -> dict[str, str]:
    """Map each name imported from another package at the top of a file to its module."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = alias.name
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name: node.module or "" for alias in node.names}
    own = {PACKAGE, *sys.stdlib_module_names}
    return {name: module for name, module in found.items() if module.split(".")[0] not in own}
