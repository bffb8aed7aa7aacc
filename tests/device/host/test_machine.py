"""One function says which machine a process is on, by the namespace that is to be shared."""

import os
from pathlib import Path

import pytest

import gpipe_hpc
from gpipe_hpc.comm.world import membership
from gpipe_hpc.device.host.machine import (
    clock_identity,
    folder_identity,
    shared_identity,
    started_by,
)
from gpipe_hpc.trainer.run import lock

NAMESPACES = ("net", "mnt", "pid", "time")


@pytest.fixture
def in_a_container(monkeypatch):
    """Return a function: give this process a namespace of its own, by its name."""
    real = os.readlink

    def enter(namespace):
        own = f"/proc/self/ns/{namespace}"
        monkeypatch.setattr(os, "readlink", lambda p: "other" if p == own else real(p))

    return enter


@pytest.mark.parametrize("entered", NAMESPACES)
def test_another_namespace_is_another_place_for_what_it_divides_alone(in_a_container, entered):
    before = {name: shared_identity(name) for name in NAMESPACES}
    assert all(before.values()) and len({*before.values()}) == len(NAMESPACES)
    in_a_container(entered)
    after = {name: shared_identity(name) for name in NAMESPACES}
    assert {name for name in NAMESPACES if before[name] != after[name]} == {entered}


@pytest.mark.parametrize(
    ("asks", "namespace"),
    [(membership._machine, "net"), (lock.machine, "pid"), (clock_identity, "time")],
    ids=["roll call", "lock of a run", "clock"],
)
def test_each_asks_about_the_namespace_that_it_lives_by(in_a_container, asks, namespace):
    before = asks()
    in_a_container("mnt")
    assert asks() == before
    in_a_container(namespace)
    assert asks() != before


def test_a_folder_is_itself_whatever_else_of_the_file_system_is_seen(in_a_container, tmp_path):
    """Containers of one job, each with its own mounts, share memory if they share a folder."""
    before = folder_identity(tmp_path)
    in_a_container("mnt")
    assert folder_identity(tmp_path) == before != ""
    (tmp_path / "other").mkdir()
    assert folder_identity(tmp_path / "other") != before
    # Under the same path something else, as a container's own /tmp: another mount or inode.
    tmp_path.rename(tmp_path.with_name("moved"))
    tmp_path.mkdir()
    assert folder_identity(tmp_path) != before
    assert folder_identity(tmp_path / "missing") == ""


def processes_of(folder, *commands):
    """Make a /proc in which this process is the last of a line."""
    parent = 0
    for number, words in enumerate(commands, start=1):
        pid = os.getpid() if number == len(commands) else number
        (folder / str(pid)).mkdir(parents=True)
        (folder / str(pid) / "cmdline").write_text("\0".join(words) + "\0")
        (folder / str(pid) / "stat").write_text(f"{pid} (a (b) c) S {parent} 0 0")
        parent = pid
    return folder


@pytest.mark.parametrize(
    ("above", "in_container", "found"),
    [
        ([["/sbin/init"], ["slurmstepd: [7.0]"]], False, True),
        ([["/usr/bin/tini"], ["slurmstepd: [7.0]"]], True, True),  # all of Slurm in a container
        ([["/sbin/init"], ["bash"]], False, False),
        ([["/usr/bin/tini"], ["bash"]], True, None),  # podman run, by a task of srun
        ([], True, None),
    ],
)
def test_what_started_a_process_may_be_outside(monkeypatch, tmp_path, above, in_container, found):
    real = os.readlink
    inode = "pid:[4026539999]" if in_container else "pid:[4026531836]"
    monkeypatch.setattr(os, "readlink", lambda p: inode if p == "/proc/self/ns/pid" else real(p))
    proc = processes_of(tmp_path, *above, ["python", "-m", "gpipe_hpc.train"])
    assert started_by(("slurmstepd",), proc) is found


def test_where_the_system_does_not_tell_it_is_empty(monkeypatch):
    def refuse(*_, **__):
        raise PermissionError("hidden")

    monkeypatch.setattr(Path, "read_text", refuse)
    assert [shared_identity(name) for name in NAMESPACES] == [""] * len(NAMESPACES)


def test_nobody_else_asks():
    """The same question stood in six files, with four answers for a system that does not tell."""
    package = Path(gpipe_hpc.__file__).parent
    asking = [p for p in package.rglob("*.py") if "boot_id" in p.read_text("utf-8")]
    assert [p.relative_to(package).as_posix() for p in asking] == ["device/host/machine.py"]
