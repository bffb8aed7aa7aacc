"""Fixtures for tests on clusters: a real Slurm, containers, and an edited batch script."""

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.cluster.containers import DEFINED, Containers
from tests.cluster.slurm import Slurm


@pytest.fixture(scope="session")
def all_of_slurm(repository: Path) -> Iterator[Slurm]:
    launchers = ("SLURM", "RANK", "WORLD_", "LOCAL_", "MASTER_", "TORCHELASTIC_")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    slurm = Slurm(environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(repository)})
    try:
        yield slurm.start()
    finally:
        slurm.stop()


@pytest.fixture
def slurm(all_of_slurm: Slurm) -> Iterator[Slurm]:
    """Return a running Slurm whose nodes are all idle."""
    yield all_of_slurm
    all_of_slurm.restore()


@pytest.fixture(scope="session")
def storage() -> Iterator[Containers]:
    """Return a storage of container images; CLUSTER_STORAGE names a folder to keep between runs."""
    kept = os.environ.get("CLUSTER_STORAGE")
    folder = Path(kept) if kept else Path(tempfile.mkdtemp(prefix="containers_"))
    containers = Containers(folder, os.environ)
    try:
        yield containers
    finally:
        if not kept:
            containers.remove()


@pytest.fixture(scope="session")
def built(storage: Containers, repository: Path) -> Containers:
    """Build the image of the Dockerfile; return the storage that contains it."""
    storage.build(repository)
    return storage


@pytest.fixture
def defined(storage: Containers, repository: Path) -> Iterator[tuple[Containers, str]]:
    """Build the image of Apptainer's definition file; return the storage and the image's name."""
    storage.build_defined(repository)
    yield storage, DEFINED
    storage.stop()


@pytest.fixture
def containers(built: Containers) -> Iterator[Containers]:
    """Return an object that starts containers of the image; they are stopped after the test."""
    yield built
    built.stop()


Edited = Callable[..., Path]


@pytest.fixture
def edited(repository: Path, tmp_path: Path) -> Edited:
    """Return a function that edits the settings at the top of train.sbatch, as a user does."""

    def edit(settings: Sequence[str], prepare: str = ":", **values: object) -> Path:
        text = (repository / "cluster" / "slurm" / "train.sbatch").read_text()
        before, start, rest = text.partition("# ===")
        top, end, script = rest.partition("edit to here")
        assert start and end, "train.sbatch says where to edit"
        words = shlex.join([sys.executable, "-m", "gpipe_hpc.train", *settings])
        bodies = {"prepare": prepare, "what_runs": f"COMMAND=({words})"}
        for name, body in bodies.items():
            top, count = re.subn(
                rf"^{name}\(\) \{{.*?^\}}",
                lambda _, name=name, body=body: f"{name}() {{ {body}; }}",
                top,
                flags=re.M | re.S,
            )
            assert count == 1, name
        for name, value in ({"PREFLIGHT": "false"} | values).items():
            top, count = re.subn(
                rf"^{name}=\S*", lambda _, v=value: f"{_[0].partition('=')[0]}={v}", top, flags=re.M
            )
            assert count == 1, name
        path = tmp_path / "train.sbatch"
        path.write_text(before + start + top + end + script)
        return path

    return edit
