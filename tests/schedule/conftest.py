"""Fixtures for tests of schedules: every schedule by name, with some options."""

import pytest

VARIANTS = [
    ("gpipe", {}),
    ("one_f_one_b", {}),
    ("looped_bfs", {}),
    ("looped_bfs", {"stages_per_rank": 3}),
    ("interleaved", {}),
    ("interleaved", {"stages_per_rank": 3}),
    ("zb_h1", {}),
    ("zb_h2", {}),
    ("zb_v", {}),
    ("v_half", {}),
    ("gems", {}),
    ("gems", {"replications": 1}),
    ("chimera", {}),
    ("chimera", {"pipelines": 4}),
    ("chimera", {"scaling": "forward_doubling"}),
    ("dualpipe", {}),
    ("dualpipe_v", {}),
    ("hanayo", {}),
    ("hanayo", {"waves": 1}),
    ("rerouted", {}),
    ("rerouted", {"stages": 3}),
    ("rerouted", {"stages": 3, "order": "one_f_one_b"}),
    ("rerouted", {"stages": 3, "order": "gpipe"}),
]


def label(variant):
    name, options = variant
    return "-".join([name, *map(str, options.values())])


@pytest.fixture(params=VARIANTS, ids=label)
def variant(request):
    """Return a schedule as (name, options); tests with this fixture run for all schedules."""
    return request.param


@pytest.fixture
def variants():
    """Return all schedules as a list of (name, options)."""
    return list(VARIANTS)
