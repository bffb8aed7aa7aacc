"""Errors of the operating system are reported with a remedy that fits the error."""

import errno
import os
import resource
from contextlib import contextmanager

import pytest
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.config import compose_config
from gpipe_hpc.data.paths import unreadable
from gpipe_hpc.draw.pictures import write_picture
from gpipe_hpc.errors import ConfigError, GpipeError, os_remedy, words_of
from gpipe_hpc.models.huggingface.configs import read_json
from gpipe_hpc.schedule import build
from gpipe_hpc.trainer.run.opening import own_folder
from gpipe_hpc.trainer.signals import StopRequest
from gpipe_hpc.trainer.traces.files import read_trace

LONG = "n" * 300


@contextmanager
def no_descriptor_left():
    """Context in which this process has opened as many files as its limit allows."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    handles = []
    try:
        while True:
            try:
                handles.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        yield
    finally:
        for handle in handles:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize(
    "act",
    [
        lambda path: write_picture("text", str(path)),
        lambda path: read_trace(path),
        lambda path: build("file", ranks=1, microbatches=1, path=str(path)),
        lambda path: own_folder(compose_config([f"run.dir={path}"]), StopRequest()).__enter__(),
        lambda path: Pipeline([nn.Linear(2, 2)], nn.MSELoss()).save(path),
    ],
    ids=["picture", "trace", "schedule", "run_folder", "checkpoint"],
)
def test_real_mishaps_name_their_remedy(tmp_path, act):
    """Regression: all errors, such as a full disk or a wrong path, had the same remedy."""
    (tmp_path / "file").write_text("")
    with pytest.raises(GpipeError, match="its name is too long"):
        act(tmp_path / LONG)
    with pytest.raises(GpipeError, match="a part of the path is a file"):
        act(tmp_path / "file" / "x")


def test_too_many_open_files_are_told_from_permissions(tmp_path):
    (tmp_path / "trace.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    for read in (read_trace, read_json):
        name = "trace.json" if read is read_trace else "config.json"
        told = ""
        with no_descriptor_left():
            try:
                read(tmp_path / name)
            except GpipeError as error:
                told = str(error)
        assert "too many files open: raise the limit (ulimit -n)" in told


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EACCES, "correct the permissions of the file"),
        (errno.EROFS, "mounted read-only"),
        (errno.ENAMETOOLONG, "choose a shorter one"),
        (errno.ENOTDIR, "a part of the path is a file"),
        (errno.ETIMEDOUT, "its file server does not answer"),
        (errno.E2BIG, "create it again, check the file system, or remove it from data"),
    ],
)
def test_data_have_these_remedies_and_one_for_others(tmp_path, number, words):
    assert words in str(unreadable(tmp_path, OSError(number, os.strerror(number))))


def test_remedies_are_of_the_system_alone():
    assert os_remedy(None) is None
    assert os_remedy(ValueError("x")) is None
    assert os_remedy(OSError("no number")) is None
    assert "not connected" in (os_remedy(OSError(errno.ENOTCONN, "x")) or "")


def test_frames_of_cpp_are_left_out_of_what_torch_says():
    """Regression: for a number too large for torch, the message had 30 lines of C++ frames."""
    with pytest.raises(TypeError) as raised:
        nn.Embedding(2**64, 8, device="meta")
    assert words_of(raised.value).startswith("TypeError: ")
    assert "\n" not in words_of(raised.value) and "frame #" not in words_of(raised.value)
    added = RuntimeError("too much\nException raised from f at a.cpp:3\nframe #0: g\n")
    assert words_of(added) == "RuntimeError: too much"


@pytest.mark.parametrize(
    ("number", "is_setting"),
    [(errno.EISDIR, True), (errno.ELOOP, True), (errno.EIO, False), (errno.ESTALE, False)],
)
def test_a_wrong_path_of_data_is_a_setting_and_a_failing_disk_is_none(number, is_setting, tmp_path):
    """Regression: a folder in place of a file exited with code 1, as if the disk had failed."""
    error = unreadable(tmp_path, OSError(number, os.strerror(number)))
    assert isinstance(error, ConfigError) == is_setting


def test_other_ranks_read_the_cause_without_frames_of_cpp():
    said = "store lost\nException raised from recvBytes at Utils.hpp:672\nframe #0"

    def body(world):
        try:
            with collective_errors(world, "saving"):
                if world.rank == 1:
                    raise RuntimeError(said)
                world.world_group.broadcast_object(None, root=1)
        except GpipeError as error:
            return str(error)
        except RuntimeError as error:
            return str(error)

    heard, own = run_on_threads(2, body)
    assert own == said
    assert "saving: RuntimeError: store lost" in heard and "frame" not in heard
