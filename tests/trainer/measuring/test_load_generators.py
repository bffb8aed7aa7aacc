"""Processes that compute while layers are timed: there meanwhile, and gone whatever happens."""

import io
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpipe_hpc.config import compose_config
from gpipe_hpc.device.cores.planned_ranks import CpuShare
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.plan import make_plan
from gpipe_hpc.planner.costs.rates import Rates
from gpipe_hpc.trainer.measuring import load_generator, rank_emulation
from gpipe_hpc.trainer.measuring.load_generators import load_generators
from gpipe_hpc.trainer.measuring.rank_emulation import on_threads, share_of_rank
from gpipe_hpc.trainer.search.from_settings import LayoutSearch, cost_model_of_layers


def children() -> set[int]:
    """Return the processes that this one has started and that are there."""
    path = Path(f"/proc/self/task/{os.getpid()}/children")
    return {int(each) for each in path.read_text().split()}


def state(process: int) -> str:
    """Return in what state a process is, as Linux names it; empty where it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def computed_s(process: int) -> float:
    """Return the seconds that a process has had a core."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def await_that(holds, limit_s=30.0):
    until_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < until_s, "it never came true"
        time.sleep(0.02)


@pytest.mark.slow
def test_they_compute_within_the_block_and_are_gone_behind_it(tiny, caplog):
    before = children()
    with load_generators(compose_config(tiny), 2, CpuShare(1, 2), 0):
        others = children() - before
        assert len(others) == 2
        for each in others:
            begun_s = computed_s(each)
            await_that(lambda each=each, begun_s=begun_s: computed_s(each) > begun_s + 0.1)
    assert children() == before
    assert not caplog.records


@pytest.mark.slow
def test_one_that_cannot_begin_is_told_of_and_layers_are_timed_all_the_same(tiny, caplog):
    config = compose_config(tiny)
    config.model["_target_"] = "no_such_package.layers"
    before = children()
    with load_generators(config, 2, CpuShare(1, 1), 0):
        begun = True
    assert begun and children() == before
    (told,) = caplog.messages
    assert "with fewer than 1 load-generating processes" in told and "no_such_package" in told


