"""What a preflight finds, tells and writes, on ranks that are threads."""

import time
from dataclasses import replace

import pytest

from gpipe_hpc.comm.world.threads import run_on_threads
from gpipe_hpc.config import compose_config
from gpipe_hpc.errors import ConfigError, DeviceError
from gpipe_hpc.planner.cluster_file import read_cluster
from gpipe_hpc.planner.costs.prices import read_prices
from gpipe_hpc.planner.links import TimedLinks
from gpipe_hpc.preflight import measuring
from gpipe_hpc.preflight import run as running
from gpipe_hpc.preflight.clocks import ClockReading
from gpipe_hpc.preflight.facts import Facts
from gpipe_hpc.preflight.memory_needs import MemoryNeed
from gpipe_hpc.preflight.rank_checks import OpenFiles
from gpipe_hpc.preflight.report import PreflightReport, hosts_text, slow_texts, time_text
from gpipe_hpc.preflight.run import preflight
from gpipe_hpc.preflight.timing import CHANNELS, SUMS, TimedLink

TINY = ("model.num_layers=4", "model.width=16", "model.num_heads=2", "data=synthetic")


@pytest.fixture(autouse=True)
def short_messages(monkeypatch):
    monkeypatch.setattr(running, "MESSAGE_BYTES", 64_000)


def looked_at(tmp_path, ranks, *words):
    out = f"preflight.out={tmp_path}/links.yaml"
    own = [*TINY, f"run.dir={tmp_path}/run", out, *words]
    config = compose_config(own)
    reports = run_on_threads(ranks, lambda world: preflight(config, world))
    assert reports[1:] == [None] * (ranks - 1)
    return reports[0]


def ends(report, carries):
    ways = [way for way in report.links.ways if way.carries == carries]
    return sorted((way.source, way.destination) for way in ways)


def test_neighbours_and_groups_of_the_layout_are_timed_and_written(tmp_path):
    report = looked_at(tmp_path, 4, "pipeline.stages=2", "pipeline.replicas=2")
    assert report.is_fit
    assert ends(report, CHANNELS) == [(0, 1), (1, 0), (2, 3), (3, 2)]
    assert ends(report, SUMS) == [(0, 2), (1, 3), (2, 0), (3, 1)]
    assert [each.ranks for each in report.sums] == [(0, 2), (1, 3)]
    cluster = read_cluster(tmp_path / "links.yaml")
    assert cluster.hosts == (4,)
    kinds = report.links.kinds()
    within = next(iter(kinds.values()))
    assert cluster.within.latency == pytest.approx(within.latency_s, rel=1e-3)
    assert cluster.within.bandwidth == pytest.approx(within.bytes_per_s, rel=1e-3)
    text = str(report)
    assert text.startswith("preflight of 4 ranks on 1 host: 2 x 2 ranks, 2 stages, schedule gpipe")
    assert "boundaries within a host" in text and "ranks 0, 2 all-reduce 64.0 kB" in text
    assert not (tmp_path / "run").exists()


def test_what_a_step_takes_beside_its_layers_is_measured_and_written(tmp_path):
    report = looked_at(tmp_path, 2, "pipeline.stages=2", "preflight.steps=true")
    prices = read_prices(tmp_path / "prices.yaml")
    assert prices == report.prices
    assert prices.measured.device == "cpu" and prices.measured.optimizer == "adamw"
    assert prices.send.latency > 0 and prices.summing.latency > 0
    assert "each step" in str(report)
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_is_there_stays_as_it_is(tmp_path):
    (tmp_path / "run").mkdir()
    looked_at(tmp_path, 1, "preflight.steps=true")
    assert list((tmp_path / "run").iterdir()) == []


def test_mirrored_stages_and_chains_are_timed(tmp_path):
    report = looked_at(tmp_path, 2, "pipeline.schedule=chimera")
    assert ends(report, CHANNELS) == ends(report, SUMS) == [(0, 1), (1, 0)]


def test_one_rank_has_no_links_and_writes_none(tmp_path):
    report = looked_at(tmp_path, 1)
    assert report.is_fit
    assert report.links.ways == []
    assert "was not written" in report.written
    assert not (tmp_path / "links.yaml").exists()


def test_no_file_is_written_unasked(tmp_path):
    report = looked_at(tmp_path, 2, "preflight.out=null")
    assert report.written == ""
    assert not (tmp_path / "links.yaml").exists()


def test_memory_that_lacks_makes_ranks_unfit(tmp_path):
    report = looked_at(tmp_path, 2, "model.width=400000")
    (lacking,) = report.lacking
    assert "ranks 0-1 will need" in lacking
    assert not report.is_fit
    assert f"not fit: {lacking}" in str(report)
    assert "not fit for this run: 1 problem(s)" in str(report)


def test_a_layout_that_is_searched_later_is_no_layout_to_look_at(tmp_path):
    """The links of the settings below it were timed, as if the run had these."""
    report = looked_at(tmp_path, 2, "pipeline.layout=auto")
    assert report.is_fit
    (doubt,) = [each for each in report.doubts if each.startswith("pipeline.layout=auto: ")]
    assert "1 x 2 ranks" in doubt and f"plan.links={tmp_path}/links.yaml" in doubt


