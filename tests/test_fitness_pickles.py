"""No code of the package unpickles, or calls what a file names, but in the places made for it."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gpipe_hpc"
# Restricted unpicklers of our own; and a target that the user's own settings name.
ALLOWED = {
    "checkpoint/metadata.py": {"pickle.Unpickler"},
    "comm/pickling.py": {"pickle.Unpickler"},
}
RISKY = re.compile(
    r"(pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib)\.(load|loads|Unpickler|_Unpickler|open)"
    r"|(torch|np|numpy)\.load|torch\.jit\.load|torch\.package\.\w+|pd\.read_pickle"
    r"|state_dict_loader\.load\w*|dcp\.load\w*|FileSystemReader\(.*\)\.read_metadata"
    r"|yaml\.(load|unsafe_load|full_load)|hydra\.utils\.(instantiate|call|get_\w+)|instantiate"
    r"|eval|exec|builtins\.\w+"
)


def risky(tree: ast.Module) -> Iterator[str]:
    """Yield what a module uses of the functions that run what data name."""
    called = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    bases = [b for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for b in node.bases]
    for node in [*called, *bases]:
        if RISKY.fullmatch(ast.unparse(node)):
            yield ast.unparse(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("pickle", "marshal", "shelve"):
            yield from (f"{node.module}.{name.name}" for name in node.names)


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_nothing_runs_what_files_name(path):
    found = set(risky(ast.parse(path.read_text("utf-8"))))
    assert found <= ALLOWED.get(path.relative_to(PACKAGE).as_posix(), set())


@pytest.mark.parametrize(
    "code",
    [
        "import pickle\npickle.loads(x)",
        "torch.load(file)",
        "from pickle import loads",
        "FileSystemReader(path).read_metadata()",
        "class R(pickle.Unpickler): pass",
        "np.load(path, allow_pickle=True)",
        "hydra.utils.instantiate(config)",
        "eval(text)",
    ],
)
def test_it_would_be_found(code):
    assert list(risky(ast.parse(code)))


def test_what_is_allowed_is_used():
    for name, uses in ALLOWED.items():
        assert uses <= set(risky(ast.parse((PACKAGE / name).read_text("utf-8"))))