@pytest.mark.slow
def test_one_that_dies_meanwhile_is_told_of(tiny, caplog):
    before = children()
    with load_generators(compose_config(tiny), 2, CpuShare(1, 1), 0):
        (other,) = children() - before
        os.kill(other, signal.SIGKILL)
        await_that(lambda: os.waitid(os.P_PID, other, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    (told,) = caplog.messages
    assert "one ended with exit code -9" in told


LOUD = """
from dataclasses import dataclass
from torch import nn
from gpipe_hpc.models import LayerSpec
from gpipe_hpc.data.synthetic import SyntheticVectorsConfig

print("hello", flush=True)


@dataclass
class Vectors(SyntheticVectorsConfig):
    more: int = 0


class Bare(SyntheticVectorsConfig):
    pass


class Loud(nn.Linear):
    def forward(self, value):
        print("x" * 5000, flush=True)
        return super().forward(value)


def layers():
    print("a model", flush=True)
    return [LayerSpec(Loud, 8, 8)]
"""


@pytest.fixture
def loud_layers(tmp_path, monkeypatch):
    """Return a user's module with layers that print, and with data."""
    (tmp_path / "loud_layers.py").write_text(LOUD)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield import_module("loud_layers")
    del sys.modules["loud_layers"]


def test_settings_that_cannot_be_handed_over_are_told_of(tiny, loud_layers, caplog):
    config = replace(compose_config(tiny), data=loud_layers.Bare())
    with load_generators(config, 2, CpuShare(1, 1), 0):
        begun = True
    assert begun and "loud_layers.Bare" in caplog.text


@pytest.mark.slow
def test_what_layers_print_disturbs_nobody(loud_layers, caplog, capfd):
    """A first line that was another one was waited for without end; a full pipe stopped it."""
    words = ["data=synthetic_vectors", "data.width=8", "data.num_classes=8", "model=mlp"]
    config = compose_config([*words, "train.batch_size=8"])
    data = loud_layers.Vectors(width=8, num_classes=8)  # of the user, too
    config = replace(config, model={"_target_": "loud_layers.layers"}, data=data)
    capfd.readouterr()
    before = children()
    with load_generators(config, 2, CpuShare(1, 1), 0):
        (other,) = children() - before
        begun_s = computed_s(other)
        await_that(lambda: computed_s(other) > begun_s + 0.3)
    assert not caplog.records and "xxx" not in capfd.readouterr().out


def test_a_companion_is_no_rank_and_has_the_threads_of_one(tiny, monkeypatch):
    started = []

    class Process:
        returncode = 0

        def __init__(self, command, *, env, **_):
            started.append(env)
            self.stdin, out = io.BytesIO(), os.pipe()
            os.write(out[1], b"ready\n")
            os.close(out[1])
            self.stdout = os.fdopen(out[0], "rb")

        def poll(self):
            return None

        kill = wait = poll

    for name in ("RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MKL_NUM_THREADS", "8")
    monkeypatch.setenv("SOME_TOKEN", "kept")
    monkeypatch.setattr("gpipe_hpc.trainer.measuring.load_generators.subprocess.Popen", Process)
    with load_generators(compose_config(tiny), 2, CpuShare(3, 1), 0):
        (env,) = started
    assert env["OMP_NUM_THREADS"] == env["MKL_NUM_THREADS"] == "3"
    assert env["SOME_TOKEN"] == "kept"
    assert not [name for name in env if name.startswith(("RANK", "WORLD_", "OMPI_", "SLURM_"))]


@pytest.mark.parametrize(
    ("given", "own", "moved"),
    [({0, 1, 2, 3}, {0}, [{1, 2, 3}]), ({0, 1}, {0, 1}, []), (None, {0}, []), ({0, 1}, None, [])],
)
def test_a_companion_leaves_the_cores_of_a_rank_that_has_bound_itself(
    monkeypatch, given, own, moved
):
    found = []
    monkeypatch.setattr(load_generator, "inherited_cpus", lambda: given and frozenset(given))
    monkeypatch.setattr(load_generator, "allowed_cpus", lambda: own and frozenset(own))
    monkeypatch.setattr(load_generator.os, "sched_setaffinity", lambda _, cpus: found.append(cpus))
    load_generator._leave_cores()
    assert found == moved


def test_a_process_that_the_system_refuses_is_told_of(tiny, monkeypatch, caplog):
    def refusing(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("gpipe_hpc.trainer.measuring.load_generators.subprocess.Popen", refusing)
    with load_generators(compose_config(tiny), 2, CpuShare(1, 3), 0):
        begun = True
    assert begun and "Resource temporarily unavailable" in caplog.text


@pytest.mark.parametrize(
    ("free", "others", "started"),
    [(None, 40, 15), (10**12, 3, 3), (4 * 10**9, 8, 1), (10**6, 8, 0)],
)
def test_as_many_are_started_as_memory_holds(tiny, monkeypatch, caplog, free, others, started):
    found = []

    @contextmanager
    def counted(config, num_samples, num_threads):
        found.append(num_threads)
        yield SimpleNamespace(why_not_ready=lambda until_s: "", why_ended=lambda: "")

    place = "gpipe_hpc.trainer.measuring.load_generators"
    monkeypatch.setattr(f"{place}._load_generator", counted)
    monkeypatch.setattr(f"{place}.HostDevice", lambda: SimpleNamespace(memory_free=lambda: free))
    with load_generators(compose_config(tiny), 2, CpuShare(2, others), 1.2e9):
        assert found == [2] * started
    assert ("(memory for" in caplog.text) == (started < min(15, others))


@pytest.mark.slow
def test_they_end_where_their_starter_is_killed(tiny):
    code = f"""
import os, time
from gpipe_hpc.device.cores.planned_ranks import CpuShare
from gpipe_hpc.config import compose_config
from gpipe_hpc.trainer.measuring.load_generators import load_generators
with load_generators(compose_config({list(tiny)!r}), 2, CpuShare(1, 1), 0):
    print(open(f"/proc/self/task/{{os.getpid()}}/children").read(), flush=True)
    time.sleep(600)
"""
    starter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    other = int(starter.stdout.readline())
    assert state(other) not in ("Z", "")
    starter.send_signal(signal.SIGKILL)
    starter.wait()
    starter.stdout.close()
    await_that(lambda: state(other) in ("Z", ""))


@pytest.fixture
def beside(monkeypatch):
    """Return what companions are asked for, and let there be none."""
    asked = []

    class Companions:
        def __init__(self, config, num_samples, share, layer_bytes):
            assert layer_bytes > 0
            asked.append((num_samples, share))

        def __enter__(self):
            asked.append(torch.get_num_threads())

        def __exit__(self, *_):
            asked.append("over")

    monkeypatch.setattr(rank_emulation, "load_generators", Companions)
    return asked


def test_a_plan_of_two_ranks_runs_layers_as_one_of_them(tiny, beside, monkeypatch):
    share = CpuShare(1, 1)
    monkeypatch.setattr(rank_emulation, "planned_share", lambda ranks, threads, binds: share)
    words = [*tiny, "pipeline.stages=2", "plan.costs=measured"]
    before = torch.get_num_threads()
    plan = make_plan(compose_config(words))
    assert beside[0] == (4, share) and beside[2] == "over"
    assert torch.get_num_threads() == before
    assert "layers measured here, on 1 thread while another process computes" in plan.text


def test_layers_that_each_rank_runs_itself_leave_threads_and_company_as_they_are(tiny, beside):
    cost_model = cost_model_of_layers(compose_config(tiny), HostDevice(), 2)
    assert cost_model.times and cost_model.how == "layers measured here"
    assert not beside


def test_the_rate_of_a_cpu_is_that_of_a_ranks_threads(tiny, monkeypatch):
    """A host of two cores was measured with both, of which each of two ranks has one."""
    found, before = [], torch.get_num_threads()
    monkeypatch.setattr(rank_emulation, "planned_share", lambda *_, **__: CpuShare(before + 1, 0))

    def rate(config, device):
        found.append(torch.get_num_threads())
        return Rates.alike(1e9)

    for place in ("gpipe_hpc.plan", "gpipe_hpc.trainer.search.from_settings"):
        monkeypatch.setattr(f"{place}.rates_of", rate)
    make_plan(compose_config([*tiny, "pipeline.stages=2", "plan.costs=counted"]))
    words = ["plan.search=true", "plan.ranks=2"]
    LayoutSearch.of(compose_config([*tiny, *words]), words)
    assert found == [before + 1] * 2 and torch.get_num_threads() == before


def test_threads_come_back_also_where_it_fails():
    before = torch.get_num_threads()
    with pytest.raises(RuntimeError), on_threads(CpuShare(before + 1, 0)):
        assert torch.get_num_threads() == before + 1
        raise RuntimeError
    assert torch.get_num_threads() == before


def test_an_accelerator_is_shared_with_nobody(tiny):
    config = compose_config([*tiny, "train.num_threads=1"])
    assert share_of_rank(config, SimpleNamespace(is_accelerator=True), 4) is None
    assert share_of_rank(config, HostDevice(), None) is None
    assert share_of_rank(config, HostDevice(), 1) == CpuShare(1, 0)
