"""The description of a cluster: what is read, and what is refused by its key."""

import math

import pytest

from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner.cluster_file import read_cluster, write_cluster
from gpipe_hpc.schedule import Cluster, Link

LINK = "{latency_s: 1.0e-6, bandwidth_bytes_per_s: 300e9}"
LINKS = f"links:\n  within: {LINK}\n  between: {{latency_s: 0, bandwidth_bytes_per_s: 4e9}}\n"


def read(tmp_path, text):
    path = tmp_path / "links.yaml"
    path.write_text(text, encoding="utf-8")
    return read_cluster(path)


def test_all_that_a_description_may_hold(tmp_path):
    found = read(
        tmp_path,
        "hosts: [2, 3]\n"
        + LINKS
        + f"  hosts:\n    1: {LINK}\n"
        + "  ranks:\n    - {source: 3, destination: 4, latency_s: 2, bandwidth_bytes_per_s: 5}\n"
        + "slow_ranks: {4: 1.5, 0: 2}\n",
    )
    fast = Link(1e-6, 300e9)
    assert found == Cluster(
        hosts=(2, 3),
        within=fast,
        between=Link(0, 4e9),
        host_links={1: fast},
        rank_links={(3, 4): Link(2, 5)},
        paces={4: 1.5, 0: 2.0},
    )


def test_hosts_that_are_all_alike_are_a_number(tmp_path):
    assert read(tmp_path, "hosts: 3\nranks_per_host: 8\n" + LINKS).hosts == (8, 8, 8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "",
            "top level, expected the keys hosts, links, optionally names, ranks_per_host, slow",
        ),
        ("hosts: 2\n" + LINKS, "ranks_per_host, expected an integer of at least 1, got None"),
        ("hosts: [2]\nranks_per_host: 2\n" + LINKS, "expected no value if hosts is a list, got 2"),
        ("hosts: [2, no]\n" + LINKS, "hosts, expected an integer of at least 1, got False"),
        ("hosts: [2]\n", "top level, expected the keys hosts, links"),
        ("hosts: [2]\nlinks: 4\n", "links, expected a mapping, got 4"),
        ("hosts: [2]\nspeed: 4\n" + LINKS, "got 'hosts, speed, links'"),
        ("hosts: [2]\n" + LINKS.replace("4e9", "fast"), "links.between.bandwidth.*got 'fast'"),
        ("hosts: [2]\n" + LINKS.replace("4e9", "0"), "a link needs a latency of 0 or more"),
        (
            "hosts: [2]\n" + LINKS + "slow_ranks: {2: 2.0}",
            "names rank 2, but there are only 0 to 1",
        ),
        ("hosts: [2]\n" + LINKS + "slow_ranks: {a: 2.0}", "slow_ranks, expected an integer"),
        ("hosts: [2]\n" + LINKS + "  ranks: 4\n", "links.ranks, expected a list, got 4"),
        ("hosts: [2]\n" + LINKS + "  ranks: [{source: 0}]\n", r"links.ranks\[0\], expected the k"),
        ("hosts: [2\n" + LINKS, "cannot parse .* as YAML"),
        ("hosts: [2, 2]\nnames: [a]\n" + LINKS, r"names, expected a list of 2 name\(s\)"),
        (
            "hosts: [2]\nnames: a\n" + LINKS,
            r"names, expected a list of 1 name\(s\), one for each host, got 'a'",
        ),
        ("- 1\n", "top level, expected a mapping"),
    ],
)
def test_what_is_wrong_is_named_by_its_key(tmp_path, text, message):
    remedy = "; correct the path or the file" if "YAML" in message else r"preflight\.out=links"
    with pytest.raises(ConfigError, match=rf"(?s)links\.yaml: .*{message}.*{remedy}"):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot read .* preflight.out=links"):
        read_cluster(tmp_path / "none.yaml")


def test_what_is_written_is_read_again(tmp_path):
    """A latency of a microsecond without a point in it is a text in YAML."""
    cluster = Cluster(
        hosts=(2, 3),
        within=Link(1e-6, 300e9),
        between=Link(0.0, math.inf),
        host_links={1: Link(1e-5, 1e9)},
        rank_links={(3, 4): Link(2.0, 5.0), (4, 3): Link(2e-3, 5.5e6)},
        paces={4: 1.5},
    )
    path = tmp_path / "made" / "links.yaml"
    write_cluster(path, cluster, names=["node1: a", "node2"], about="Measured.\nBy hand.")
    assert read_cluster(path) == cluster
    assert path.read_text("utf-8").startswith("# Measured.\n# By hand.\n")
    assert [each.name for each in path.parent.iterdir()] == ["links.yaml"]


def test_a_file_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the description"):
        write_cluster(tmp_path / "file" / "links.yaml", Cluster((1,), Link(), Link()))
