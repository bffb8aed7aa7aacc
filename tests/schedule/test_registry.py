"""What is known of a schedule by its name and options alone."""

from importlib import import_module

import pytest

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule import build, num_stages, schedule_names, to_text

OPTIONS = {
    "looped_bfs": [{}, {"stages_per_rank": 3}],
    "interleaved": [{}, {"stages_per_rank": 4}],
    "hanayo": [{}, {"waves": 3}],
    "chimera": [{}, {"pipelines": 4}],
    "auto": [
        {"trials": 0, "placement": placement, "stages_per_rank": each}
        for placement, each in (("one_each", 2), ("looped", 3), ("wave", 2), ("mirrored", 2))
    ],
}
CASES = [
    (name, options)
    for name in schedule_names()
    if name != "file"
    for options in OPTIONS.get(name, [{}])
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_number_of_stages_is_that_of_the_table(name, options):
    size = {"ranks": 4, "microbatches": 8}
    assert num_stages(name, **size, **options) == build(name, **size, **options).num_stages


def test_auto_searches_no_order_to_count_its_stages(monkeypatch):
    """A whole search was made and thrown away, on every rank, for the number of stages."""
    monkeypatch.setattr(import_module("gpipe_hpc.schedule.search.auto"), "search", None)
    assert num_stages("auto", ranks=64, microbatches=512, placement="wave") == 128


def test_a_file_is_read(tmp_path):
    path = tmp_path / "table.txt"
    path.write_text(to_text(build("zb_v", ranks=2, microbatches=4)))
    assert num_stages("file", ranks=2, microbatches=4, path=str(path)) == 4


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("1f1c", {}, "unknown name"),
        ("gpipe", {"waves": 2}, "unknown option.*waves is an option of hanayo"),
        ("auto", {"placment": "best"}, "unknown option.*did you mean placement"),
        ("interleaved", {"stages_per_rank": 0}, "stages_per_rank must be a whole number"),
        ("auto", {"placement": "best"}, "placement must be one_each"),
    ],
)
def test_what_is_unknown_is_refused(name, options, said):
    with pytest.raises(ScheduleError, match=said):
        num_stages(name, ranks=2, microbatches=4, **options)
