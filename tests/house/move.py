"""Move the files of the package and its tests to the folders of design.md, section 3. Run once.

    python tests/house/move.py    also on a branch that was rebased over the move

Moves what still stands at an old place, then rewrites each import, module path and file path in
the repository. What was moved before stays as it is. This script goes as soon as no branch is
older than the move.
"""

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGE: Final = "gpipe_hpc"
ROOMS: Final = "tests/house/rooms.py"

# From old to new, without "gpipe_hpc."; a package ends with a dot. The longest that fits decides.
MOVES: Final = {
    "drawing.": "visualize.",
    "comm.nests": "pytree",
    "comm.setting": "setting_names",
    "comm.device": "device.device",
    "comm.cores.": "device.cores.",
    "comm.host.": "device.host.",
    "comm.preflight.": "preflight.",
    "comm.group": "comm.collectives.group",
    "comm.levels": "comm.collectives.levels",
    "comm.packed": "comm.collectives.packed",
    "comm.summing": "comm.collectives.summing",
    "comm.thread_plans": "comm.collectives.thread_plans",
    "comm.torch_face": "comm.collectives.torch_face",
    "comm.torch_group": "comm.collectives.torch_group",
    "comm.two_sided": "comm.collectives.two_sided",
    "comm.works": "comm.collectives.works",
    "comm.aliases": "comm.transport.aliases",
    "comm.byte_moves": "comm.transport.byte_moves",
    "comm.handing": "comm.transport.handing",
    "comm.thread_hub": "comm.transport.thread_hub",
    "comm.pickling": "comm.net.pickling",
    "comm.noting": "comm.watchdog.noting",
    "comm.saying": "comm.watchdog.saying",
    "comm.mesh": "comm.world.mesh",
    "comm.processes": "comm.world.processes",
    "comm.threads": "comm.world.threads",
    "comm.world": "comm.world.world",
    "comm.joining.": "comm.world.",
    "comm.joining.acquaintance": "comm.net.acquaintance",
    "comm.joining.interfaces": "comm.net.interfaces",
    "comm.joining.sealed_store": "comm.net.sealed_store",
    "comm.joining.secret": "comm.net.secret",
    "comm.reaching.": "comm.net.",
    "comm.reaching.forming": "comm.world.forming",
    "comm.reaching.pairs": "comm.collectives.pairs",
    "comm.failing.": "comm.watchdog.",
    "comm.watch.": "comm.watchdog.",
    "comm.mpi.": "comm.world.mpi.",
    "planning.": "planner.",
    "planning.telling.units": "units",
    "training.": "trainer.",
    "training.search.": "planner.search.",
    "training.foresight": "planner.foresight",
    "training.review": "planner.run_review",
    "training.neighbour.": "checkpoint.in_memory.",
    "training.data.": "data.",
    "training.indexing.": "data.indexing.",
    "training.optimizers.": "optim.",
    "training.preflight.": "preflight.",
}
# Tests that no rule above puts where they belong.
TESTS: Final = {
    "training/test_neighbour.py": "checkpoint/test_in_memory.py",
    "comm/mpi/test_joining.py": "comm/world/mpi/test_joining.py",
}
# `__init__.py` of packages that end up in one folder: the text of the new one.
FACES: Final = {
    "device": "Devices: CPU and accelerators, cores and their threads, memory of the host.",
    "comm/net": "How ranks reach each other: interfaces, addresses, secret, control messages.",
    "comm/world": "How processes and threads become ranks: launcher, rendezvous, mesh, worlds.",
    "comm/watchdog": "How a failure or silence reaches all ranks, and what a user reads about it.",
    "preflight": "`python -m gpipe_hpc.preflight`: are hosts, ranks and links fit for a run.",
}
# Text that only a reader would find: file, before, after.
EDITS: Final[tuple[tuple[str, str, str], ...]] = (
    (
        "tests/mutations.py",
        '"engine", "planning", "checkpoint", "training")',
        '"data_parallel", "engine", "planner", "checkpoint", "data", "trainer")',
    ),
    ("tests/test_fitness.py", 'PACKAGE / "comm" / "device.py"', 'PACKAGE / "device" / "device.py"'),
    ("tests/data/test_running.py", ".parents[3]", ".parents[2]"),
    *(
        ("docs/explanation/architecture.md", old, new)
        for old, new in (
            (
                "\nerrors  small_files  yaml_files     ",
                "\nerrors  units  small_files  yaml_files  ",
            ),
            (
                "\ntorch_compat                        private",
                "\npytree  torch_compat                private",
            ),
            (
                "\ndrawing                             text",
                "\nvisualize                           text",
            ),
            (
                "\ncomm                                devices, transports",
                "\ndevice                              devices, cores, memory of the host"
                "\ncomm                                transports",
            ),
            (
                "\nplanning                            costs",
                "\nplanner                             costs",
            ),
            (
                "\ntraining                            loop, data, optimizers, run",
                "\ndata  optim  preflight  report      datasets; optimizers; checks; reports"
                "\ntrainer                             loop, run",
            ),
        )
    ),
)

