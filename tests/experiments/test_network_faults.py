"""What goes wrong between hosts: each rank ends soon, with one message, or the run goes on."""

import os
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from experiments.two_hosts import start_ranks
from tests.support import losses, patience

pytestmark = [pytest.mark.two_hosts, pytest.mark.timeout(600)]

LAYOUT = ("pipeline.stages=2", "pipeline.replicas=2", "comm.silence_s=5")
LIMIT_S = 30.0  # in which each rank ends, from the fault on, or from its start


@pytest.fixture
def begin(two_hosts, tiny, tmp_path):
    """Return a function that starts two ranks on each of two hosts; gives the pair and the ranks.

    What is left is ended with the hosts.
    """

    def start(*words, places=((0, 1), (2, 3)), before=None, environ=None, folder="run", **hosts):
        pair = two_hosts(rate=0.0, delay_s=0.001, **hosts)
        if before is not None:
            before(pair)
        command = ["-m", "gpipe_hpc.train", *tiny, *LAYOUT, *words, f"run.dir={tmp_path}/{folder}"]
        logs = tmp_path / f"logs of {folder}"
        return pair, start_ranks(pair, places, command, folder=tmp_path, logs=logs, environ=environ)

    return start


def steps(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.fixture
def trains(tmp_path, until):
    """Return a function that waits until a run has done some steps."""
    return partial(until, lambda: steps(tmp_path) > 3, 90, "it trains")


def own_words(text):
    """Return the lines that tell why a rank ends."""
    return [line for line in text.splitlines() if line.startswith("gpipe_hpc: ")]


def ended(ranks, limit_s, *, code=1):
    """Wait for the end of all; return the one message of each."""
    codes = ranks.wait(limit_s * patience())
    outputs = ranks.outputs
    assert codes == [code] * len(codes), outputs
    assert not any("Traceback" in output for output in outputs), outputs
    words = [own_words(output) for output in outputs]
    assert [len(each) for each in words] == [1] * len(words), outputs
    return [each[0] for each in words]


ENDLESS = "train.steps=1000000"


def test_a_host_name_that_is_loopback_at_home_is_mended(begin, tmp_path):
    """Debian's installer writes it: each host told the others to call 127.0.1.1."""
    environ = {"MASTER_ADDR": "host1"}
    _, ranks = begin("train.steps=4", own_address="127.0.1.1", environ=environ)
    assert ranks.wait(90.0 * patience()) == [0] * 4, ranks.outputs
    assert len(losses(tmp_path / "run")) == 4


def test_closed_ports_of_gloo_are_named(begin):
    """connectFullMesh showed a traceback after two minutes, and no rank."""
    closed = partial(_block, 32768, 60999)
    _, ranks = begin(ENDLESS, before=closed)
    for words in ended(ranks, LIMIT_S):
        assert re.search(r"rank [23] on host2 \(10.77.0.2\) cannot reach rank [01] on host1", words)
        assert "10.77.0.1:" in words and "ip_local_port_range" in words
        assert "comm.interface" in words


def _block(first, last, pair):
    pair.link.block(first, last)


def test_all_listen_within_the_kernels_ports_and_on_the_interface_that_is_given(
    begin, tmp_path, trains
):
    """Every other port is closed, and the run trains; nothing listens elsewhere."""
    own = [int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()]
    ports = range(own[0], own[1] + 1)

    def close_others(pair):
        pair.link.block(1, 65535, open_first=ports[0], open_last=ports[-1])

    environ = {"MASTER_PORT": str(ports[1])}
    word = "comm.interface=10.77.0.0/16"
    pair, ranks = begin(ENDLESS, word, before=close_others, environ=environ)
    trains()
    code = """
for name in ("tcp", "tcp6"):
    for line in list(open(f"/proc/net/{name}"))[1:]:
        _, local, _, state = line.split()[:4]
        if state == "0A":
            print(local)
"""
    for host in pair.hosts:
        output = tmp_path / f"ports of {host.name}.txt"
        job = host.start([sys.executable, "-I", "-c", code], output=output, folder=tmp_path)
        assert job.wait(30.0) == 0
        found = [line.split(":") for line in job.output.split()]
        assert len(found) >= 6 and all(int(port, 16) in ports for _, port in found)
        # Loopback, where ranks of one host watch each other, and the interface: no other.
        assert {address for address, _ in found} == {"0100007F", _kernel(host.address)}
    ranks.signal(signal.SIGTERM)
    assert ranks.wait(60.0 * patience()) == [75] * 4, ranks.outputs


def _kernel(address):
    return "".join(f"{int(byte):02X}" for byte in reversed(address.split(".")))


def test_a_cut_link_ends_all_ranks_and_each_names_the_other_host(begin, trains):
    """They were silent for ten minutes, and then one side blamed the store."""
    pair, ranks = begin(ENDLESS)
    trains()
    pair.link.cut()
    codes = ranks.wait(LIMIT_S * patience())
    assert codes == [1] * 4, ranks.outputs
    for rank, output in enumerate(ranks.outputs):
        (words,) = own_words(output)
        others, host, address = ((2, 3), "host2", "10.77.0.2")
        if rank > 1:
            others, host, address = ((0, 1), "host1", "10.77.0.1")
        for other in others:
            assert f"rank {other} on {host} ({address}) gave no sign of life" in words, words
        assert "its link is cut" in words


def test_a_link_that_comes_back_in_time_is_waited_for(begin, tmp_path, trains, until, tiny, train):
    """The losses of all steps, before and after, are those of a run that nothing disturbed."""
    pair, ranks = begin(ENDLESS, "comm.silence_s=20")
    trains()
    pair.link.cut()
    time.sleep(10.0)
    done = steps(tmp_path)
    pair.link.restore()
    until(lambda: steps(tmp_path) > done + 3, 60, "it goes on")
    found = (r"rank \d on host\d \(10.77.0.\d\) gives " + words for words in ("no sign", "signs"))
    silent, again = map(re.compile, found)
    assert all(silent.search(output) for output in ranks.outputs), ranks.outputs
    until(lambda: all(again.search(output) for output in ranks.outputs), 30, "all say so")
    assert ranks.codes == [None] * 4, ranks.outputs
    ranks.signal(signal.SIGTERM)
    assert ranks.wait(60.0 * patience()) == [75] * 4, ranks.outputs
    found = losses(tmp_path / "run")
    assert len(found) > done + 3
    train(4, *tiny, *LAYOUT, ENDLESS, f"train.stop_at={len(found)}", f"run.dir={tmp_path}/whole")
    assert losses(tmp_path / "whole") == found


def test_a_stopped_rank_is_named_on_both_hosts(begin, trains):
    _, ranks = begin(ENDLESS)
    trains()
    ranks.jobs[3].signal(signal.SIGSTOP)
    codes = ranks.wait(LIMIT_S * patience())
    assert codes[:3] == [1, 1, 1], ranks.outputs
    for output in ranks.outputs[:3]:
        assert "rank 3 on host2" in own_words(output)[0] and "SIGSTOP" in own_words(output)[0]


@pytest.mark.parametrize(
    ("addr", "reason"),
    [("10.77.0.9", "the host does not answer"), ("no.such.invalid", "name or address of a host")],
)
def test_a_master_that_is_not_there_is_named(begin, addr, reason):
    _, ranks = begin(ENDLESS, environ={"MASTER_ADDR": addr})
    zero, *others = ended(ranks, LIMIT_S)
    assert "rank 0 on host1" in zero and f"MASTER_ADDR={addr}" in zero
    for rank, words in enumerate(others, 1):
        assert f"rank {rank} of 4 on host{1 + rank // 2} tried for 20 s" in words
        assert reason in words and f"{addr}:29500" in words


def test_a_closed_port_of_the_master_is_named_by_those_who_call_it(begin):
    """Rank 0 cannot tell them from ranks that are late; it says for whom it waits."""
    _, ranks = begin(ENDLESS, "comm.timeout_s=25", before=partial(_block, 29500, 29500))
    words = ended(ranks, LIMIT_S)
    assert "still waits at 10.77.0.1:29500 for ranks 2-3 of 4" in ranks.outputs[0]
    assert all("missing ranks 2-3" in each for each in words[:2])
    for rank in (2, 3):
        assert f"rank {rank} of 4 on host2 tried for" in words[rank]
        assert "10.77.0.1:29500" in words[rank] and "firewall" in words[rank]


MUTE = "import socket, time; s = socket.create_server(('', 29500)); time.sleep(600)"
STORE = (
    "import time, torch.distributed as d; "
    "s = d.TCPStore('127.0.0.1', 29500, is_master=True, wait_for_workers=False); time.sleep(600)"
)


@pytest.mark.parametrize("what", [MUTE, STORE], ids=["mute", "store"])
def test_a_taken_port_of_the_master_ends_all(begin, tmp_path, until, what):
    def take(pair):
        output = tmp_path / "taken.txt"
        pair.hosts[0].start([sys.executable, "-c", what], output=output, folder=tmp_path)
        code = "import socket; socket.create_connection(('10.77.0.1', 29500), 1)"

        def answers():
            asked = [sys.executable, "-I", "-c", code]
            return pair.hosts[0].start(asked, output=output, folder=tmp_path).wait(20.0) == 0

        until(answers, 60, "the port is taken")

    _, ranks = begin(ENDLESS, before=take)
    zero, *others = ended(ranks, LIMIT_S)
    assert "rank 0 on host1 cannot listen" in zero and "29500" in zero and "MASTER_PORT" in zero
    assert all("29500" in words and "MASTER_PORT" in words for words in others)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_wait_to_meet_end_when_they_are_told_to(begin, until, number):
    """They took note of it, and waited on for a rank that never came."""
    _, ranks = begin(ENDLESS, places=((0,), (2, 3)), environ={"WORLD_SIZE": "4"})
    until(lambda: "still waits at" in ranks.outputs[0], 90, "it waits for rank 1")
    ranks.signal(number)
    began_s = time.monotonic()
    codes = ranks.wait(60.0)
    assert time.monotonic() - began_s < 10.0 * patience()
    assert codes == [128 + number] * 3, ranks.outputs
    if number == signal.SIGTERM:
        for place, (rank, host) in enumerate(((0, "host1"), (2, "host2"), (3, "host2"))):
            said = f"rank {rank} on {host}: stopped by SIGTERM before the first step"
            assert said in ranks.outputs[place]


def test_ranks_that_wait_for_a_host_that_is_gone_end_before_they_are_killed(begin, trains):
    """SIGTERM was noted for an edge that never came; the scheduler killed them in silence."""
    pair, ranks = begin(ENDLESS, "comm.silence_s=100", "train.stop_grace_s=5")
    trains()
    pair.link.cut()
    time.sleep(2.0)
    for job in ranks.jobs[:2]:
        job.signal(signal.SIGTERM)
    assert [job.wait(25.0 * patience()) for job in ranks.jobs[:2]] == [75, 75]
    for output in ranks.outputs[:2]:
        words = own_words(output)[0]  # its own, or of the one that was sooner
        assert "within 5 s after SIGTERM" in words and "on host1" in words


def test_gloo_on_an_interface_that_is_not_there_is_refused(begin):
    _, ranks = begin(ENDLESS, "comm.interface=eth7")
    codes = ranks.wait(LIMIT_S * patience())
    assert codes == [2] * 4, ranks.outputs
    for output in ranks.outputs:
        assert "expected the name of an interface" in output and "link (10.77.0." in output
    assert os.environ.get("GLOO_SOCKET_IFNAME") is None
