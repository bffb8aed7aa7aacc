"""Nothing of the package unpickles what others wrote, but the two readers that call nothing."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "gpipe_hpc"
FILES = sorted(PACKAGE.rglob("*.py"))

# Readers that take no name but those they know, each with a test of its own.
READERS = {"comm/pickling.py", "checkpoint/metadata.py"}
UNPICKLES = {
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open"),
    *("torch.load", "numpy.load", "np.load"),
    *("dist.all_gather_object", "dist.gather_object", "dist.scatter_object_list"),
    *("dist.broadcast_object_list", "dist.send_object_list", "dist.recv_object_list"),
}


def unpickling(tree: ast.Module) -> Iterator[str]:
    """Yield each use of something that unpickles without restriction."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if name in UNPICKLES:
                yield f"line {node.lineno}: {name}"
        elif isinstance(node, ast.ImportFrom):
            taken = {f"{(node.module or '').split('.')[-1]}.{alias.name}" for alias in node.names}
            if node.module == "torch.distributed":
                taken = {f"dist.{alias.name}" for alias in node.names}
            yield from (f"line {node.lineno}: {name}" for name in sorted(taken & UNPICKLES))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_nothing_is_unpickled_without_restriction(path):
    if path.relative_to(PACKAGE).as_posix() in READERS:
        return
    assert list(unpickling(ast.parse(path.read_text("utf-8")))) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle\npickle.loads(b'')",
        "import torch\ntorch.load('f')",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from pickle import loads",
        "from torch.distributed import broadcast_object_list",
        "import numpy as np\nnp.load('f', allow_pickle=True)",
    ],
)
def test_the_look_for_it_finds_it(text):
    assert len(list(unpickling(ast.parse(text)))) == 1