_DOTTED: Final = re.compile(rf"\b({PACKAGE}|tests)((?:\.[A-Za-z_]\w*)+)")
_PATH: Final = re.compile(rf"\b({PACKAGE}|tests)/((?:[\w-]+/)*[\w-]+(?:\.py)?)")
_TOPS: Final = sorted({name.split(".")[0] for name in MOVES})
_BARE_PATH: Final = re.compile(rf"(?<![\w./-])((?:{'|'.join(_TOPS)})/(?:\w+/)*\w+\.py)\b")
_BARE_FOLDER: Final = re.compile(rf"(?<![\w./-])((?:{'|'.join(_TOPS)})/(?:\w+/)+)(?=[\"'`\s])")
_FROM: Final = re.compile(rf"\bfrom ({PACKAGE}(?:\.\w+)+) import (\w+)(?= *(?:$|[\"';\\#`]))", re.M)


def git(*words: str) -> list[str]:
    return subprocess.check_output(["git", *words], text=True, cwd=ROOT).splitlines()


@cache
def stands(name: str) -> bool:
    """Say whether the tree has a module or package of this name (below the package)."""
    path = ROOT / PACKAGE / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path.is_dir() and any(path.glob("*.py")))


def moved(name: str) -> str:
    """Return the new name of a module, or of something in one, below the package."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        head, tail = ".".join(parts[:length]), parts[length:]
        if head + "." in MOVES:
            return ".".join([MOVES[head + "."].rstrip("."), *tail])
        if head in MOVES:
            # comm.world is an old module and a new package.
            is_new = tail and stands(f"{head}.{tail[0]}") and MOVES[head].startswith(f"{head}.")
            return name if is_new else ".".join([MOVES[head], *tail])
    return name


def moved_file(path: str) -> str:
    """Return the new place of a file of the package, below it."""
    folder, _, name = path.rpartition("/")
    dotted = path.removesuffix(".py").replace("/", ".")
    if path.endswith(".py") and dotted in MOVES:
        return MOVES[dotted].replace(".", "/") + ".py"
    return f"{_moved_folder(folder)}/{name}".lstrip("/")


def _moved_folder(folder: str) -> str:
    parts = folder.split("/")
    for length in range(len(parts), 0, -1):
        head = ".".join(parts[:length]) + "."
        if head in MOVES:
            return "/".join([MOVES[head].rstrip(".").replace(".", "/"), *parts[length:]])
    return folder


def moved_test(path: str) -> str:
    """Return the new place of a file below tests/: it follows the module that it is named after."""
    if path in TESTS:
        return TESTS[path]
    folder, _, name = path.rpartition("/")
    stem = name.removesuffix(".py").removeprefix("test_")
    for old, new in sorted(MOVES.items(), key=lambda item: -len(item[0])):
        parent, _, last = old.rpartition(".")
        is_named = stem == last or stem.startswith(f"{last}_")
        if name.endswith(".py") and last and parent.replace(".", "/") == folder and is_named:
            new_folder, _, new_last = new.replace(".", "/").rpartition("/")
            return f"{new_folder}/{name.replace(last, new_last, 1)}".lstrip("/")
    return f"{_moved_folder(folder)}/{name}".lstrip("/")


def move_files() -> int:
    """Move what stands at an old place; return how many files that were."""
    count = 0
    for top, new_place in ((PACKAGE, moved_file), ("tests", moved_test)):
        for full in git("ls-files", top):
            path = full.removeprefix(f"{top}/")
            target = new_place(path)
            if target == path:
                continue
            new = ROOT / top / target
            folder = target.rpartition("/")[0]
            if path.endswith("__init__.py") and top == PACKAGE and new.exists():
                git("rm", "-q", full)
            else:
                assert not new.exists(), f"{full}: {target} is there already"
                new.parent.mkdir(parents=True, exist_ok=True)
                git("mv", full, f"{top}/{target}")
            count += 1
            face = FACES.get(folder)
            if face and top == PACKAGE:
                (new.parent / "__init__.py").write_text(f'"""{face}"""\n', "utf-8")
                git("add", f"{top}/{folder}/__init__.py")
    stands.cache_clear()
    for folder in sorted(ROOT.glob(f"{PACKAGE}/**/"), reverse=True):
        if not any(folder.rglob("*.py")):
            shutil.rmtree(folder)
    return count


def rewritten(path: str, text: str) -> str:
    """Return the text with the new names of modules and files."""
    if path.endswith(".py"):
        return _rewritten_code(text)
    return _rewritten_text(text)


def _rewritten_code(text: str) -> str:
    """Rewrite `from ... import ...` by its meaning, and the rest as text."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    spans = []
    for node in ast.walk(ast.parse(text)):
        is_ours = isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE
        if isinstance(node, ast.ImportFrom) and is_ours and not node.level:
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
            spans.append((first, last, node))
    found, done = [], 0
    for first, last, node in sorted(spans, key=lambda span: span[0]):
        found += [_rewritten_text(text[done:first]), _import(node, text[first:last])]
        done = last
    return "".join([*found, _rewritten_text(text[done:])])


