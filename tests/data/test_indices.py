"""Tests of indexing large data once: later openings of any rank or run use the stored index."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpipe_hpc.data import jsonl, open_data
from gpipe_hpc.data.images import folder, shards
from gpipe_hpc.data.images.folder import ImageFolderConfig
from gpipe_hpc.data.images.shards import ImageShardsConfig
from gpipe_hpc.data.indexing import index_file
from gpipe_hpc.data.jsonl import JsonLinesConfig
from gpipe_hpc.data.names import Names
from gpipe_hpc.errors import DataError

PIXELS = {"height": 8, "width": 8, "resize": 10, "mean": [0.0] * 3, "std": [1.0] * 3}


def age(root: Path) -> None:
    """Set all modification times to long ago, since recently changed files are not trusted."""
    for path in [root, *root.rglob("*")]:
        os.utime(path, (1e9, 1e9))


def make(files, kind: str, root: Path):
    root.mkdir()
    match kind:
        case "jsonl":
            files.write_jsonl(root / "b.jsonl", [f"text {n}" for n in range(50)])
            files.write_jsonl(root / "a.jsonl", ["ü", "", "more"])
            config = JsonLinesConfig([str(root)], validation_percent=20, seq_len=3)
        case "shards":
            files.write_shards(root, 3, 8)
            config = ImageShardsConfig([str(root)], num_classes=3, validation_percent=20, **PIXELS)
        case _:
            files.write_folder(root)
            config = ImageFolderConfig(str(root), num_classes=3, **PIXELS)
    age(root)
    return config


KINDS = ("jsonl", "shards", "folder")
MAKERS = {"jsonl": (jsonl, "_scan"), "shards": (shards, "_scan"), "folder": (folder, "_list")}


def digests(config, *arguments) -> tuple[str, str, list[int]]:
    source = open_data(config, *arguments)
    return (
        source.train.digest(),
        source.validation.digest(),
        source.train.read_inputs([0, 1]).flatten().tolist(),
    )


@pytest.fixture
def made(monkeypatch):
    """Return a list to which each creation of an index appends the kind of data."""
    calls = []

    def noted(kind, original):
        return lambda *arguments: calls.append(kind) or original(*arguments)

    for kind, (module, name) in MAKERS.items():
        monkeypatch.setattr(module, name, noted(kind, getattr(module, name)))
        monkeypatch.setattr(module, "_WORTH_KEEPING", 0)
    return calls


@pytest.mark.parametrize("kind", KINDS)
def test_second_opening_takes_what_the_first_found(files, tmp_path, made, kind):
    """Regression: the first and last ranks of each replica repeated the indexing of rank 0."""
    config = make(files, kind, tmp_path / "data")
    first = digests(config)
    num_made = len(made)
    assert digests(config) == first and len(made) == num_made
    (where,) = (tmp_path / "data").rglob(index_file.FOLDER)
    assert where.parent in (tmp_path / "data", tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_data_that_changed_are_looked_through_anew(files, tmp_path, made, kind):
    config = make(files, kind, tmp_path / "data")
    before = digests(config)
    match kind:
        case "jsonl":
            files.write_jsonl(tmp_path / "data" / "a.jsonl", ["another", "text"])
        case "shards":
            files.write_shards(tmp_path / "other", 1, 9)
            (tmp_path / "other" / "00.tar").replace(tmp_path / "data" / "00.tar")
        case _:
            (tmp_path / "data/train/n00/new.png").write_bytes(files.coded(9, form="PNG"))
    num_made = len(made)
    assert digests(config) != before and len(made) > num_made


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_index_is_made_anew(files, tmp_path, made, kind, caplog):
    config = make(files, kind, tmp_path / "data")
    before = digests(config)
    for path in tmp_path.rglob("*.index"):
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    num_made = len(made)
    assert digests(config) == before and len(made) > num_made
    assert "is damaged" in caplog.text
    num_made = len(made)
    assert digests(config) == before and len(made) == num_made


def test_image_added_deep_in_a_class_is_found(files, tmp_path, made):
    """A new image in a nested folder leaves the class folder's modification time unchanged."""
    deep = tmp_path / "data" / "train" / "n00" / "deep" / "deeper"
    files.write_folder(tmp_path / "data")
    deep.mkdir(parents=True)
    config = ImageFolderConfig(str(tmp_path / "data"), num_classes=3, **PIXELS)
    age(tmp_path / "data")
    assert open_data(config).train.num_samples == 12
    (deep / "new.png").write_bytes(files.coded(9, form="PNG"))
    assert open_data(config).train.num_samples == 13


@pytest.mark.parametrize("name", ["../../other.png", "/etc/other.png"])
def test_list_that_leads_elsewhere_is_not_followed(files, tmp_path, made, monkeypatch, name):
    """A user who can write the index must not be able to redirect a run to other files."""
    config = make(files, "folder", tmp_path / "data")
    original = folder._list

    def lead_away(root, classes):
        part = original(root, classes)
        names = Names([name, *list(Names.of(part.arrays["text"], part.arrays["ends"]))[1:]])
        return part._replace(arrays={**part.arrays, "text": names.text, "ends": names.ends})

    with monkeypatch.context() as patch:
        patch.setattr(folder, "_list", lead_away)
        assert name in list(open_data(config).train.store.names)
    assert name not in list(open_data(config).train.store.names)


