"""Two hosts on this machine: what is apart, what the link lets pass, and that nothing is left."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.two_hosts import measure, start_ranks
from tests.support import losses, patience

pytestmark = pytest.mark.two_hosts


def says(host, folder, *command, limit_s=20.0):
    """Run a command on a host; return what it said."""
    output = folder / f"{len(list(folder.iterdir()))}.txt"
    job = host.start(command, output=output, folder=folder)
    assert job.wait(limit_s) == 0, job.output
    return job.output


PYTHON = (sys.executable, "-I", "-c")


def test_hosts_are_apart(two_hosts, tmp_path):
    """Name, addresses, processes and shared memory are a host's own; files are shared."""
    pair = two_hosts()
    (tmp_path / "shared").write_text("seen")
    code = """
import json, os, pathlib, socket
shared = pathlib.Path("/dev/shm/mine"); was_there = shared.exists(); shared.write_text("x")
processes = sum(name.isdigit() for name in os.listdir("/proc"))
others = socket.gethostbyname("host1"), socket.gethostbyname("host2")
text = pathlib.Path("shared").read_text()
print(json.dumps([socket.gethostname(), was_there, processes, others, text]))
"""
    found = [json.loads(says(host, tmp_path, *PYTHON, code)) for host in pair.hosts]
    others = ["10.77.0.1", "10.77.0.2"]
    assert found == [[name, False, 2, others, "seen"] for name in ("host1", "host2")]
    assert not Path("/dev/shm/mine").exists()
    assert socket.gethostname() not in ("host1", "host2")


def test_link_is_no_faster_than_asked(two_hosts):
    """Bounds that a busy machine cannot break: it makes a link slower, never faster."""
    pair = two_hosts(rate=20e6, delay_s=0.010)
    began_s = time.monotonic()
    found = measure(pair, seconds=1.0)
    passed, took_s = pair.link.counts(), time.monotonic() - began_s
    assert found.trip_s >= 0.020
    assert all(rate > 0 for rate in (found.there, found.back, *found.both))
    assert all(1e5 < way.passed_bytes <= 20e6 / 8 * took_s for way in passed)
    pair.link.shape(0.0, 0.0)
    assert measure(pair, seconds=0.2).trip_s < 0.020


def test_bytes_are_counted_each_way(two_hosts, tmp_path):
    pair = two_hosts(rate=0.0, delay_s=0.0)
    listen = "import socket; s = socket.create_server(('', 5000)); c = s.accept()[0]\n"
    read = "while c.recv(1 << 20): pass"
    send = """
import socket, time
for _ in range(200):
    try:
        c = socket.create_connection(("host2", 5000)); break
    except ConnectionRefusedError:
        time.sleep(0.02)
c.sendall(bytes(1_000_000))
"""
    sink = pair.hosts[1].start(
        [*PYTHON, listen + read], output=tmp_path / "sink.txt", folder=tmp_path
    )
    says(pair.hosts[0], tmp_path, *PYTHON, send)
    assert sink.wait(20.0) == 0
    counts = pair.link.counts()
    assert 1_000_000 <= counts.there.passed_bytes <= 1_300_000
    assert counts.back.passed_bytes < 50_000  # acknowledgements
    assert counts.since(counts).there.passed_bytes == 0


def test_a_cut_stops_a_stream_and_a_restored_link_ends_it_whole(two_hosts, tmp_path, until):
    pair = two_hosts(rate=8e6, delay_s=0.001)
    sink_code = """
import hashlib, socket
s = socket.create_server(("", 5000)); c = s.accept()[0]; h = hashlib.sha256()
while block := c.recv(1 << 16): h.update(block)
print(h.hexdigest())
"""
    source_code = """
import hashlib, random, socket, time
data = random.Random(0).randbytes(2_000_000)
for _ in range(200):
    try:
        c = socket.create_connection(("host2", 5000)); break
    except ConnectionRefusedError:
        time.sleep(0.02)
c.sendall(data)
print(hashlib.sha256(data).hexdigest())
"""
    ends = [
        host.start([*PYTHON, code], output=tmp_path / f"{host.name}.txt", folder=tmp_path)
        for host, code in zip(pair.hosts, (source_code, sink_code), strict=True)
    ]
    until(lambda: pair.link.counts().there.passed_bytes > 200_000, 20, "some of it passed")
    pair.link.cut()
    before = pair.link.counts()
    until(lambda: pair.link.counts().there.lost_packets > before.there.lost_packets, 20, "a try")
    during = pair.link.counts()
    assert during.there.passed_bytes == before.there.passed_bytes
    assert during.back.passed_bytes == before.back.passed_bytes
    assert [end.code for end in ends] == [None, None]
    pair.link.restore()
    assert [end.wait(40.0) for end in ends] == [0, 0]
    assert ends[0].output == ends[1].output != ""


def test_two_pairs_do_not_meet(two_hosts, tmp_path):
    one, other = two_hosts(), two_hosts()
    say = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    says(one.hosts[0], tmp_path, *PYTHON, say + "s.sendto(bytes(500), ('host2', 5000))")
    time.sleep(0.1)
    assert one.link.counts().there.passed_bytes >= 500
    assert other.link.counts().there.passed_bytes == 0