def _import(node: ast.ImportFrom, before: str) -> str:
    """Return an import of names from a module, as several if modules went to several packages."""
    by_module: dict[str, list[str]] = {}
    is_changed = False
    for alias in node.names:
        module, name, shown = _imported(node.module or "", alias.name)
        name_here = alias.asname or alias.name
        is_changed |= module != node.module or name != alias.name
        entry = shown if shown == name_here else f"{name} as {name_here}"
        by_module.setdefault(module, []).append(entry)
    if not is_changed:
        return before
    indent = "\n" + " " * node.col_offset
    statements = (f"from {m} import ({', '.join(names)})" for m, names in by_module.items())
    return indent.join(
        each.replace("(", "").replace(")", "") if len(each) < 90 else each for each in statements
    )


def _imported(module: str, name: str) -> tuple[str, str, str]:
    """Return from where a name comes now: module, name, and the name again."""
    inside = module.removeprefix(PACKAGE).lstrip(".")
    full = f"{inside}.{name}".lstrip(".")
    new_module, new_full = moved(inside) if inside else "", moved(full)
    if new_full != f"{new_module}.{name}".lstrip("."):  # a module that went elsewhere
        new_module, _, name = new_full.rpartition(".")
    return f"{PACKAGE}.{new_module}".rstrip("."), name, name


def _rewritten_text(text: str) -> str:
    def from_import(match: re.Match[str]) -> str:
        module, name, _ = _imported(match[1], match[2])
        shown = name if name == match[2] else f"{name} as {match[2]}"
        return f"from {module} import {shown}"

    def dotted(match: re.Match[str]) -> str:
        name = match[2].removeprefix(".")
        if match[1] == PACKAGE:
            return f"{PACKAGE}.{moved(name)}"
        path = moved_test(name.replace(".", "/") + ".py").removesuffix(".py")
        is_there = (ROOT / "tests" / f"{path}.py").is_file()
        return f"tests.{path.replace('/', '.')}" if is_there else match[0]

    def by_path(match: re.Match[str]) -> str:
        new_place = moved_file if match[1] == PACKAGE else moved_test
        path = match[2]
        if path.endswith(".py"):
            return f"{match[1]}/{new_place(path)}"
        return f"{match[1]}/{new_place(path + '/x').removesuffix('/x')}"

    text = _FROM.sub(from_import, text)
    text = _DOTTED.sub(dotted, text)
    text = _PATH.sub(by_path, text)
    text = _BARE_FOLDER.sub(lambda match: _moved_folder(match[1][:-1]) + "/", text)
    return _BARE_PATH.sub(lambda match: moved_file(match[1]), text)


def _rules_that_are_left(text: str) -> str:
    """Return rooms.py without the rules for files that have moved into their rooms."""

    def is_needed(line: str) -> bool:
        rule = re.fullmatch(r' +"([\w/.]+)": "(\w+)",', line.rstrip("\n"))
        return rule is None or (ROOT / PACKAGE / rule[1]).exists() or rule[1].count("/") == 0

    return "".join(line for line in text.splitlines(keepends=True) if is_needed(line))


def _list_upward_imports() -> str:
    """Write the list anew under the new names; return how many there are."""
    sys.path.insert(0, str(ROOT))
    from tests.house import rooms

    found = rooms.upward_imports(rooms.sources())
    lines = sorted(f"{importer} -> {imported}\n" for importer, imported in found)
    (ROOT / "tests" / "house" / "upward.txt").write_text("".join(lines), "utf-8")
    return str(len(lines))


def main() -> None:
    own = Path(__file__).relative_to(ROOT).as_posix()
    num_moved, num_changed = move_files(), 0
    for path in git("ls-files"):
        full = ROOT / path
        if path == own or not full.is_file():
            continue
        try:
            before = full.read_text("utf-8")
        except UnicodeDecodeError:
            continue
        after = _rules_that_are_left(before) if path == ROOMS else rewritten(path, before)
        for name, old, new in EDITS:
            if name == path and num_moved and old not in after:
                print(f"{path}: lacks {old!r}, so edit it by hand")
            elif name == path:
                after = after.replace(old, new)
        if after != before:
            full.write_text(after, "utf-8")
            num_changed += 1
    ruff = [sys.executable, "-m", "ruff"]
    subprocess.run([*ruff, "check", "-q", "--select", "I", "--fix", "."], cwd=ROOT, check=False)
    subprocess.run([*ruff, "format", "-q", "."], cwd=ROOT, check=False)
    upward = _list_upward_imports()
    print(f"{num_moved} files moved, {num_changed} rewritten; {upward} imports run upwards")


if __name__ == "__main__":
    main()
