"""Tests of token files: formats, files that contain no tokens, and the limit of open files."""

import errno
import io
import os
import resource
import struct
import tracemalloc
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from gpipe_hpc.data import open_data
from gpipe_hpc.data.mapped import MappedFiles
from gpipe_hpc.data.text import TextConfig, TokensConfig
from gpipe_hpc.data.token_files import open_token_file, whole_file
from gpipe_hpc.errors import DataError


def tokens_of(*paths: Path | str, **settings) -> list[int]:
    """Return all training tokens of the files."""
    config = TokensConfig(
        [str(path) for path in paths],
        **{"validation_fraction": 0.0, "seq_len": 1, "vocab_size": 2**20} | settings,
    )
    data = open_data(config).train
    inputs = data.read_inputs(range(data.num_samples)).flatten().tolist()
    return [*inputs, int(data.read_targets([data.num_samples - 1]))]


def bare(path: Path, tokens, kind: str = "uint16") -> Path:
    path.write_bytes(np.asarray(tokens).astype(np.dtype(kind).newbyteorder("<")).tobytes())
    return path


def megatron(path: Path, sequences, code: int = 8, kind: str = "<u2", modes: bool = False) -> Path:
    """Write path.bin and path.idx as megatron/core/datasets/indexed_dataset.py does."""
    lengths = [len(each) for each in sequences]
    size = np.dtype(kind).itemsize
    pointers = size * (np.cumsum([0, *lengths])[:-1])
    documents = range(len(sequences) + 1)
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    index += np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    index += np.array(documents, "<i8").tobytes()
    index += bytes(len(lengths)) if modes else b""
    path.with_suffix(".idx").write_bytes(index)
    data = path.with_suffix(".bin")
    data.write_bytes(b"".join(np.array(each, kind).tobytes() for each in sequences))
    return data


LONG = np.random.default_rng(0).integers(0, 50_000, 4000)


@pytest.mark.parametrize("kind", ["uint8", "uint16", "int16", "uint32", "int32", "int64"])
def test_npy_is_read_behind_its_header(tmp_path, kind):
    """Regression: a .npy file was read as raw numbers, so the run trained on its header."""
    tokens = LONG % 100
    np.save(tmp_path / "a.npy", tokens.astype(kind))
    assert tokens_of(tmp_path / "a.npy") == tokens.tolist()
    assert tokens_of(tmp_path) == tokens.tolist()


def test_npy_of_rows_is_one_text(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(12, dtype=np.uint16).reshape(3, 4))
    assert tokens_of(tmp_path / "a.npy") == list(range(12))


def saved(array, **options) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (saved(np.zeros(9, np.float32)), "does not contain tokens.*got <f4"),
        (saved(np.asfortranarray(np.zeros((3, 4), np.int32))), "in Fortran order"),
        (saved(np.zeros(9, ">i4")), "does not contain tokens.*got >i4"),
        (saved(np.array([{}, None]), allow_pickle=True), r"does not contain tokens.*got \|O"),
        (
            saved(np.zeros(9, np.int32))[:-4],
            "is damaged: expected 164 bytes",
        ),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", "is damaged: expected a NumPy header"),
        (b"\x93NUMPY\x09\x00", "is damaged: expected a NumPy header"),
        (b"PK\x03\x04" + bytes(100), "is a zip archive"),
        (b"\x1f\x8b\x08\x00" + bytes(100), "is gzip-compressed"),
        (b"PAR1" + bytes(100), "is a Parquet file"),
    ],
    ids=[
        "float",
        "columns",
        "big-endian",
        "objects",
        "short",
        "lies",
        "version",
        "zip",
        "gz",
        "pq",
    ],
)
def test_what_holds_no_tokens_is_refused(tmp_path, content, message):
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        tokens_of(path)


def test_header_that_lies_about_its_size_allocates_nothing(tmp_path):
    path = tmp_path / "a.npy"
    path.write_bytes(saved(np.zeros(9, np.int32)).replace(b"(9,), ", b"(9e9,)"))
    path.write_bytes(b"\x93NUMPY\x02\x00\xff\xff\xff\x7f{" + bytes(4000))
    tracemalloc.start()
    with pytest.raises(DataError, match="is damaged"):
        tokens_of(path)
    assert tracemalloc.get_traced_memory()[1] < 2**22
    tracemalloc.stop()


