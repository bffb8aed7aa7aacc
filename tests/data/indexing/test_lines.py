"""Tests of indexing JSON lines in blocks: the documents do not depend on the block size."""

import json
import tracemalloc

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_hpc.data.indexing import lines
from gpipe_hpc.data.indexing.lines import scan_lines
from gpipe_hpc.data.indexing.parts import percentile


def expected(content: bytes) -> list[tuple[int, int, int, int]]:
    found, offset = [], 0
    for line in content.splitlines(keepends=True) if content.isascii() else content.split(b"\n"):
        try:
            text = json.loads(line)["text"].encode()
            found.append((offset, len(line), len(text), percentile(text)))
        except (ValueError, TypeError, KeyError):
            pass
        offset += len(line)
    return found


def in_blocks(path, size: int, block: int) -> tuple[list[tuple[int, ...]], list[int], int]:
    rows, wrong, num_lines = [], [], 0
    for start in range(0, size, block):
        part = scan_lines(str(path), start, min(size, start + block), "text")
        columns = [part.arrays[n] for n in ("offset", "num_bytes", "text_bytes", "percentile")]
        rows += list(zip(*(column.tolist() for column in columns), strict=True))
        wrong += [num_lines + number for number, _ in part.facts["wrong"]]
        num_lines += part.facts["lines"]
    return rows, wrong, num_lines


LINES = st.sampled_from(
    [
        '{"text": "a"}\n',
        '{"text": "longer, with \\n and \\u00e9"}\n',
        "\n",
        "  \n",
        "no json\n",
        '{"title": 1}\n',
        '{"text": ""}\n',
    ]
)


@settings(deadline=None, max_examples=60)
@given(st.lists(LINES, max_size=12), st.integers(1, 60), st.booleans())
def test_blocks_of_any_size_find_the_same(tmp_path_factory, given_lines, block, is_ended):
    content = "".join(given_lines).encode()
    content = content if is_ended else content.removesuffix(b"\n")
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(content)
    rows, wrong, num_lines = in_blocks(path, len(content), block)
    assert rows == expected(content)
    whole = content.decode().splitlines()
    assert num_lines == len(whole)
    assert wrong == [
        number
        for number, line in enumerate(whole)
        if line.strip() and not line.startswith('{"text')
    ]


def test_line_without_an_end_is_corrupt_and_not_read_whole(tmp_path, monkeypatch):
    """A sparse file of zeros needs no disk space, but reading its line would exhaust the memory."""
    monkeypatch.setattr(lines, "MOST_LINE_BYTES", 2**22)
    path = tmp_path / "a.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "a"}\n')
        file.truncate(2**33)
        file.seek(2**33)
        file.write(b'\n{"text": "b"}\n')
    tracemalloc.start()
    first = scan_lines(str(path), 0, 2**22, "text")
    middle = scan_lines(str(path), 2**30, 2**30 + 2**22, "text")
    last = scan_lines(str(path), 2**33 - 100, 2**33 + 15, "text")
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()
    assert first.arrays["offset"].tolist() == [0] and first.facts["lines"] == 2
    assert "more than 4194304 bytes without a newline" in first.facts["wrong"][0][1]
    assert (middle.facts["lines"], middle.facts["wrong"]) == (0, [])
    assert last.arrays["offset"].tolist() == [2**33 + 1]


def test_percentile_is_pinned():
    """The split into training and validation must not change between versions."""
    assert [percentile(name) for name in (b"a", b"document", b"")] == [50, 96, 52]


def test_numbers_are_of_the_kinds_that_are_kept(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    part = scan_lines(str(tmp_path / "a"), 0, 10, "text")
    kinds = {name: array.dtype for name, array in part.arrays.items()}
    assert kinds.pop("percentile") == np.uint8 and set(kinds.values()) == {np.dtype(np.int64)}
