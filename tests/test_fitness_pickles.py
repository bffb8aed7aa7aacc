"""The package unpickles and calls functions named in data only in the listed modules."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "gpipe_hpc"
# Restricted unpicklers, which accept only known names and have their own tests.
ALLOWED = {
    "checkpoint/metadata.py": {"pickle._Unpickler"},
    "comm/net/pickling.py": {"pickle.Unpickler"},
    "config/commands.py": {"yaml.load"},  # with a safe loader, in C if available
    # For settings of the command itself; for those of a run folder see tests/export/test_trust.py.
    "config/targets.py": {"hydra.utils.instantiate", "instantiate"},
}
# With these arguments, NumPy rejects pickles, and torch unpickles only tensors.
SAFE = {"allow_pickle=False", "weights_only=True"}
MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
LOADING = re.compile(
    rf"({'|'.join(MODULES)})\.(load|loads|Unpickler|_Unpickler|open)"
    r"|(torch|np|numpy)\.load|torch\.jit\.load|torch\.package\.\w+|pd\.read_pickle"
    r"|(torch\.distributed|dist)\.((all_)?gather_object|(scatter|broadcast)_object_list"
    r"|(send|recv)_object_list)"
    r"|state_dict_loader\.load\w*|dcp\.load\w*"
    r"|yaml\.(load|unsafe_load|full_load)|hydra\.utils\.(instantiate|call|get_\w+)"
)
CALLING = re.compile(
    LOADING.pattern + r"|FileSystemReader\(.*\)\.read_metadata|instantiate|eval|exec|builtins\.\w+"
)


def risky(tree: ast.Module) -> Iterator[str]:
    """Yield uses of functions that may run code named in data."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = {node.func for node in calls}
    safe = [node for node in calls if SAFE & {*map(ast.unparse, node.keywords)}]
    refusing = {part for node in safe for part in (node.func, *node.args)}  # args: for partial
    for node in ast.walk(tree):
        if node in refusing:
            continue
        forbidden = CALLING if node in called else LOADING
        if isinstance(node, ast.Name | ast.Attribute) and forbidden.fullmatch(ast.unparse(node)):
            yield ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (n for n in names if n.endswith(".*") or LOADING.fullmatch(n))


def test_nothing_runs_what_files_or_messages_name():
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        found = set(risky(ast.parse(path.read_text("utf-8"))))
        assert found <= ALLOWED.get(name, set()), name


@pytest.mark.parametrize(
    "code",
    [
        "import pickle\npickle.loads(x)",
        "handed = pickle.loads",
        "torch.load(file)",
        "from pickle import loads",
        "from marshal import *",
        "FileSystemReader(path).read_metadata()",
        "class R(pickle.Unpickler): pass",
        "np.load(path, allow_pickle=True)",
        "import torch.distributed as dist\ndist.all_gather_object([], 1)",
        "from torch.distributed import broadcast_object_list",
        "hydra.utils.instantiate(config)",
        "eval(text)",
    ],
)
def test_it_would_be_found(code):
    assert len(list(risky(ast.parse(code)))) == 1


def test_a_reader_that_refuses_pickles_is_none():
    assert not list(risky(ast.parse("np.load(path, allow_pickle=False)")))
    assert not list(risky(ast.parse("from pickle import PicklingError")))


def test_what_is_allowed_is_used():
    for name, uses in ALLOWED.items():
        assert uses <= set(risky(ast.parse((PACKAGE / name).read_text("utf-8"))))
