"""Tests of data=jsonl: concatenated documents, random access and corrupt lines."""

import random

import pytest

from gpipe_hpc.data import open_data
from gpipe_hpc.data.jsonl import JsonLinesConfig
from gpipe_hpc.errors import DataError, UnfitDataError, is_users_mistake


def jsonl(*paths, **settings) -> JsonLinesConfig:
    return JsonLinesConfig([str(each) for each in paths], **{"validation_percent": 0} | settings)


def stream(texts, separator: int = 256) -> list[int]:
    return [token for text in texts for token in (*text.encode(), separator)]


def test_samples_are_windows_of_all_documents(files, tmp_path):
    texts = ["hello", "", "wörld \n and\ttabs", "日本", "x" * 50]
    path = files.write_jsonl(tmp_path / "a.jsonl", texts)
    data = open_data(jsonl(path, seq_len=7)).train
    tokens = stream(texts)
    assert data.num_samples == (len(tokens) - 1) // 7
    order = list(range(data.num_samples))
    random.Random(0).shuffle(order)
    inputs, targets = data.read_inputs(order), data.read_targets(order)
    assert inputs.tolist() == [tokens[i * 7 : i * 7 + 7] for i in order]
    assert targets.tolist() == [tokens[i * 7 + 1 : i * 7 + 8] for i in order]


def test_files_key_and_separator_are_as_set(files, tmp_path):
    files.write_jsonl(tmp_path / "b.jsonl", ["b"], key="content")
    files.write_jsonl(tmp_path / "a.jsonl", ["a"], key="content")
    config = jsonl(tmp_path, key="content", separator=0, vocab_size=256, seq_len=1)
    assert open_data(config).train.read_inputs([0, 1, 2]).flatten().tolist() == [97, 0, 98]


def test_empty_lines_and_a_missing_end_do_no_harm(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "a"}\n  \n\r\n{"text": "b"}')
    assert open_data(jsonl(tmp_path, seq_len=3)).train.read_inputs([0]).tolist() == [[97, 256, 98]]


def test_validation_is_told_apart_by_the_text(files, tmp_path):
    texts = [f"document {number}" for number in range(200)]
    path = files.write_jsonl(tmp_path / "a.jsonl", texts + texts[:50])

    def parts():
        source = open_data(jsonl(path, validation_percent=20, seq_len=1))
        return [
            {
                bytes(data.corpus._document(n)[:-1].tolist()).decode()
                for n in range(len(data.corpus.ends))
            }
            for data in (source.train, source.validation)
        ]

    train, held = parts()
    assert not train & held and train | held == set(texts) and 15 < len(held) < 70
    files.write_jsonl(path, [f"new {number}" for number in range(30)] + texts)
    assert {text for text in parts()[1] if text.startswith("doc")} == held


def test_validation_files_of_their_own(files, tmp_path):
    train = files.write_jsonl(tmp_path / "a.jsonl", ["abc"])
    held = files.write_jsonl(tmp_path / "v.jsonl", ["vw"])
    source = open_data(jsonl(train, validation_paths=[str(held)], seq_len=2))
    assert source.validation.read_inputs([0]).tolist() == [list(b"vw")]
    assert source.baseline() > 0


BAD_LINES = [
    (b'{"text": "cut', "Invalid control character"),
    (b"no json", "Expecting value"),
    (b'{"title": "x"}', "no object with key 'text'"),
    (b'["text"]', "no object with key 'text'"),
    (b'{"text": 5}', "'text' of type int"),
    (b'{"text": "\xff"}', "utf-8"),
    (b'{"text": "\\ud800"}', "surrogates not allowed"),
    (b"\x80\x04K\x01.", "utf-8"),
    (b"[" * 100_000, "no object"),
]


@pytest.mark.parametrize(("line", "words"), BAD_LINES, ids=[each[1] for each in BAD_LINES])
def test_corrupt_line_is_named_or_left_out(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
    complaint = rf"{path}, line 2 .*{words}.*data\.corrupt=skip"
    with pytest.raises(DataError, match=complaint) as raised:
        open_data(jsonl(path, seq_len=1))
    assert not is_users_mistake(raised.value)
    source = open_data(jsonl(path, seq_len=1, corrupt="skip"))
    assert source.train.read_inputs([0, 1, 2]).flatten().tolist() == [97, 256, 98]
    assert list(source.corrupt) == [f"{path}, line 2"]


@pytest.mark.parametrize(("line", "words"), BAD_LINES, ids=[each[1] for each in BAD_LINES])
def test_a_file_that_begins_with_no_document_is_a_setting_that_cannot_work(tmp_path, line, words):
    """Regression: a wrong data.key exited with code 1, after which launchers restart the run."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(line + b'\n{"text": "b"}\n')
    with pytest.raises(UnfitDataError, match=rf"line 1 .*{words}.*data\.key"):
        open_data(jsonl(path, seq_len=1))


def test_no_more_than_max_corrupt_lines_are_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "long enough"}\n' + b"bad\n" * 3)
    assert len(open_data(jsonl(path, seq_len=1, corrupt="skip", max_corrupt=3)).corrupt) == 3
    with pytest.raises(DataError, match=r"data\.max_corrupt=2 .*line 4"):
        open_data(jsonl(path, seq_len=1, corrupt="skip", max_corrupt=2))


def test_file_that_changed_is_named(files, tmp_path):
    path = files.write_jsonl(tmp_path / "a.jsonl", ["abcdefgh", "xyz"])
    for change in (b"{" * 100, b'{"text": "longer than it was"}\n' * 2):
        data = open_data(jsonl(path, seq_len=2)).train
        original = path.read_bytes()
        path.write_bytes(change)
        with pytest.raises(DataError, match=f"{path} has changed .* byte 0"):
            data.read_inputs([0])
        path.write_bytes(original)


def test_too_little_text_and_no_file_are_refused(files, tmp_path):
    path = files.write_jsonl(tmp_path / "a.jsonl", ["ab"])
    with pytest.raises(DataError, match=r"data\.seq_len=128 .*got 3"):
        open_data(jsonl(path))
    with pytest.raises(DataError, match=r"no files .*b\.jsonl"):
        open_data(jsonl(tmp_path / "b.jsonl"))


def test_digest_tells_documents_apart(files, tmp_path):
    path = files.write_jsonl(tmp_path / "a.jsonl", ["abcdefgh", "xyz"])
    before = open_data(jsonl(path, seq_len=2)).train.digest()
    assert open_data(jsonl(path, seq_len=2)).train.digest() == before
    files.write_jsonl(path, ["abcdefg", "hxyz"])
    assert open_data(jsonl(path, seq_len=2)).train.digest() != before


def test_documents_kept_in_memory_are_bounded(files, tmp_path, monkeypatch):
    monkeypatch.setattr("gpipe_hpc.data.jsonl._KEPT_BYTES", 1000)
    path = files.write_jsonl(tmp_path / "a.jsonl", ["x" * 99] * 50)
    data = open_data(jsonl(path, seq_len=100)).train
    data.read_inputs(range(data.num_samples))
    kept = data.corpus._kept
    assert sum(tokens.nbytes for tokens in kept.values()) == data.corpus._kept_bytes <= 1000
    assert len(kept) == 2