@pytest.mark.parametrize(("code", "kind"), [(8, "<u2"), (4, "<i4"), (5, "<i8"), (1, "u1")])
def test_pair_of_megatron_is_read_by_its_index(tmp_path, code, kind):
    """Regression: 32-bit tokens were read as 16 bits, so every second token was 0."""
    sequences = [LONG[:7] % 200, LONG[7:8] % 200, LONG[8:3000] % 200]
    data = megatron(tmp_path / "corpus_text_document", sequences, code, kind)
    expected = (LONG[:3000] % 200).tolist()
    # The pair may be named by .bin, by .idx, without suffix, by its folder or by a pattern.
    for path in (data, data.with_suffix(".idx"), data.with_suffix(""), tmp_path, f"{tmp_path}/*"):
        assert tokens_of(path) == expected


def test_pair_with_modes_is_read(tmp_path):
    assert tokens_of(megatron(tmp_path / "a", [[1, 2], [3]], modes=True)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index: index[:20], "a header of 34 bytes, got 20"),
        (
            lambda index: index[:17] + b"\x07" + index[18:],
            "integer dtype, got version 1, dtype code 7",
        ),
        (lambda index: index[:18] + b"\xff" * 7 + index[25:], r"bytes for \d+ sequences"),
        (lambda index: index + b"123", "got 85 bytes"),
        (lambda index: index[:34] + b"\x03" + index[35:], "gaps or overlaps"),
    ],
    ids=["cut", "float", "count", "longer", "gap"],
)
def test_damaged_index_of_megatron_is_refused(tmp_path, damage, message):
    data = megatron(tmp_path / "a", [[1, 2], [3]])
    index = data.with_suffix(".idx")
    index.write_bytes(damage(index.read_bytes()))
    with pytest.raises(DataError, match=rf"a\.idx is damaged.*{message}"):
        tokens_of(data)


def test_pair_of_unlike_lengths_is_refused(tmp_path):
    data = megatron(tmp_path / "a", [[1, 2], [3]])
    data.write_bytes(data.read_bytes() + b"\0\0")
    with pytest.raises(DataError, match=r"a\.bin is damaged: expected 6 bytes"):
        tokens_of(data)


def test_other_files_named_idx_are_no_business_of_ours(tmp_path):
    bare(tmp_path / "a.bin", [4, 5, 6])
    (tmp_path / "a.idx").write_text("notes")
    assert tokens_of(tmp_path / "a.bin") == [4, 5, 6]


@pytest.mark.parametrize(("magic", "version", "kind"), [(20240520, 1, "<u2"), (20240801, 7, "<u4")])
def test_header_of_llmc_is_no_text(tmp_path, magic, version, kind):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(LONG)
    (tmp_path / "a.bin").write_bytes(header.tobytes() + LONG.astype(kind).tobytes())
    assert tokens_of(tmp_path / "a.bin") == LONG.tolist()
    (tmp_path / "a.bin").write_bytes(header.tobytes())
    with pytest.raises(DataError, match=r"is damaged: expected \d{4,5} bytes"):
        tokens_of(tmp_path / "a.bin")


SMALL = LONG % 200  # like a vocabulary of characters
LARGE = np.random.default_rng(1).integers(0, 128_000, 4000)


@pytest.mark.parametrize("tokens", [LONG, SMALL, LARGE], ids=["gpt2", "characters", "llama3"])
@pytest.mark.parametrize(
    ("kind", "read"), [("uint32", "uint16"), ("int64", "uint16"), ("int64", "uint32")]
)
def test_wider_tokens_than_said_are_refused(tmp_path, tokens, kind, read):
    """Regression: 32-bit tokens were read as 16 bits, so every second token was 0."""
    path = bare(tmp_path / "a.bin", tokens, kind)
    with pytest.raises(DataError, match=f"a.bin .*data.dtype={read}"):
        tokens_of(path, dtype=read)
    assert tokens_of(path, dtype=kind) == tokens.tolist()