def test_power_off_ends_all_of_a_host(two_hosts, tmp_path, until):
    """Also what has left its session: no rank of a host without power goes on."""
    pair = two_hosts()
    code = """
import os, time, pathlib
if os.fork() == 0:
    os.setsid()
for _ in range(2000):
    pathlib.Path(f"beat{os.getpid()}").write_text(str(time.monotonic())); time.sleep(0.01)
"""
    pair.hosts[0].start([*PYTHON, code], output=tmp_path / "out.txt", folder=tmp_path)
    until(lambda: len(list(tmp_path.glob("beat*"))) == 2, 20, "both beat")
    pair.hosts[0].power_off()
    beats = [path.read_text() for path in sorted(tmp_path.glob("beat*"))]
    time.sleep(0.2)
    assert beats == [path.read_text() for path in sorted(tmp_path.glob("beat*"))]
    assert says(pair.hosts[1], tmp_path, *PYTHON, "print('on')") == "on\n"


CONTROLLER = """
import signal, sys, time
from pathlib import Path
from experiments.two_hosts import TwoHosts
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
with TwoHosts(1e6, 0.0) as pair:
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    for host in pair.hosts:
        host.start(sleep, output=Path(sys.argv[1]), folder=Path("."))
    print("up", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_killed_controller(two_hosts, tmp_path, until, repository, number):
    """Neither hosts nor what runs on them nor the link; the mark is in each one's environment."""
    two_hosts()  # or skip
    mark = str(tmp_path)
    controller = subprocess.Popen(
        [sys.executable, "-c", CONTROLLER, tmp_path / "out.txt"],
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository), "TEST_MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert controller.stdout.readline() == "up\n"
    ours = descendants(controller.pid)
    assert len(ours) == 7  # of each host the keeper, number 1 and a job; the link
    controller.send_signal(number)
    controller.wait(20 * patience())
    until(lambda: not [pid for pid in ours if start_of(pid) == ours[pid]], 20, "all had ended")


def descendants(pid):
    """Return the process numbers of all descendants, with when they began."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)] = int(fields[1])
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return {each: start_of(each) for each in found}


def start_of(pid):
    """Return when a process began; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


TINY = ("train.steps=4", "pipeline.replicas=2", "comm.silence_s=4")


def test_two_hosts_train_as_one_does(two_hosts, tmp_path, tiny, train):
    """The same losses to the bit, and the gradients of each step over the link, each way."""
    pair = two_hosts(rate=0.0, delay_s=0.001)
    words = ["-m", "gpipe_hpc.train", *tiny, *TINY, f"run.dir={tmp_path}/apart"]
    ranks = start_ranks(pair, [[0], [1]], words, folder=tmp_path, logs=tmp_path / "logs")
    assert ranks.wait(60.0 * patience()) == [0, 0], "\n".join(ranks.outputs)
    passed = pair.link.counts()
    train(2, *tiny, *TINY, f"run.dir={tmp_path}/here")
    assert losses(tmp_path / "apart") == losses(tmp_path / "here") != []
    said = json.loads((tmp_path / "apart" / "summary.json").read_text())
    assert said["outcome"] == "done"
    gradients = 4 * said["ranks"][0]["planned_memory"]["gradient_bytes"]
    assert gradients > 0 and all(way.passed_bytes > gradients for way in passed)


def test_a_hierarchy_sends_each_gradient_over_the_link_once(two_hosts, tmp_path, tiny):
    """A plain ring of two ranks a host crosses the link with one and a half times as much."""
    passed = {}
    for hierarchy in ("none", "host"):
        pair = two_hosts(rate=0.0, delay_s=0.001)
        words = ["-m", "gpipe_hpc.train", *tiny, "model.width=64", "data.vocab_size=1024"]
        words += ["pipeline.replicas=4", "pipeline.microbatches=1", "train.steps=6"]
        words += [f"outer.hierarchy={hierarchy}", f"run.dir={tmp_path}/{hierarchy}"]
        ranks = start_ranks(pair, [[0, 1], [2, 3]], words, folder=tmp_path, logs=tmp_path / "logs")
        assert ranks.wait(90.0 * patience()) == [0] * 4, "\n".join(ranks.outputs)
        passed[hierarchy] = pair.link.counts().there.passed_bytes
    summary = json.loads((tmp_path / "host" / "summary.json").read_text())
    gradients = 6 * summary["ranks"][0]["planned_memory"]["gradient_bytes"]
    assert losses(tmp_path / "host") == pytest.approx(losses(tmp_path / "none"), rel=1e-5)
    assert gradients <= passed["host"] <= passed["none"] - 0.4 * gradients


def test_a_cut_link_stops_all_ranks_with_a_reason(two_hosts, tmp_path, tiny, until):
    """No rank waits for ever for a host that no packet reaches."""
    pair = two_hosts(rate=0.0, delay_s=0.001)
    words = ["-m", "gpipe_hpc.train", *tiny, "train.steps=100000", "pipeline.replicas=2"]
    words += ["comm.silence_s=4", f"run.dir={tmp_path}/run"]
    ranks = start_ranks(pair, [[0], [1]], words, folder=tmp_path, logs=tmp_path / "logs")
    run = tmp_path / "run" / "metrics.jsonl"
    until(lambda: run.exists() and len(run.read_text().splitlines()) > 3, 60, "it trained")
    pair.link.cut()
    codes = ranks.wait(40.0 * patience())
    assert 0 not in codes
    assert "rank 1" in ranks.outputs[0] and "rank 0" in ranks.outputs[1]
