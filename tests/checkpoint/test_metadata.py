"""Nothing that `.metadata` holds is run, and only what torch writes for whole tensors is read."""

import os
import pickle
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import metadata as of_torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo

from gpipe_hpc.checkpoint import verify
from gpipe_hpc.checkpoint.manifest import MANIFEST, manifest_text, read_manifest
from gpipe_hpc.checkpoint.metadata import METADATA, StoredTensor, fill, read_metadata
from gpipe_hpc.checkpoint.saving import _entry
from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.errors import CheckpointError

OLD = Path(__file__).with_name("format_1")


class Calling:
    """What a pickle makes of it is a call."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


def listed(folder, value):
    """Write a list of tensors that is none."""
    (folder / METADATA).write_bytes(pickle.dumps(value))
    return folder


def with_manifest(path):
    """Give a checkpoint a manifest that fits its files: one made on purpose."""
    facts = read_manifest(path)
    facts["files"] = {name: _entry(path / name) for name in facts["files"]}
    (path / MANIFEST).write_bytes(manifest_text(facts))
    return path


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "call",
    [
        lambda mark: Calling(os.system, f"touch {mark}"),
        lambda mark: Calling(open, str(mark), "w"),
        lambda mark: Calling(eval, f"open({str(mark)!r}, 'w')"),
        lambda mark: of_torch.Metadata({"x": Calling(os.mkdir, str(mark))}),
        lambda mark: Calling(torch.save, 1, str(mark)),
    ],
)
def test_code_is_refused_by_name_and_not_run(tmp_path, call, protocol):
    """It ran: a file was there, and the error, if any, came afterwards."""
    mark = tmp_path / "mark"
    raw = pickle.dumps(call(mark), protocol)
    (tmp_path / METADATA).write_bytes(raw)
    with pytest.raises(ValueError, match=r"it refers to \S+\.\S+, which is not allowed in a list"):
        read_metadata(tmp_path)
    assert not mark.exists()
    pickle.loads(raw)
    assert mark.exists(), "without our reader it runs"


def test_a_made_up_checkpoint_is_refused_by_load_and_runs_nothing(saved, new_run, tmp_path):
    path = saved()
    mark = tmp_path / "mark"
    with_manifest(listed(path, Calling(os.system, f"touch {mark}")))
    with pytest.raises(CheckpointError, match=r"it refers to \w+\.system, which is not allowed"):
        new_run().pipe.load(path)
    assert not mark.exists()


def test_siblings_are_not_unpickled_for_the_remedy(saved, new_run, tmp_path):
    """It ran what an older folder beside a damaged one held, to find one to name."""
    older, path = saved("step_1", steps=1), saved("step_2")
    mark = tmp_path / "mark"
    with_manifest(listed(older, Calling(os.system, f"touch {mark}")))
    os.truncate(path / "__0_0.distcp", 10)
    with pytest.raises(CheckpointError, match=f"checkpoint.resume={older}"):
        new_run().pipe.load(path)
    assert not mark.exists()


def value_of_any_type(metadata):
    """Torch unpickles such values without restriction."""
    metadata.state_dict_metadata["model.layers.0.weight"] = of_torch.BytesStorageMetadata()


def file_elsewhere(metadata):
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = _StorageInfo("../other", place.offset, place.length)


def piece_alone(metadata):
    entry = metadata.state_dict_metadata["model.layers.0.weight"]
    vars(entry)[list(vars(entry))[2]][0].sizes = torch.Size([1, 2])


def no_pieces(metadata):
    entry = metadata.state_dict_metadata["model.layers.0.weight"]
    vars(entry)[list(vars(entry))[2]].clear()


def nowhere(metadata):
    metadata.storage_data.popitem()


def encoded(metadata):
    for place in metadata.storage_data.values():
        place.transform_descriptors = ["mine"]


def numbers(metadata):
    metadata.state_dict_metadata = 3


@pytest.mark.parametrize(
    "change", [value_of_any_type, file_elsewhere, piece_alone, no_pieces, nowhere, encoded, numbers]
)
def test_what_torch_would_not_write_is_refused(tmp_path, change):
    metadata = FileSystemReader(OLD).read_metadata()
    listed(tmp_path, metadata)
    assert len(read_metadata(tmp_path)) == 15
    change(metadata)
    listed(tmp_path, metadata)
    with pytest.raises(ValueError, match="not a list written by torch"):
        read_metadata(tmp_path)


def test_classes_of_torch_are_not_touched(tmp_path):
    """A pickle may set attributes of what it names: here of a record that is thrown away."""
    raw = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N(S'marked'\nI1\ndtb."
    (tmp_path / METADATA).write_bytes(raw)
    with pytest.raises(ValueError, match=r"."):
        read_metadata(tmp_path)
    assert not hasattr(of_torch.Metadata, "marked")
    pickle.loads(raw)
    assert vars(of_torch.Metadata)["marked"] == 1
    del of_torch.Metadata.marked


def test_our_list_is_torchs(saved, stored_tensors):
    """Torch's own reader reads what we write, and ours reads the same."""
    path = saved()
    stored = read_metadata(path)
    tensors = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in stored.items()}
    fill(path, stored, tensors)
    theirs = stored_tensors(path)
    assert tensors.keys() == theirs.keys() and len(tensors) > 20
    assert all(torch.equal(tensors[name], theirs[name]) for name in theirs)
    metadata = FileSystemReader(path).read_metadata()
    assert metadata.storage_meta.checkpoint_id is None, "where it was written is not told"


def test_members_of_enums_are_read_as_any_python_writes_them(saved, monkeypatch):
    """Python 3.11.2, that of Debian 12 and so of the image for CPUs, could read no checkpoint."""
    kind = of_torch._MEM_FORMAT_ENCODING

    def by_name(self, protocol):
        return getattr, (type(self), self.name)

    expected = read_metadata(saved("as_here"))
    monkeypatch.setattr(kind, "__reduce_ex__", by_name)
    path = saved("as_there")
    assert b"getattr" in (path / METADATA).read_bytes()
    assert read_metadata(path).keys() == expected.keys()


def test_getattr_is_not_called_for_a_list(tmp_path):
    """What it would give, a method of ours that takes any state, is not there afterwards."""
    raw = b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\nMetadata\nS'mro'\ntR)R."
    assert pickle.loads(raw)[0] is of_torch.Metadata
    (tmp_path / METADATA).write_bytes(raw)
    with pytest.raises(ValueError, match=r"."):
        read_metadata(tmp_path)


def test_a_tensor_behind_the_end_of_its_file_is_refused(saved):
    path = saved()
    metadata = FileSystemReader(path).read_metadata()
    next(iter(metadata.storage_data.values())).offset = 10**9
    with_manifest(listed(path, metadata))
    with pytest.raises(CheckpointError, match=r"but tensors extend to 1,000,00"):
        verify(path, SoloGroup(0), 0)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
)
def test_every_dtype_is_known(tmp_path, dtype):
    place = of_torch.MetadataIndex("x", torch.Size([0]), 0)
    piece = of_torch.ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    properties = of_torch.TensorProperties(dtype=dtype)
    entry = of_torch.TensorStorageMetadata(properties, torch.Size([3]), [piece])
    listed(tmp_path, of_torch.Metadata({"x": entry}, storage_data={place: _StorageInfo("f", 0, 9)}))
    assert read_metadata(tmp_path) == {"x": StoredTensor(torch.Size([3]), dtype, "f", 0, 9)}
