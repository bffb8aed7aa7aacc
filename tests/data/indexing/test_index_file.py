"""Tests of stored indices: an index is used again only if files and settings are unchanged."""

import hashlib
import os
import threading
import time

import numpy as np
import pytest

from gpipe_hpc.data.indexing import index_file
from gpipe_hpc.data.indexing.index_file import load, place_of, save
from gpipe_hpc.data.indexing.parts import IndexPart

PART = IndexPart(
    {"a": np.arange(7), "b": np.arange(3, dtype=np.uint8), "c": np.empty(0, np.int32)},
    {"wrong": [[1, "name \udcff", "what"]]},
)


@pytest.fixture
def data(tmp_path):
    """Return a folder with two files that were last modified long ago."""
    folder = tmp_path / "data"
    folder.mkdir()
    for name in ("x", "y"):
        (folder / name).write_text(name)
        os.utime(folder / name, (1e9, 1e9))
    return folder


def place(data, **settings):
    return place_of("kind", [data / "x", data / "y"], settings, [data / index_file.FOLDER])


def same(part: IndexPart | None) -> bool:
    assert part is not None
    assert {n: (a.dtype, a.tolist()) for n, a in part.arrays.items()} == {
        n: (a.dtype, a.tolist()) for n, a in PART.arrays.items()
    }
    return part.facts == PART.facts


def test_what_is_kept_comes_back_mapped(data):
    assert load(place(data)) is None
    path = save(place(data), PART)
    assert same(load(place(data)))
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert not load(place(data)).arrays["a"].flags.writeable


def test_other_settings_have_an_index_of_their_own(data):
    save(place(data, key="text"), PART)
    assert load(place(data, key="title")) is None and same(load(place(data, key="text")))


@pytest.mark.parametrize("change", ["time", "size"])
def test_index_of_data_that_changed_is_not_taken(data, change):
    save(place(data), PART)
    if change == "time":
        os.utime(data / "y", (1e9, 1e9 + 1))
    else:
        (data / "y").write_text("longer")
        os.utime(data / "y", (1e9, 1e9))
    assert load(place(data)) is None


def test_data_moved_as_a_whole_keep_their_index(data, tmp_path):
    save(place(data), PART)
    assert same(load(place(data.rename(tmp_path / "elsewhere"))))


def test_index_that_does_not_fit_the_files_is_not_taken(data):
    save(place(data), PART)
    assert load(place(data), lambda part: part.arrays["a"].max() < 6) is None


@pytest.mark.parametrize("number", range(12))
def test_damaged_index_is_not_taken(data, number, caplog):
    path = save(place(data), PART)
    content = bytearray(path.read_bytes())
    spot = len(content) * number // 12
    content[spot] ^= 1
    path.write_bytes(content)
    assert load(place(data)) is None
    path.write_bytes(path.read_bytes()[:spot])
    assert load(place(data)) is None
    assert "is damaged" in caplog.text


def signed(content: bytes) -> bytes:
    """Return the content of an index with a correct hash, as an attacker would write it."""
    return content[:24] + hashlib.blake2b(content[88:]).digest() + content[88:]


@pytest.mark.parametrize("lie", [b"[7], 0]", b"[-7], 0", b"[7], 9]", b"[70],0]", b"[7],-9]"])
def test_header_that_lies_is_not_followed(data, lie):
    """Sizes and dtypes in a header are checked before an array is mapped."""
    path = save(place(data), PART)
    content = path.read_bytes()
    assert content.count(b"[7], 0]") == 1 and signed(content) == content
    path.write_bytes(signed(content.replace(b"[7], 0]", lie)))
    found = load(place(data))
    assert same(found) if lie == b"[7], 0]" else found is None or len(found.arrays["a"]) == 7
    path.write_bytes(signed(content.replace(b'"<i8"', b'"|O8"')))
    assert load(place(data)) is None
    path.write_bytes(content[:16] + b"\xff" * 8 + content[24:])
    assert load(place(data)) is None


def test_file_that_was_written_just_now_is_not_trusted(data):
    """A second change within the clock's resolution would leave the modification time unchanged."""
    os.utime(data / "x", (time.time(), time.time()))
    assert save(place(data), PART) is None


def test_next_folder_is_taken_where_the_first_is_read_only(data, tmp_path):
    (tmp_path / "file").write_text("")
    first, second = tmp_path / "file" / "no", tmp_path / "run" / "index"
    there = place_of("kind", [data / "x"], {}, [first, second])
    assert save(there, PART).parent == second
    assert same(load(there))
    assert save(there._replace(folders=(first,)), PART) is None


def test_jobs_that_write_at_once_leave_a_whole_one(data, monkeypatch):
    """Each job writes to a temporary file with its own name."""
    pids = iter(range(10**6))
    monkeypatch.setattr(os, "getpid", lambda: next(pids))
    found = []

    def job():
        for _ in range(20):
            save(place(data), PART)
            found.append(same(load(place(data))))

    jobs = [threading.Thread(target=job) for _ in range(4)]
    for each in jobs:
        each.start()
    for each in jobs:
        each.join()
    assert found == [True] * 80
    assert len(list((data / index_file.FOLDER).iterdir())) == 1
