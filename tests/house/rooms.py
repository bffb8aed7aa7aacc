"""Imports from a room of a later room in `ORDER`, which are called upward imports.

    python -m tests.house.rooms [ROOM]    with ROOM: each import, file by file

A room is a package of `gpipe_hpc`. `ROOMS` assigns files outside of these packages to a room.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = "gpipe_hpc"
# A room may import only rooms that precede it.
ORDER: Final = (
    *("errors", "schedule", "settings", "visualize", "pytree", "device", "comm", "models"),
    *("data_parallel", "engine", "planner", "config", "checkpoint", "pipeline", "data", "optim"),
    *("preflight", "report", "trainer", "verify", "commands"),
)
# Rooms of files and of folders (ending with a slash); the first match counts.
ROOMS: Final = {
    "units.py": "errors",
    "setting_names.py": "errors",
    "small_files.py": "errors",
    "yaml_files.py": "errors",
    "torch_compat.py": "pytree",
    "batches.py": "pytree",
    "draw/": "commands",
    "bench/": "commands",
    "export/": "commands",
    "train.py": "commands",
    "plan.py": "commands",
    "draw.py": "commands",
    "bench.py": "commands",
    "export.py": "commands",
    "__main__.py": "commands",
    "__init__.py": "commands",
}


def sources() -> dict[str, str]:
    """Return the text of each file of the package, by path relative to the repository root."""
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def room(path: str) -> str:
    inside = path.removeprefix(f"{PACKAGE}/")
    for prefix, name in ROOMS.items():
        if inside == prefix or (prefix.endswith("/") and inside.startswith(prefix)):
            return name
    top = inside.split("/")[0].removesuffix(".py")
    if top not in ORDER:
        raise SystemExit(f"{path}: no room for it; add a rule to ROOMS in tests/house/rooms.py")
    return top


def is_upward(importer: str, imported: str) -> bool:
    return ORDER.index(room(imported)) > ORDER.index(room(importer))


def module_name(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imports(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, module and name (empty for ``import module``) of each import in a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)


def edges(files: Mapping[str, str]) -> Iterator[tuple[str, str, int]]:
    """Yield (importing file, imported file, line) of each import within the package.

    If an imported name is a module, the imported file is that module's.
    """
    paths = {module_name(path): path for path in files}
    for path, text in files.items():
        for line, module, name in imports(ast.parse(text)):
            imported = paths.get(f"{module}.{name}") or paths.get(module)
            if imported and imported != path:
                yield path, imported, line


def upward_imports(files: Mapping[str, str]) -> set[tuple[str, str]]:
    """Return all upward imports as (importing file, imported file) pairs.

    Imports by or of ``gpipe_hpc/__init__.py``, the interface for users, are exempt.
    """
    face = f"{PACKAGE}/__init__.py"
    return {
        (importer, imported)
        for importer, imported, _ in edges(files)
        if face not in (importer, imported) and is_upward(importer, imported)
    }


def main(chosen: str = "") -> None:
    pairs: defaultdict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for importer, imported in sorted(upward_imports(sources())):
        pairs[room(importer), room(imported)].append((importer, imported))
    for (low, high), found in sorted(pairs.items(), key=lambda item: -len(item[1])):
        if chosen in (low, high):
            for importer, imported in found:
                print(f"{low} -> {high}: {importer} imports {imported}")
        elif not chosen:
            names = sorted({imported.removeprefix(f"{PACKAGE}/") for _, imported in found})
            print(f"{len(found):4d}  {low} -> {high}: {', '.join(names)}")
    print(f"{sum(map(len, pairs.values()))} imports run upwards between rooms")


if __name__ == "__main__":
    main(*sys.argv[1:])
