"""Print size, imports and call counts of gpipe_hpc next to their targets.

python -m tests.house.house    from the repository root; takes minutes on a busy machine
"""

import ast
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.house.rooms import ROOT, room, sources
from tests.house.rules import files_with_ctypes, names_used_twice, small_files
from tests.test_fitness import torchs_private_names

# Prints the Python calls per micro-batch and the files used in the fourth step of a plain stage;
# the first three steps contain additional checks.
CALLS = """
import sys
from collections import Counter
from pathlib import Path
import torch
from torch import nn
import gpipe_hpc
from gpipe_hpc import Pipeline

own = str(Path(gpipe_hpc.__file__).parent)
torch.set_num_threads(1)
inputs, targets = torch.randn(16, 8), torch.randn(16, 8)


def calls(microbatches):
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    settings = dict(stages=1, microbatches=microbatches, recompute="never", schedule="gpipe")
    pipe = Pipeline(layers, nn.MSELoss(), **settings)
    for _ in range(3):
        pipe.step(inputs, targets)
    files = Counter()

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(own):
            files[frame.f_code.co_filename] += 1

    sys.setprofile(count)
    pipe.step(inputs, targets)
    sys.setprofile(None)
    return files.total(), len(files)


few, more = calls(4), calls(8)
print((more[0] - few[0]) / 4, more[1])
"""


def cpu_s(code: str) -> float:
    """Return the CPU time in seconds of a new Python that runs `code`, the least of three runs."""

    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return min(once() for _ in range(3))


def count(holds: Callable[[ast.AST], bool], trees: list[ast.Module]) -> int:
    return sum(holds(node) for tree in trees for node in ast.walk(tree))


def is_statement(node: ast.AST) -> bool:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return isinstance(node, ast.stmt) and not (is_text and isinstance(node.value.value, str))


def is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef)


def num_lines(pattern: str) -> int:
    paths = subprocess.check_output(["git", "ls-files", pattern], text=True, cwd=ROOT).split()
    return sum(len((ROOT / path).read_text("utf-8").splitlines()) for path in paths)


def num_words(folder: Path) -> int:
    pages = [page for page in folder.rglob("*.md") if page.name != "settings.md"]
    return sum(len(page.read_text("utf-8").split()) for page in pages)


def main() -> None:
    files = sources()
    trees = {path: ast.parse(text) for path, text in files.items()}
    private = [
        path
        for path, tree in trees.items()
        if not path.endswith("torch_compat.py") and any(torchs_private_names(tree))
    ]
    done = subprocess.check_output([sys.executable, "-c", CALLS], text=True, cwd=ROOT)
    calls, files_in_step = done.split()[-2:]
    ratio = cpu_s("from gpipe_hpc import Pipeline; Pipeline") / cpu_s("import torch")
    rows = [
        ("statements", count(is_statement, [*trees.values()]), 29_700),
        ("files", len(files), 260),
        ("classes", count(is_class, [*trees.values()]), 400),
        ("class names used twice", len([*names_used_twice(files)]), 0),
        ("small files with one importer", len([*small_files(files, files)]), 0),
        ("files with ctypes outside device/", len([*files_with_ctypes(files)]), 0),
        ("files with private names of torch", len(private), 0),
        ("own calls of one F and B", float(calls), 75),
        ("files in a step", int(files_in_step), 25),
        ("import over torch's (CPU time)", round(ratio, 2), 1.5),
        ("words of docs without settings.md", num_words(ROOT / "docs"), 20_000),
    ]
    print(f"lines: {num_lines('gpipe_hpc/*.py')}, of tests {num_lines('tests/*.py')}")
    for name, value, aim in rows:
        print(f"{'short' if value > aim else 'met':5s} {name}: {value} (aim {aim})")
    print("room            files  classes  statements")
    for name, paths in by_room(files).items():
        inside = [trees[path] for path in paths]
        counts = (len(paths), count(is_class, inside), count(is_statement, inside))
        print(f"{name:15s} {counts[0]:5d} {counts[1]:8d} {counts[2]:11d}")
    sys.exit(any(value > aim for _, value, aim in rows))


def by_room(files: dict[str, str]) -> dict[str, list[str]]:
    sizes = Counter(map(room, files))
    return {name: [path for path in files if room(path) == name] for name in sizes}


if __name__ == "__main__":
    main()