def test_text_is_not_taken_for_tokens(tmp_path):
    """Pairs of letters are valid 16-bit tokens below 50,257, but all bytes are printable."""
    path = tmp_path / "a.txt"
    path.write_text("It was a bright cold day in April.\n" * 40)
    with pytest.raises(DataError, match="printable characters"):
        tokens_of(path)
    assert open_data(TextConfig([str(path)])).train.num_samples > 0


def test_bytes_of_any_file_are_text(tmp_path):
    """A model of bytes may train on any file, such as archives and programs."""
    path = tmp_path / "a.zip"
    path.write_bytes(b"PK\x03\x04" + bytes(range(60)))
    config = TextConfig([str(path)], validation_fraction=0.0, seq_len=4)
    assert open_data(config).train.read_inputs([0]).tolist() == [[80, 75, 3, 4]]


def test_numbers_that_only_look_odd_are_read(tmp_path):
    """Padding, repetition and small vocabularies are not mistaken for another dtype."""
    padded = np.concatenate([LONG[:50], np.zeros(3000, int)])
    for tokens in (padded, np.zeros(500, int), np.arange(900) % 97, [7, 0] * 20, LONG % 2):
        assert tokens_of(bare(tmp_path / "a.bin", tokens)) == list(map(int, tokens))


def test_token_beyond_the_vocabulary_is_named(tmp_path):
    """Regression: such a token gave a NumPy traceback or an error that named no file."""
    tokens = np.arange(1000) % 90
    tokens[777] = 97
    bare(tmp_path / "a.bin", np.arange(50))
    path = bare(tmp_path / "b.bin", tokens)
    config = TokensConfig([str(tmp_path)], seq_len=4, vocab_size=97)
    source = open_data(config)
    message = rf"{path} .*position 777: .*data\.vocab_size=97, got 97 \(uint16\)"
    with pytest.raises(DataError, match=message):
        source.train.read_inputs(range(source.train.num_samples))
    with pytest.raises(DataError, match=message):
        source.baseline()


def test_negative_token_is_named(tmp_path):
    path = bare(tmp_path / "a.bin", [*range(300), -1, 5], "int32")
    with pytest.raises(DataError, match=r"position 300: .*got -1 \(int32\)"):
        tokens_of(path, dtype="int32")


@pytest.fixture
def few_files():
    """Lower the limit of open files to 40 more than are open now."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    numbers = {int(number) for number in os.listdir("/proc/self/fd")}
    free = (number for number in range(before[0]) if number not in numbers)
    (limit,) = islice(free, 40, 41)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_more_shards_than_files_may_be_open(tmp_path, few_files):
    """Regression: 300 shards failed under a limit of 256 open files, with a wrong remedy."""
    for number in range(150):
        bare(tmp_path / f"{number:03}.bin", np.full(20, number))
    assert tokens_of(tmp_path) == [number for number in range(150) for _ in range(20)]


def test_maps_give_way_where_descriptors_are_scarce(tmp_path, few_files):
    """The cache shrinks if other code of the process uses the file descriptors."""
    files = [whole_file(bare(tmp_path / str(n), [n, n]), str(n)) for n in range(90)]
    maps = MappedFiles(most=80)
    kept = [maps.tokens(file)[0] for file in files]
    assert kept == list(range(90)) and len(maps) <= maps.most < 80


def test_map_unused_for_longest_goes_first(tmp_path):
    files = [whole_file(bare(tmp_path / str(n), [n]), str(n)) for n in range(3)]
    maps = MappedFiles(most=2)
    first = maps.tokens(files[0])
    maps.tokens(files[1])
    assert maps.tokens(files[0]) is first
    maps.tokens(files[2])
    assert maps.tokens(files[0]) is first and len(maps) == 2


@pytest.mark.parametrize(
    ("number", "remedy"),
    [(errno.EMFILE, "ulimit -n"), (errno.EACCES, "permissions"), (errno.EIO, "disk")],
)
def test_remedy_fits_the_error(tmp_path, monkeypatch, number, remedy):
    """Regression: the remedy for every error of the system was to correct the permissions."""
    path = bare(tmp_path / "a.bin", [1, 2])

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=f"{path} cannot be read.*{remedy}"):
        open_token_file(path, "a.bin", "uint16")
