"""Tests of the wheel in an environment that cannot import from the checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support import product

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, repository) -> Path:
    """Build the wheel with the tools of the lock file; return its path."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", folder, repository], check=True)
    (path,) = folder.glob("gpipe_hpc-*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """Install the wheel into a new environment; return the path of its interpreter.

    Dependencies are taken from the test environment through a .pth file, which does not make the
    checkout importable.
    """
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=True)
    python = home / "bin" / "python"
    own = sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)})
    Path(own, "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(command, check=True)
    return python


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"OMP_NUM_THREADS": "1"}


def test_wheel_holds_package_settings_and_licence(wheel, repository):
    names = set(zipfile.ZipFile(wheel).namelist())
    settings = {
        f"gpipe_hpc/{path.relative_to(repository).as_posix()}"
        for path in (repository / "conf").rglob("*.yaml")
    }
    assert settings <= names and "gpipe_hpc/py.typed" in names
    assert any(name.endswith("/LICENSE") for name in names)
    assert not any(name.startswith("tests/") for name in names)


TORCH_OF_AN_IMAGE = "2.13.0a0+8145d630e8.nv26.06"


def pretend(folder: Path, name: str, version: str, *needs: str) -> None:
    """Write the metadata from which pip concludes that a package is installed."""
    place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (place / "METADATA").write_text("\n".join([*lines, *(f"Requires-Dist: {n}" for n in needs)]))
    (place / "INSTALLER").write_text("pip\n")


def test_a_torch_that_is_there_is_kept(wheel, tmp_path, repository):
    """An installed pre-release that a constraint file pins, as in NVIDIA's images, is kept."""
    venv.create(tmp_path / "image", with_pip=True)
    place = {"base": str(tmp_path / "image"), "platbase": str(tmp_path / "image")}
    own = Path(sysconfig.get_path("purelib", vars=place))
    project = tomllib.loads((repository / "pyproject.toml").read_text("utf-8"))["project"]
    for name in {Requirement(text).name for text in project["dependencies"]} - {"torch"}:
        pretend(own, name, "99.0", *["torch>=1.8.0"] * (name == "fairscale"))
    pretend(own, "torch", TORCH_OF_AN_IMAGE)
    (tmp_path / "constraint.txt").write_text(f"torch=={TORCH_OF_AN_IMAGE}\n")
    python = tmp_path / "image" / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "--no-index", wheel],
        env=environment() | {"PIP_CONSTRAINT": str(tmp_path / "constraint.txt")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Successfully installed gpipe-hpc-" in done.stdout
    assert (own / f"torch-{TORCH_OF_AN_IMAGE}.dist-info").exists()


def test_settings_are_found_from_any_folder(python, tmp_path):
    code = (
        "import gpipe_hpc.config as c; print(c.conf_dir()); print(c.compose_config().train.steps)"
    )
    done = subprocess.run(
        [python, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    folder, steps = done.stdout.split()
    assert Path(folder).is_relative_to(python.parent.parent) and int(steps) > 0


@pytest.mark.parametrize("ranks", [3, product(8)])
def test_ranks_train_from_an_empty_folder(python, tmp_path, ranks):
    command = [python, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(ranks)]
    settings = ["train.steps=5", "run.dir=run", "comm.timeout_s=300"]
    done = subprocess.run(
        [*command, "-m", "gpipe_hpc.train", *settings],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in lines} == {1, 2, 3, 4, 5}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