def test_unequal_settings_are_named():
    """Each host may compose its own settings, of its own files."""

    configs = [compose_config([*TINY, f"pipeline.microbatches={n}"]) for n in (4, 5)]
    with pytest.raises(ConfigError, match=r"the same pipeline.microbatches on every rank, got 4"):
        run_on_threads(2, lambda world: preflight(configs[world.rank], world))


def test_a_sum_that_comes_out_wrong_is_told(tmp_path, monkeypatch):
    """What carries a sum may change it: bad memory, a bad cable of a device."""
    full = measuring.torch.full

    def changed(size, value):
        made = full(size, value)
        made[7:] += 1e-3 if value == 2 else 0
        return made

    monkeypatch.setattr(measuring.torch, "full", changed)
    with pytest.raises(DeviceError, match=r"summing over ranks 0, 1: rank \d expected 3 .* got 3"):
        looked_at(tmp_path, 2, "pipeline.replicas=2")


def test_a_slow_line_is_found_and_named(tmp_path, monkeypatch):
    """One pair of four waits for each of its messages."""
    send = measuring.ChannelConnection.send

    def late(self, message):
        if {self._out.source_rank, self._out.destination_rank} == {2, 3}:
            time.sleep(0.05)
        send(self, message)

    monkeypatch.setattr(measuring.ChannelConnection, "send", late)
    report = looked_at(tmp_path, 4)
    slow = {(way.source, way.destination) for way in report.links.slow()}
    assert {(2, 3), (3, 2)} <= slow
    told = [doubt for doubt in report.doubts if doubt.startswith("slow link: rank 2 on")]
    assert any("to rank 3 on" in doubt and " has 5" in doubt for doubt in told)
    assert (2, 3) in read_cluster(tmp_path / "links.yaml").rank_links


def facts(rank, host="a", machine="k1", entry=0.0, **changed):
    found = Facts(
        rank=rank,
        host=host,
        kernel=machine,
        network="net",
        python="3.11.7",
        device="cpu",
        device_free_bytes=None,
        host_free_bytes=8 * 10**9,
        shm_free_bytes=10**9,
        planned_bytes=10**6 * (1 + rank),
        files=OpenFiles(-100, rank, host, 300, 1024),
        needs=(),
        entry=ClockReading(entry, rank, host),
        exit=ClockReading(entry + 0.002, rank, host),
    )
    return found._replace(**changed)


def test_hosts_are_told_with_the_least_that_is_free():
    text = hosts_text(
        [facts(0), facts(1, host_free_bytes=2 * 10**9), facts(2, "b", "k2", entry=30.0)]
    )
    lines = text.splitlines()
    heads = [*("host", "ranks", "device", "planned", "free", "memory"), "/dev/shm"]
    assert lines[0].split() == [*heads, "files", "clock"]
    assert "0-1" in lines[1] and "2.00 MB" in lines[1] and "2.00 GB" in lines[1]
    assert lines[2].endswith("+30.000 s ±0.002")


def test_ranks_that_are_dealt_in_turn_share_their_hosts_memory():
    """Rank by rank there is room; the quick look in a run sees rows of ranks alone."""
    room = MemoryNeed("place", "memory", "a", (0, 0), 6, 10)
    each = [facts(0, needs=(room,)), facts(1, "b"), facts(2, needs=(room._replace(ranks=(2, 2)),))]
    (told,) = running._lacking(each)
    assert "memory of a" in told and "12 B" in told


class NotPlanned:
    ranks = None
    why_not = "the data are not there"


def test_what_a_run_may_go_on_with_is_a_warning():
    each = [
        facts(0),
        facts(1, "a", "k2", entry=60.0, python="3.12.1", device="H100"),
    ]
    doubts = "\n".join(running._doubts(NotPlanned(), each))
    assert "memory could not be planned" in doubts and "the data are not there" in doubts
    assert "clocks: " in doubts and "60.0 s ahead" in doubts
    assert "Python: rank 0 has 3.11.7, but ranks 1 (a) have 3.12.1" in doubts
    assert "device: rank 0 has cpu, but" in doubts
    assert "host name: 2 hosts are called a" in doubts


def test_many_slow_links_are_told_in_few_lines():
    hosts = [f"h{k}" for k in range(101)]
    ways = [TimedLink(k, k + 1, 1.0 if k < 30 else 1e-3, 1e9) for k in range(100)]
    texts = slow_texts(TimedLinks(hosts, ways), [facts(k, hosts[k], hosts[k]) for k in range(101)])
    assert len(texts) == 17
    assert texts[0].startswith("slow link: rank 0 on h0 to rank 1 on h1 has 1.00 s")
    assert "do not use the host" in texts[0]
    assert texts[-1] == "slow link: 14 more links"


def test_times_are_told_in_a_unit_that_fits():
    assert [time_text(t) for t in (2.5, 0.0205, 46e-6)] == ["2.50 s", "20.5 ms", "46 us"]


def test_slow_ranks_are_named_and_written():
    assert running._paces([1.0, 1.02, 2.0]) == {2: 2.0}
    assert running._paces([1.0]) == {}


def test_a_report_says_what_it_found():
    report = PreflightReport("head", [facts(0)], TimedLinks(["a"], []), [], "/run")
    assert str(report).endswith("all fine; checked in 0.0 s")
    doubted = replace(report, doubts=["x"])
    assert "warning: x\nfit, with 1 warning(s)" in str(doubted)
