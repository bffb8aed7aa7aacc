from functools import reduce
from pathlib import Path

from gpipe_hpc.comm.world.source import (
    Source,
    merged,
    own_source,
    run_by,
    source_in,
    unequal_sources,
)


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.py").write_text(text)
    return folder


def test_a_digest_is_of_names_and_lines_and_nothing_else(tmp_path: Path):
    one = source_in(write(tmp_path / "one", a="x = 1\n", b="y = 2\n"))
    same = write(tmp_path / "same", b="y = 2\n", a="x = 1\n")
    (same / "__pycache__").mkdir()
    (same / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"anything")
    assert source_in(same).digest == one.digest
    others = [
        write(tmp_path / "line", a="x = 1\n", b="y = 3\n"),
        write(tmp_path / "name", a="x = 1\n", c="y = 2\n"),
        write(tmp_path / "more", a="x = 1\n", b="y = 2\n", c=""),
        write(tmp_path / "moved", a="x = 1\ny = 2\n", b=""),
    ]
    assert len({one.digest, *(source_in(other).digest for other in others)}) == 5


def test_ones_own_source_is_that_of_the_package():
    assert own_source().folder == str(Path(__file__).parents[3] / "gpipe_hpc")
    assert own_source() is own_source(), "read once"


def told(*sources: Source) -> str:
    """Return what ranks that run these, in their order, are told when groups of two merge first."""
    runs = [run_by(rank, source) for rank, source in enumerate(sources)]
    pairs = [reduce(merged, runs[i : i + 2]) for i in range(0, len(runs), 2)]
    assert unequal_sources(reduce(merged, pairs)) == unequal_sources(reduce(merged, runs))
    return unequal_sources(reduce(merged, pairs))


def test_ranks_with_other_lines_are_named():
    ours, theirs = Source("a" * 64, "/here"), Source("b" * 64, "/there")
    assert told(ours, ours._replace(folder="/elsewhere")) == ""
    text = told(ours, theirs, ours, theirs)
    assert "rank 0 /here (aaaaaaaaaaaa), ranks 1, 3 /there (bbbbbbbbbbbb);" in text
    assert "install one version on all machines" in text
    assert "..." in told(ours, *(20 * [theirs]))


def test_what_ranks_tell_of_their_lines_does_not_grow_with_them():
    """A world of a thousand ranks would else bring a thousand numbers to each."""
    ours, theirs = Source("a" * 64, "/here"), Source("b" * 64, "/there")
    runs = [run_by(rank, (ours, theirs)[rank % 2]) for rank in range(1000)]
    assert len(repr(reduce(merged, runs))) < 500
