"""Every damage to a checkpoint's files is found, by name, before anything is loaded."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline, run_on_threads
from gpipe_hpc.checkpoint import blocks, verifying
from gpipe_hpc.checkpoint.manifest import MANIFEST, manifest_text, read_manifest
from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.errors import CheckpointError


def verify(path):
    return verifying.verify(path, SoloGroup(0), 0)


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        verify(path)
    return str(caught.value)


def regions(path):
    """Return some places of each file: both ends, and all along."""
    for file in sorted(path.iterdir()):
        size = file.stat().st_size
        yield from ((file, at) for at in sorted({0, 1, size - 1, *range(0, size, size // 7)}))


def test_a_bit_flipped_anywhere_is_found(saved):
    """It loaded: weights were off by 1e37, and the run ended with code 0."""
    path = saved()
    verify(path)
    names = set()
    for file, at in regions(path):
        raw = file.read_bytes()
        for bit in (0, 6):
            changed = bytearray(raw)
            changed[at] ^= 1 << bit
            file.write_bytes(changed)
            assert file.name in refusal(path), (file, at, bit)
        file.write_bytes(raw)
        names.add(file.name)
    assert names == {".metadata", "__0_0.distcp", "__1_0.distcp", MANIFEST}
    verify(path)


def test_every_byte_of_the_manifest_counts(saved):
    path = saved()
    raw = (path / MANIFEST).read_bytes()
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= 1
        (path / MANIFEST).write_bytes(changed)
        with pytest.raises(ValueError, match=r".+"):
            read_manifest(path)


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp", MANIFEST])
@pytest.mark.parametrize("fault", ["missing", "empty", "short", "long", "folder", "link"])
def test_files_that_are_not_as_written_are_named_with_a_remedy(saved, name, fault):
    older = saved("step_1", steps=1)
    file = saved() / name
    raw = file.read_bytes()
    file.unlink()
    if fault == "folder":
        file.mkdir()
    elif fault == "link":
        file.symlink_to(file)
    elif fault != "missing":
        file.write_bytes({"empty": b"", "short": raw[:-1], "long": raw + b"\0"}[fault])
    text = refusal(file.parent)
    assert name in text
    assert f"checkpoint.resume={older}" in text


def test_a_file_of_another_step_is_found(saved):
    """It loaded: both are whole, but a part of the model was of another step."""
    one, other = saved("step_1", steps=1), saved("step_2", steps=2)
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        kept = (other / name).read_bytes()
        assert len((one / name).read_bytes()) == len(kept)
        shutil.copy(one / name, other / name)
        assert f"the file {name} is damaged" in refusal(other)
        (other / name).write_bytes(kept)
    verify(other)


def test_additional_files_are_not_read_but_named(saved, caplog):
    path = saved()
    (path / "__7_0.distcp").write_bytes(b"of another one")
    assert verify(path).facts["steps_done"] == 2
    assert "__7_0.distcp is not part of the checkpoint and is not read" in caplog.text


@pytest.mark.parametrize("text", ["", "{", "null", "[1]", "\x00" * 50, "[" * 99999])
def test_garbage_for_a_manifest_is_named(saved, text):
    path = saved()
    (path / MANIFEST).write_text(text)
    assert MANIFEST in refusal(path)


def test_a_newer_format_says_so(saved):
    path = saved()
    facts = read_manifest(path) | {"format": 3}
    (path / MANIFEST).write_bytes(manifest_text(facts))
    assert "format 3 from a newer version" in refusal(path)


@pytest.mark.parametrize(
    "files",
    [
        3,
        {"x": 3},
        {"../other": {"bytes": 1, "sha256": ["a"]}},
        {"..": {"bytes": 1, "sha256": ["a"]}},
        {"": {"bytes": 1, "sha256": ["a"]}},
        {"x": {"bytes": -1, "sha256": []}},
        {"x": {"bytes": "1", "sha256": ["a"]}},
        {"x": {"bytes": 1, "sha256": []}},
        {"x": {"bytes": 1}},
    ],
)
def test_files_that_nobody_would_list_are_refused(saved, files):
    path = saved()
    (path / MANIFEST).write_bytes(manifest_text(read_manifest(path) | {"files": files}))
    assert "with an invalid list of files" in refusal(path)


def test_a_model_without_tensors_is_saved_and_loaded(tmp_path):
    pipe = Pipeline([nn.Identity()], nn.MSELoss())
    path = pipe.save(tmp_path / "kept")
    pipe.steps_done = 5
    pipe.load(path)
    assert pipe.steps_done == 0


def test_the_manifest_tells_what_it_is(saved):
    facts = json.loads((saved() / MANIFEST).read_text())
    assert (facts["format"], facts["steps_done"]) == (2, 2)
    assert (facts["stages"], facts["replicas"], facts["schedule"]) == (2, 1, "gpipe")
    assert facts["tensors"]["model.layers.1.running_mean"] == {"shape": [3], "dtype": "float32"}
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["files"].keys() == {".metadata", "__0_0.distcp", "__1_0.distcp"}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7])
def test_ranks_share_the_reading_and_all_refuse(saved, monkeypatch, num_ranks):
    """Each block is read by one rank; the damage that one of them finds is raised by all."""
    monkeypatch.setattr("gpipe_hpc.checkpoint.saving.BLOCK_BYTES", 1000)
    monkeypatch.setattr(blocks.blocks_of, "__defaults__", (1000,))
    path = saved()
    read = []

    def noting(own):
        read.extend(own)
        return blocks.digests(own)

    monkeypatch.setattr(verifying, "digests", noting)

    def body(world):
        try:
            return verifying.verify(path, world.world_group, world.rank).facts["steps_done"]
        except CheckpointError as error:
            return str(error)

    assert run_on_threads(num_ranks, body) == [2] * num_ranks
    sizes = {file: file.stat().st_size for file in path.iterdir() if file.name != MANIFEST}
    expected = [block for file, size in sizes.items() for block in blocks.blocks_of(file, size)]
    assert sorted(read) == sorted(expected)

    file = path / "__0_0.distcp"
    raw = bytearray(file.read_bytes())
    raw[-1001] ^= 4
    file.write_bytes(raw)
    texts = run_on_threads(num_ranks, body)
    assert len(set(texts)) == 1 and "__0_0.distcp" in texts[0]
    start = (len(raw) - 1001) // 1000 * 1000
    assert f"changed content in bytes {start:,} to " in texts[0]


def test_how_far_it_is_is_said_and_the_last_round_counts(saved, monkeypatch):
    """A rank that reads for long is not taken for one that hangs."""
    monkeypatch.setattr("gpipe_hpc.checkpoint.saving.BLOCK_BYTES", 1000)
    monkeypatch.setattr(blocks.blocks_of, "__defaults__", (1000,))
    monkeypatch.setattr(verifying, "_BLOCKS_A_ROUND", 2)
    path = saved()

    def body(world):
        said = []
        try:
            verifying.verify(path, world.world_group, world.rank, said.append)
        except CheckpointError as error:
            return len(said), str(error)
        return len(said), ""

    whole = run_on_threads(3, body)
    assert len(set(whole)) == 1 and whole[0][0] > 3, "all ranks meet as often"
    last = sorted(file.name for file in path.iterdir() if file.name != MANIFEST)[-1]
    raw = bytearray((path / last).read_bytes())
    raw[-1] ^= 1
    (path / last).write_bytes(raw)
    for rounds, text in run_on_threads(3, body):
        assert rounds >= whole[0][0] - 1 and last in text


def test_ranks_that_see_other_folders_are_told(saved):
    """Two machines with a disk of their own each, under the same name."""
    one, other = saved("one"), saved("other", steps=1)

    def body(world):
        with pytest.raises(CheckpointError, match="ranks 0 and 1 see different checkpoints"):
            verifying.verify((one, other)[world.rank], world.world_group, world.rank)
        return "told"

    assert run_on_threads(2, body) == ["told", "told"]


def test_a_rank_that_sees_no_folder_is_named(saved):
    path = saved()

    def body(world):
        mine = path if world.rank == 0 else Path("/nowhere/at/all")
        with pytest.raises(CheckpointError, match=r"rank 1 on \S+: .*/nowhere.*no such folder"):
            verifying.verify(mine, world.world_group, world.rank)
        return "told"

    assert run_on_threads(2, body) == ["told", "told"]
