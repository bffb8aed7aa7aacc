"""Tests of text data: windows over several files, splits, and errors that name the file."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from gpipe_hpc.data import open_data
from gpipe_hpc.data.corpus import Corpus, Segment, unigram_entropy
from gpipe_hpc.data.text import PythonSourceConfig, TextConfig, TokensConfig
from gpipe_hpc.data.token_files import whole_file
from gpipe_hpc.errors import DataError


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def all_inputs(dataset) -> bytes:
    return bytes(dataset.read_inputs(range(dataset.num_samples)).flatten().tolist())


def test_targets_are_the_inputs_one_token_later(tmp_path):
    text = bytes(range(50))
    write(tmp_path / "a.txt", text)
    source = open_data(TextConfig([f"{tmp_path}/a.txt"], validation_fraction=0.0, seq_len=7))
    inputs = source.train.read_inputs([2, 0])
    assert inputs.dtype == torch.int64
    assert inputs.tolist() == [list(range(14, 21)), list(range(7))]
    assert source.train.read_targets([2, 0]).tolist() == [list(range(15, 22)), list(range(1, 8))]


@pytest.mark.parametrize(("length", "windows"), [(8, 1), (14, 1), (15, 2), (16, 2)])
def test_only_less_than_a_window_stays_unused(tmp_path, length, windows):
    write(tmp_path / "a", bytes(length))
    source = open_data(TextConfig([f"{tmp_path}/a"], validation_fraction=0.0, seq_len=7))
    assert source.train.num_samples == windows
    assert source.train.read_targets([windows - 1]).shape == (1, 7)


def test_windows_span_files_in_order_of_names(tmp_path):
    for name, content in (("b", b"defg"), ("a", b"abc"), ("c", b"hijklmnop")):
        write(tmp_path / name, content)
    config = TextConfig([f"{tmp_path}/*"], validation_fraction=0.0, seq_len=5)
    source = open_data(config)
    assert all_inputs(source.train) == b"abcdefghijklmno"
    assert bytes(source.train.read_targets([2])[0].tolist()) == b"lmnop"


def test_end_of_each_file_is_for_validation(tmp_path):
    write(tmp_path / "a", b"a" * 90 + b"x" * 10)
    write(tmp_path / "b", b"b" * 180 + b"y" * 20)
    config = TextConfig([f"{tmp_path}/*"], validation_fraction=0.1, seq_len=1)
    source = open_data(config)
    assert set(all_inputs(source.train)) == set(b"ab")
    assert set(all_inputs(source.validation)) == set(b"xy")


def test_validation_comes_from_all_over_a_long_file(tmp_path):
    """Regression: only the end of a file was used for validation, which may be a single source."""
    text = np.repeat(np.arange(200, dtype=np.uint8), 100)
    write(tmp_path / "a", text.tobytes())
    source = open_data(TextConfig([f"{tmp_path}/a"], validation_fraction=0.05, seq_len=5))
    held, kept = set(all_inputs(source.validation)), set(all_inputs(source.train))
    sizes = [part.corpus.num_tokens for part in (source.train, source.validation)]
    assert sum(sizes) == 20_000 and abs(sizes[1] - 1_000) <= 12  # rounded in each part
    assert len(held) >= 10 and max(held) - min(held) > 150
    assert len(kept) == 200
    # Each token is in exactly one part, as windows are cut after the split.
    segments = [*source.train.corpus.segments, *source.validation.corpus.segments]
    places = sorted((each.start, each.stop) for each in segments)
    assert [start for start, _ in places] == [0, *(stop for _, stop in places[:-1])]
    assert places[-1][1] == 20_000


def test_validation_files_of_their_own(tmp_path):
    train, held = write(tmp_path / "a", b"a" * 100), write(tmp_path / "v", b"v" * 30)
    source = open_data(TextConfig([str(train)], [str(held)], seq_len=9))
    assert (source.train.num_samples, source.validation.num_samples) == (11, 3)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_files_of_token_numbers(tmp_path, dtype):
    tokens = np.arange(1000, 1033, dtype=np.dtype(dtype).newbyteorder("<"))
    write(tmp_path / "a.bin", tokens.tobytes())
    config = TextConfig(
        [f"{tmp_path}/a.bin"], validation_fraction=0.0, dtype=dtype, seq_len=16, vocab_size=1033
    )
    source = open_data(config)
    assert source.train.read_targets([1]).tolist() == [list(range(1017, 1033))]
    config.vocab_size = 1020
    with pytest.raises(DataError, match=r"data\.vocab_size=1020, got 1020"):
        open_data(config).train.read_inputs([1])


def test_missing_file_is_named():
    with pytest.raises(DataError, match=r"no files match.*'/no/such/\*\.txt'"):
        open_data(TextConfig(["/no/such/*.txt"]))


def test_empty_file_is_named(tmp_path):
    write(tmp_path / "empty.txt", b"")
    with pytest.raises(DataError, match=r"empty\.txt is empty"):
        open_data(TextConfig([f"{tmp_path}/empty.txt"]))


def test_file_that_ends_inside_a_token_is_named(tmp_path):
    write(tmp_path / "odd.bin", b"abc")
    with pytest.raises(DataError, match=r"odd\.bin .*multiple of 2"):
        open_data(TextConfig([f"{tmp_path}/odd.bin"], dtype="uint16"))


def test_too_little_text_is_refused(tmp_path):
    write(tmp_path / "short", b"abc")
    with pytest.raises(DataError, match=r"too little text.*data.seq_len=128"):
        open_data(TextConfig([f"{tmp_path}/short"]))


def test_nothing_is_opened_before_the_first_read(tmp_path):
    """Ranks that need no samples may run where the files cannot be read."""
    path = write(tmp_path / "a", bytes(100))
    source = open_data(TextConfig([str(path)], seq_len=10))
    assert source.train.num_samples == 9
    path.unlink()
    with pytest.raises(DataError, match=f"{path} cannot be read"):
        source.train.read_inputs([0])


def test_file_that_shrank_is_named(tmp_path):
    path = write(tmp_path / "a", bytes(100))
    source = open_data(TextConfig([str(path)], seq_len=10))
    path.write_bytes(bytes(20))
    with pytest.raises(DataError, match=f"{path} has changed: .*100"):
        source.train.read_inputs([0])


def test_digest_tells_different_files_apart(tmp_path):
    write(tmp_path / "a", bytes(100))
    config = TextConfig([f"{tmp_path}/*"], seq_len=10)
    before = open_data(config).train.digest()
    assert open_data(config).train.digest() == before
    write(tmp_path / "b", bytes(1))
    assert open_data(config).train.digest() != before


@pytest.fixture
def library(tmp_path) -> Path:
    for number in range(60):
        write(tmp_path / f"package/module{number:02}.py", f"number = {number}\n".encode() * 20)
    for left_out in ("test/test_a.py", "package/tests/test_b.py", "site-packages/c.py"):
        write(tmp_path / left_out, b"\0" * 500)
    write(tmp_path / "data.bin", b"\1" * 500)
    write(tmp_path / "package/__init__.py", b"")
    return tmp_path


def test_python_source_is_split_by_file(library):
    source = open_data(PythonSourceConfig(str(library), seq_len=8, validation_percent=30))
    names = [
        {segment.name for segment in part.corpus.segments}
        for part in (source.train, source.validation)
    ]
    assert not names[0] & names[1]
    assert len(names[0] | names[1]) == 60
    assert 5 <= len(names[1]) <= 35
    assert all(
        part.corpus.read(0, part.corpus.num_tokens).min() > 1
        for part in (source.train, source.validation)
    )


def test_adding_a_file_moves_no_other(library):
    config = PythonSourceConfig(str(library), seq_len=8, validation_percent=30)
    before = {each.name for each in open_data(config).validation.corpus.segments}
    write(library / "package/added.py", b"added = 1\n")
    after = {each.name for each in open_data(config).validation.corpus.segments}
    assert after - {"package/added.py"} == before


def test_standard_library_of_this_machine_is_there():
    source = open_data(PythonSourceConfig())
    assert source.train.num_samples * 128 > 5_000_000
    assert source.validation.num_samples > 0
    # Bytes of text have much less than ln 256 = 5.55, but more than a trained model.
    assert 2.5 < source.baseline() < 4.0


def test_folder_without_python_is_named(tmp_path):
    with pytest.raises(DataError, match=f"too little text in {tmp_path}"):
        open_data(PythonSourceConfig(str(tmp_path)))


def test_unigram_entropy_of_known_frequencies(tmp_path):
    train = write(tmp_path / "t", b"\0" * 97 + b"\1" * 1)  # smoothed counts: 98 and 2
    held = write(tmp_path / "v", b"\0\0\0\1")
    corpora = [
        Corpus([Segment(whole_file(each, ""), 0, each.stat().st_size)]) for each in (train, held)
    ]
    expected = -(3 * math.log(0.98) + math.log(0.02)) / 4
    assert unigram_entropy(*corpora, vocab_size=2) == pytest.approx(expected, rel=1e-12)
    # With the limit, one token 0 is counted in each text: smoothed counts are 2 and 1.
    assert unigram_entropy(*corpora, vocab_size=2, limit=1) == pytest.approx(-math.log(2 / 3))


def test_baseline_without_validation_is_none(tmp_path):
    write(tmp_path / "a", bytes(100))
    config = TextConfig([f"{tmp_path}/a"], validation_fraction=0.0, seq_len=10)
    assert open_data(config).baseline() is None


def test_folders_of_token_files(tmp_path):
    tokens = np.arange(2000, 2040, dtype="<u2")
    write(tmp_path / "tokens" / "b.bin", tokens[20:].tobytes())
    write(tmp_path / "tokens" / "a.bin", tokens[:20].tobytes())
    write(tmp_path / "tokens" / "notes.txt", b"odd")
    config = TokensConfig([f"{tmp_path}/tokens"], validation_fraction=0.0, seq_len=13)
    data = open_data(config).train
    assert data.num_samples == 3
    assert data.read_inputs([0, 2]).tolist() == [[*range(2000, 2013)], [*range(2026, 2039)]]
    with pytest.raises(DataError, match=r"\.bin or \.npy files"):
        open_data(TokensConfig([f"{tmp_path}"]))
    with pytest.raises(DataError, match="no files match"):
        open_data(TextConfig([f"{tmp_path}"]))


@pytest.mark.parametrize("name", ["a.npy", "a.npz"])
def test_arrays_are_no_text(tmp_path, name):
    """Regression: a model trained on the bytes of a NumPy file, header included."""
    save = np.save if name.endswith("y") else np.savez
    save(tmp_path / name, np.arange(1000, dtype=np.uint16))
    with pytest.raises(DataError, match=r"data=tokens.*data=arrays"):
        open_data(TextConfig([str(tmp_path / name)]))