def test_index_has_the_folder_that_is_asked_for(files, tmp_path, made, monkeypatch):
    monkeypatch.setattr(jsonl, "_WORTH_KEEPING", 2**40)
    config = make(files, "jsonl", tmp_path / "data")
    open_data(config)
    assert list(tmp_path.rglob("*.index")) == []
    config.index_dir = str(tmp_path / "indices")
    open_data(config)
    assert [path.parent.name for path in tmp_path.rglob("*.index")] == ["indices"]


@pytest.mark.parametrize("change", ["negative", "beyond", "missing", "shorter", "complaint"])
def test_index_that_says_what_cannot_be_is_made_anew(files, tmp_path, made, monkeypatch, change):
    """An index with impossible values is created again, even if its hash is correct."""
    config = make(files, "jsonl", tmp_path / "data")
    original = jsonl._scan

    def wrong(*arguments):
        part = original(*arguments)
        arrays, facts = dict(part.arrays), dict(part.facts)
        match change:
            case "negative":
                arrays["text_bytes"] = arrays["text_bytes"] - 100
            case "beyond":
                arrays["offset"] = arrays["offset"] + 10**9
            case "missing":
                del arrays["percentile"]
            case "shorter":
                arrays["file"] = arrays["file"][:-1]
            case _:
                facts["wrong"] = [[10**6, 1, "no such file"]]
        return type(part)(arrays, facts)

    before = digests(config)
    for path in tmp_path.rglob("*.index"):
        path.unlink()
    with monkeypatch.context() as patch, contextlib.suppress(Exception):
        patch.setattr(jsonl, "_scan", wrong)
        open_data(config)
    assert list(tmp_path.rglob("*.index"))
    assert digests(config) == before and len(made) == 3


def test_index_that_nobody_can_keep_is_told(files, tmp_path, made, caplog):
    config = make(files, "jsonl", tmp_path / "data")
    (tmp_path / "file").write_text("")
    config.index_dir = str(tmp_path / "file" / "indices")
    assert open_data(config).train.num_samples
    assert "the index cannot be saved" in caplog.text and "data.index_dir" in caplog.text


def test_index_of_read_only_data_is_kept_in_the_run(files, tmp_path, made):
    config = make(files, "jsonl", tmp_path / "data")
    (tmp_path / "data" / index_file.FOLDER).write_text("no folder")
    open_data(config, 0, tmp_path / "run" / "index")
    assert [path.parent.parent.name for path in tmp_path.rglob("*.index")] == ["run"]
    open_data(config, 0, tmp_path / "run" / "index")
    assert made == ["jsonl"]


def test_corrupt_lines_are_told_by_a_kept_index_too(files, tmp_path, made):
    config = make(files, "jsonl", tmp_path / "data")
    with (tmp_path / "data" / "a.jsonl").open("ab") as file:
        file.write(b"bad\n" * 3)
    age(tmp_path / "data")
    config.corrupt = "skip"
    for _ in range(2):
        path = tmp_path / "data" / "a.jsonl"
        assert list(open_data(config).corrupt) == [f"{path}, line {n}" for n in (4, 5, 6)]
    config.max_corrupt = 2
    with pytest.raises(DataError, match=r"data\.max_corrupt=2 allows"):
        open_data(config)
    assert made == ["jsonl"]


def test_several_files_in_small_blocks_are_one_text(files, tmp_path, monkeypatch):
    """Documents and line numbers in messages do not depend on the block size."""
    config = make(files, "jsonl", tmp_path / "data")
    with (tmp_path / "data" / "b.jsonl").open("ab") as file:
        file.write(b'bad\n{"text": "end"}')
    config.corrupt = "skip"
    whole = open_data(config)
    monkeypatch.setattr(jsonl, "_BLOCK", 37)
    blocks = open_data(config)
    assert blocks.train.digest() == whole.train.digest()
    assert list(blocks.corrupt) == [f"{tmp_path}/data/b.jsonl, line 51"] == list(whole.corrupt)


SCRIPT = """
import sys
from pathlib import Path
from gpipe_hpc.data.jsonl import JsonLinesConfig
from gpipe_hpc.data import open_data
config = JsonLinesConfig([sys.argv[1]], seq_len=3, index_dir=sys.argv[2])
for _ in range(5):
    print(open_data(config).train.digest())
    for path in Path(sys.argv[2]).glob("*.index"):
        path.unlink(missing_ok=True)
"""


@pytest.mark.slow
def test_jobs_that_index_at_once_see_the_same(files, tmp_path):
    make(files, "jsonl", tmp_path / "data")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "data"), str(tmp_path / "indices")]
    jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    told = [job.communicate(timeout=60)[0].split() for job in jobs]
    assert [job.returncode for job in jobs] == [0] * 3
    assert len({line for lines in told for line in lines}) == 1


def test_file_is_not_allocated_before_it_is_known_to_be_there(files, tmp_path):
    """A sparse image file of 16 GB is rejected by its size, without being read."""
    config = make(files, "folder", tmp_path / "data")
    with (tmp_path / "data/train/n00/000.JPEG").open("wb") as file:
        file.truncate(2**34)
    with pytest.raises(DataError, match=r"17179869184 bytes, more than"):
        open_data(config).train.read_inputs([0])
