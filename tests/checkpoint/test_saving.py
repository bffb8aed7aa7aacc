"""How a checkpoint is written: who writes what, in which order, and what is said if it fails."""

import errno
import os
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.checkpoint import saving, verify
from gpipe_hpc.checkpoint.contents import _writers
from gpipe_hpc.checkpoint.manifest import MANIFEST
from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.errors import CheckpointError


def pipeline(world=None, replicas=1, width=20):
    layers = [LayerSpec(nn.Linear, width, width) for _ in range(4)]
    return Pipeline(layers, nn.MSELoss(), replicas=replicas, world=world)


def test_everything_is_on_the_disk_before_the_rename(tmp_path, monkeypatch):
    """The folder was not: after a power cut it could be there without its files."""
    events = []
    fsync, rename = os.fsync, os.rename

    def noted_fsync(handle):
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def noted_rename(source, target, **options):
        events.append(("rename", Path(source)))
        rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "rename", noted_rename)
    path = tmp_path / "run" / "checkpoints" / "kept"
    run_on_threads(2, lambda world: pipeline(world).save(path))
    partial = path.with_name("kept.partial")
    ends = events.index(("rename", partial))
    before, after = events[:ends], events[ends + 1 :]
    files = {partial / name for name in ("__0_0.distcp", "__1_0.distcp", MANIFEST)}
    for file in files:
        assert ("fsync", file) in before
    assert {f for _, f in before} & {partial / ".metadata", partial / ".metadata.tmp"}
    assert before[-1] == ("fsync", partial), "the folder, when all its files are in it"
    for made in (tmp_path, tmp_path / "run"):
        assert ("fsync", made) in before, "folders made on the way are entries of others"
    assert ("fsync", path.parent) in after


def test_a_part_that_is_not_in_the_first_ranks_folder_ends_it(tmp_path, monkeypatch):
    """On machines without a shared folder: the checkpoint had a manifest, and half of its files."""
    write = saving.write_files

    def elsewhere(tensors, folder, rank):
        mine = folder if rank == 0 else tmp_path / "other machine"
        mine.mkdir(exist_ok=True)
        return write(tensors, mine, rank)

    monkeypatch.setattr(saving, "write_files", elsewhere)

    def body(world):
        with pytest.raises(
            CheckpointError, match=r"__1_0\.distcp of rank 1 is not visible here.*shared by"
        ):
            pipeline(world).save(tmp_path / "kept")
        return "told"

    assert run_on_threads(2, body) == ["told", "told"]
    assert [each.name for each in tmp_path.iterdir()] == ["other machine"]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_failure_of_the_system_is_told_by_its_errno(tmp_path, num_ranks):
    """A real one: files may not be longer than 3000 bytes. Torch says "unexpected pos"."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))

    def body(world):
        with pytest.raises(CheckpointError) as caught:
            pipeline(world).save(tmp_path / "kept")
        return str(caught.value)

    try:
        texts = run_on_threads(num_ranks, body)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    for text in texts:
        assert "OSError: [Errno 27] File too large; the file is too large for its file sys" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, r"0\.\d+ MB; its file system is full"),
        (errno.EDQUOT, "the quota of its file system is used up"),
        (errno.EROFS, "mounted read-only"),
        (errno.ESTALE, "its handle is stale"),
        (errno.EMFILE, "too many files open: raise the limit"),
        (errno.ENAMETOOLONG, "name is too long"),
        (errno.EACCES, "correct the permissions"),
        (errno.EIO, "the disk or its network failed"),
    ],
)
@pytest.mark.parametrize("where", ["write", "manifest", "folder"])
def test_each_errno_has_its_own_remedy(tmp_path, monkeypatch, number, words, where):
    """Whatever happened, the remedy was about permissions or the disk."""

    def failing(*_, **__):
        raise OSError(number, os.strerror(number))

    if where == "write":
        monkeypatch.setattr(saving, "write_files", failing)
    elif where == "manifest":
        monkeypatch.setattr(saving, "manifest_text", failing)
    else:
        monkeypatch.setattr(Path, "mkdir", failing)
        words = words.rpartition("; ")[2]
    with pytest.raises(CheckpointError, match=rf"\[Errno {number}\].*{words}"):
        pipeline().save(tmp_path / "kept")
    assert not list(tmp_path.iterdir())


def test_real_mishaps_at_making_the_folder(tmp_path):
    (tmp_path / "file").write_text("")
    for path, words in (
        (tmp_path / "file" / "x", "a part of the path is a file"),
        (tmp_path / ("n" * 300), "its name is too long"),
        (Path("/proc/none/x"), "the folder cannot be created"),
    ):
        with pytest.raises(CheckpointError, match=words):
            pipeline().save(path)


def test_ranks_write_their_own_and_copies_share(tmp_path):
    """Each tensor once, by one of those that hold it, so that replicas write in parallel."""

    def body(world):
        pipe = pipeline(world, replicas=2)
        return pipe.save(tmp_path / "kept")

    path = run_on_threads(4, body)[0]
    sizes = [(path / f"__{rank}_0.distcp").stat().st_size for rank in range(4)]
    assert min(sizes) > 0.4 * max(sizes)
    stored = verify(path, SoloGroup(0), 0).stored
    assert len(stored) == 8
    assert {tensor.file for tensor in stored.values()} == {f"__{r}_0.distcp" for r in range(4)}


def test_each_tensor_goes_to_the_holder_with_the_least_to_write():
    sizes = [{"a": 5, "b": 1, "c": 1}, {"a": 5, "b": 1, "c": 1, "d": 7}]
    assert _writers(sizes) == {"a": 0, "b": 1, "c": 1, "d": 1}


def test_a_rank_without_tensors_writes_no_file(tmp_path):
    def body(world):
        layers = [LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.Identity)]
        return Pipeline(layers, nn.MSELoss(), world=world).save(tmp_path / "kept")

    path = run_on_threads(2, body)[0]
    assert {each.name for each in path.iterdir()} == {"__0_0.distcp", ".metadata", MANIFEST}


def test_no_path_of_the_machine_is_stored(tmp_path):
    path = pipeline().save(tmp_path / "kept")
    for file in path.iterdir():
        assert str(tmp_path).encode() not in file.read_bytes()


def test_a_view_is_stored_without_what_it_is_a_view_of(tmp_path):
    """A buffer may be a slice of a large table."""

    class Slice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))
            self.register_buffer("part", torch.zeros(100_000)[:3])

        def forward(self, inputs):
            return inputs

    path = Pipeline([Slice()], nn.MSELoss()).save(tmp_path / "kept")
    assert (path / "__0_0.distcp").stat().st_size < 10_000


def test_what_lies_on_the_host_is_written_without_a_word_to_a_gpu(tmp_path, monkeypatch):
    """Where there is one, torch waited for all that its stream had to do, each 10 MB anew."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tensors = {"a": torch.arange(6.0), "b": torch.ones(2, 3)}
    written = saving.write_files(tensors, tmp_path, 0)
    assert set(written.tensors) == {"a", "b"}
