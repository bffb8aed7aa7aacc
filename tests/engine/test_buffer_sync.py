"""Buffers that forwards change are equal on replicas and mirrored stages after each step."""

import logging
from functools import partial

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.collectives.group import SoloGroup
from gpipe_hpc.comm.world.threads import ThreadGroup
from gpipe_hpc.device.deferred import AsyncHostTensor
from gpipe_hpc.engine.buffer_sync import DivergenceReporter
from gpipe_hpc.errors import ConfigError
from tests import support
from tests.simulated.world import between, run_simulated
from tests.support import square_sum

WIDTH = 4


class Averaging(nn.Module):
    """Subtract a running mean of the input, and count forwards and samples."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("mean", torch.zeros(WIDTH, dtype=dtype))
        self.register_buffer("hidden", torch.zeros((), dtype=dtype), persistent=False)
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))
        self.register_buffer("num_samples", torch.zeros((), dtype=torch.int32))
        self.register_buffer("constant", torch.ones(3))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.5)
                self.hidden = self.hidden + 1  # another tensor, instead of a change in place
                self.num_forwards += 1
                self.num_samples += len(x)
        return x + self.linear(x - self.mean.to(x.dtype))


batch = partial(support.batch, dtype=torch.float64)


def make(world, layer=Averaging, num_layers=2, **settings):
    settings = {"recompute": "never"} | settings
    specs = [LayerSpec(layer) for _ in range(num_layers)]
    return Pipeline(specs, square_sum, seed=5, world=world, **settings)


def buffers_of(pipe):
    """Return copies of this rank's buffers, including those that checkpoints do not store."""
    return {
        f"layers.{i}.{name}": buffer.clone()
        for stage in pipe.stages.values()
        for i, layer in stage.layers.items()
        for name, buffer in layer.named_buffers()
    }


def step_only(pipe, data):
    part = pipe.share(len(data[0]))
    return pipe.step(data[0][part], data[1][part])


def step(pipe, data):
    return step_only(pipe, data).loss


def tensors_by_name(ranks):
    """Return the buffers of all ranks by name, each as a list with one tensor per rank."""
    found = {}
    for each in ranks:
        for name, buffer in each.items():
            found.setdefault(name, []).append(buffer)
    return found


def all_equal(tensors):
    return all(torch.equal(tensors[0], other) for other in tensors[1:])


LAYOUTS = {
    "replicas": (3, {"replicas": 3, "microbatches": 2}),
    "stages and replicas": (4, {"stages": 2, "replicas": 2, "microbatches": 2}),
    "gems": (2, {"schedule": "gems", "microbatches": 3}),
    "chimera": (2, {"schedule": "chimera", "microbatches": 4}),
    "dualpipe": (2, {"schedule": "dualpipe", "microbatches": 4}),
    "mirrored replicas": (4, {"schedule": "chimera", "stages": 2, "replicas": 2}),
}


@pytest.mark.parametrize("policy", ["average", "first"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_replicated_buffers_are_equal_after_every_step(layout, policy):
    """Regression: replicas diverged from the first step on, and a checkpoint stored one of them."""
    size, settings = LAYOUTS[layout]

    def body(world):
        pipe = make(world, buffers=policy, **settings)
        buffers = []
        for number in range(3):
            step(pipe, batch(12, number))
            buffers.append(buffers_of(pipe))
        return buffers

    ranks = run_on_threads(size, body)
    for number in range(3):
        found = tensors_by_name(rank[number] for rank in ranks)
        assert all(len(tensors) > 1 and all_equal(tensors) for tensors in found.values())
        assert found["layers.0.mean"][0].abs().max() > 0
    assert found["layers.0.hidden"][0] > ranks[0][0]["layers.0.hidden"]


def test_average_is_weighted_by_samples():
    """Two replicas have 5 and 4 samples; the reference averages the means of both."""

    def body(world):
        pipe = make(world, num_layers=1, replicas=2, microbatches=1)
        step(pipe, batch(9))
        return buffers_of(pipe)

    inputs = batch(9)[0]
    means = [piece.mean(0) * 0.5 for piece in inputs.tensor_split(2)]
    expected = (5 * means[0] + 4 * means[1]) / 9
    for buffers in run_on_threads(2, body):
        assert torch.allclose(buffers["layers.0.mean"], expected, atol=1e-14)
        assert buffers["layers.0.num_samples"] == 5, "integers must be those of the first replica"
        assert buffers["layers.0.num_forwards"] == 1


@pytest.mark.parametrize("policy", ["average", "first"])
def test_rank_without_samples_does_not_affect_buffers(policy):
    """One direction of Chimera has no micro-batch; one of two replicas gets no sample."""

    def mirrored(world):
        pipe = make(world, stages=2, schedule="chimera", microbatches=1, buffers=policy)
        step(pipe, batch(4))
        return buffers_of(pipe)

    def replicas(world):
        pipe = make(world, replicas=2, num_layers=1, buffers=policy)
        if world.rank == 0:
            pipe.stages[0].layers[0].mean.fill_(float("inf"))
        data = batch(1)
        pipe.step(*(data if world.rank else [each[:0] for each in data]))
        return buffers_of(pipe)

    for found in (
        tensors_by_name(run_on_threads(2, mirrored)),
        tensors_by_name(run_on_threads(2, replicas)),
    ):
        assert all(len(tensors) == 2 and all_equal(tensors) for tensors in found.values())
        assert torch.isfinite(found["layers.0.mean"][0]).all()
        assert found["layers.0.num_forwards"][0] == 1


def test_policy_each_logs_warning_and_checkpoint_stores_first_replica(
    caplog, tmp_path, stored_tensors
):
    def body(world):
        pipe = make(world, replicas=2, microbatches=2, buffers="each")
        for number in range(3):
            step(pipe, batch(8, number))
        pipe.save(tmp_path / "checkpoint")
        return buffers_of(pipe)

    first, second = run_on_threads(2, body)
    assert not torch.equal(first["layers.0.mean"], second["layers.0.mean"])
    messages = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    (text,) = [each for each in messages if "buffers that forwards change" in each]
    names = ("mean", "hidden", "num_forwards", "num_samples")
    assert all(f"layers.{layer}.{name}" in text for layer in (0, 1) for name in names)
    assert "not synchronised between the 2 ranks" in text and "constant" not in text
    stored = stored_tensors(tmp_path / "checkpoint")
    for name, buffer in first.items():
        if "hidden" not in name:
            assert torch.equal(stored[f"model.{name}"], buffer), name


def test_averaged_and_differing_buffers_are_logged_once(caplog):
    caplog.set_level(logging.INFO, "gpipe_hpc.pipeline")

    def body(world):
        pipe = make(world, num_layers=1, replicas=2, microbatches=1)
        for number in range(3):
            step(pipe, batch(9, number))

    run_on_threads(2, body)
    messages = [r.message for r in caplog.records if "buffers that forwards change" in r.message]
    assert len(messages) == 2
    (mean,) = [text for text in messages if "are averaged over the 2 ranks" in text]
    (count,) = [text for text in messages if "cannot be averaged" in text]
    assert "layers.0.hidden, layers.0.mean " in mean
    assert "layers.0.num_samples differ" in count and "num_forwards" not in count


def test_logging_of_differing_buffers_does_not_wait_for_device(caplog):
    """Regression: the host waited for each such buffer in each step."""

    def body(world):
        pipe = make(world, num_layers=1, replicas=2, microbatches=1)
        waits = []
        for number in range(3):
            _, own = between(world.device, partial(step_only, pipe, batch(9, number)))
            waits.append(list(map(str, own)))
        return waits[1:], buffers_of(pipe)

    ranks = run_simulated(2, body).results
    assert [waits for waits, _ in ranks] == [[[], []]] * 2
    assert all(map(all_equal, tensors_by_name(buffers for _, buffers in ranks).values()))
    messages = [r.message for r in caplog.records if "cannot be averaged" in r.message]
    (text,) = messages
    assert "layers.0.num_samples differ between the 2 ranks" in text and "num_forwards" not in text


def messages_of(caplog):
    return [r.message for r in caplog.records if "cannot be averaged" in r.message]


def messages_around(caplog, end):
    """Return the messages on differing buffers after a step, before and after `end(pipe)`."""

    def body(world):
        pipe = make(world, num_layers=1, replicas=2, microbatches=1)
        step_only(pipe, batch(9, 0))
        world.world_group.all_reduce(torch.zeros(1))
        before = messages_of(caplog)
        world.world_group.all_reduce(torch.zeros(1))
        end(pipe)
        return before

    before, _ = run_simulated(2, body).results
    return before, messages_of(caplog)


def test_checkpoint_logs_differences_of_last_step(caplog, tmp_path):
    """Regression: only a further step logged them."""
    before, after = messages_around(caplog, lambda pipe: pipe.save(tmp_path / "kept"))
    assert not before and "layers.0.num_samples differ" in after[0]


def test_log_pending_logs_differences_of_last_step(caplog):
    before, after = messages_around(caplog, lambda pipe: pipe.log_pending())
    assert not before and "layers.0.num_samples differ" in after[0]


class Event:
    """Device event that is done once `is_done` is set; it must not be waited for."""

    def __init__(self, is_done=False):
        self.is_done = is_done

    def query(self):
        return self.is_done

    def synchronize(self):
        raise AssertionError("waited for an event that may never complete")


@pytest.mark.parametrize("is_done", [False, True])
def test_deletion_logs_known_differences_without_waiting(caplog, is_done):
    """A pipeline may be dropped after a failure, when the device never finishes."""
    owner, event = Averaging(), Event()
    reporter = DivergenceReporter(SoloGroup(0), 0)
    reporter.ends_with(owner)
    reporter.compare(["layers.0.count"], AsyncHostTensor(torch.ones(1), event), 0)
    reporter.log_arrived()
    assert not messages_of(caplog)
    event.is_done = is_done
    del owner
    assert len(messages_of(caplog)) == is_done


class OnHostAndDevice(nn.Module):
    """Keep a mean and a count on the device, and another mean and count on the host."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        for place in ("there", "here"):
            self.register_buffer(f"mean_{place}", torch.zeros(WIDTH, dtype=torch.float64))
            self.register_buffer(f"count_{place}", torch.zeros((), dtype=torch.int64))
        self.has_moved = False

    def forward(self, x):
        if not self.has_moved:
            self.has_moved = True  # not in __init__: moving a layer moves its buffers
            self.mean_here = torch.zeros(WIDTH, dtype=torch.float64)
            self.count_here = torch.zeros((), dtype=torch.int64)
        with torch.no_grad():
            self.mean_there += x.detach().mean(0)
            self.count_there += len(x)
            self.mean_here += len(x) / 2
            self.count_here += len(x)
        return x + self.linear(x)


@pytest.mark.parametrize("policy", ["average", "first"])
def test_host_buffers_do_not_wait_for_device_buffers(policy, caplog):
    """Regression: both were packed together, so the host waited for the device in each step."""

    def body(world):
        pipe = make(
            world, OnHostAndDevice, num_layers=1, replicas=2, microbatches=1, buffers=policy
        )
        waits = []
        for number in range(3):
            data = batch(9, number)
            if world.device.is_accelerator:
                _, own = between(world.device, partial(step_only, pipe, data))
                waits.append(list(map(str, own)))
            else:
                step_only(pipe, data)
        pipe.log_pending()
        return waits[1:], buffers_of(pipe)

    ranks = run_simulated(2, body).results
    assert [waits for waits, _ in ranks] == [[[], []]] * 2
    expected = [buffers for _, buffers in run_on_threads(2, body)]
    for (_, buffers), of_cpu in zip(ranks, expected, strict=True):
        assert all(torch.equal(buffers[name], value) for name, value in of_cpu.items())
    assert ("count_here" in str(messages_of(caplog))) == (policy == "average")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_average_of_equal_buffers_is_bitwise_exact(dtype):
    """Otherwise the mean of three equal values could differ from them by rounding."""

    def body(world):
        pipe = make(world, partial(Averaging, dtype), num_layers=1, replicas=3)
        rows = torch.full((1, WIDTH), 1 / 3, dtype=torch.float64)
        pipe.step(rows, rows)
        return buffers_of(pipe)

    expected = torch.full((WIDTH,), 1 / 3, dtype=torch.float64).to(dtype) * 0.5
    for buffers in run_on_threads(3, body):
        assert torch.equal(buffers["layers.0.mean"], expected)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("z", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("spread", torch.zeros(1, dtype=torch.float64).expand(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))

    def forward(self, x):
        with torch.no_grad():
            self.z += torch.complex(x.mean().float(), x.sum().float())
            self.spread = x[0, :1].expand(3)
            self.seen = x.sum() > 0
        return self.linear(x)


def test_complex_bool_and_overlapping_buffers_are_synchronized():
    def body(world):
        pipe = make(world, Complex, num_layers=1, replicas=2)
        step(pipe, batch(8, 0))
        step(pipe, batch(8, 1))
        return buffers_of(pipe)

    found = tensors_by_name(run_on_threads(2, body))
    assert all(all_equal(tensors) for tensors in found.values())
    pieces = [batch(8, number)[0].tensor_split(2) for number in range(2)]
    sums = [[p.sum() for p in each] for each in pieces]
    expected = sum(sum(each) for each in sums) / 2
    assert found["layers.0.z"][0].imag[0].item() == pytest.approx(float(expected), rel=1e-5)
    spread = (pieces[1][0][0, 0] + pieces[1][1][0, 0]) / 2
    assert found["layers.0.spread"][0].tolist() == pytest.approx([float(spread)] * 3)


class Growing(nn.Module):
    """Store the last input of any shape, and register a buffer in the first forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("last", None)

    def forward(self, x):
        self.last = x.detach().clone()
        if "made" not in self._buffers and x.sum() > 0:
            self.register_buffer("made", x.detach().sum())
        return self.linear(x)


@pytest.mark.parametrize("policy", ["average", "first", "each"])
def test_new_buffers_and_unequal_shapes_do_not_block_training(policy, caplog):
    """Otherwise sizes that differ between ranks would block or abort a collective."""

    def body(world):
        pipe = make(world, Growing, num_layers=1, replicas=2, buffers=policy)
        seen = []
        for size in (5, 5, 8, 3):
            # The first input of the second replica registers no buffer.
            data = [torch.full((size, WIDTH), 2.0).double() for _ in range(2)]
            part = pipe.share(size)
            sign = -1 if world.rank and not seen else 1
            pipe.step(sign * data[0][part], data[1][part])
            seen.append(buffers_of(pipe))
        return seen

    ranks = run_on_threads(2, body)
    for number in range(4):
        found = tensors_by_name(rank[number] for rank in ranks)
        if policy != "each":
            assert all(len(c) == 2 and all_equal(c) for c in found.values()), number
            assert set(found) == {"layers.0.last", "layers.0.made"}
    messages = [r.message for r in caplog.records if "buffers that forwards change" in r.message]
    assert any("layers.0.last" in text for text in messages)


class Renaming(nn.Module):
    """Register the buffer under another name in the second step."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("first", torch.zeros(WIDTH, dtype=torch.float64))
        self.num_forwards = 0

    def forward(self, x):
        self.num_forwards += 1
        if self.num_forwards == 2:
            del self.first
            self.register_buffer("second", x.detach().mean(0))
        return self.linear(x)


def test_renamed_buffer_is_synchronized():
    def body(world):
        pipe = make(world, Renaming, num_layers=1, replicas=2)
        for seed in range(3):
            step(pipe, batch(4, seed=seed))
        return buffers_of(pipe)

    found = tensors_by_name(run_on_threads(2, body))
    assert list(found) == ["layers.0.second"] and all_equal(found["layers.0.second"])


class Later(nn.Module):
    """Register two buffers in the first forward; change one of them and an old one in each."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.register_buffer("old", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x):
        if "made" not in self._buffers:
            self.register_buffer("made", torch.zeros(WIDTH, dtype=torch.float64))
            self.register_buffer("still", torch.full((WIDTH,), 0.1, dtype=torch.float64))
        with torch.no_grad():
            self.made += x.detach().mean(0)
            self.old += x.detach().mean(0)
        return self.linear(x)


@pytest.mark.parametrize("policy", ["average", "first"])
def test_buffers_registered_later_are_synchronized_every_step(policy):
    """The number of change flags is fixed, so buffers registered later have none of their own."""

    def body(world):
        pipe = make(world, Later, num_layers=1, replicas=2, buffers=policy)
        seen = []
        for seed in range(4):
            step(pipe, batch(8, seed=seed))
            seen.append(buffers_of(pipe))
        return seen

    ranks = run_on_threads(2, body)
    for number in range(4):
        found = tensors_by_name(rank[number] for rank in ranks)
        assert set(found) == {"layers.0.old", "layers.0.made", "layers.0.still"}
        assert all(all_equal(tensors) for tensors in found.values()), number
    assert len({rank[3]["layers.0.made"].sum().item() for rank in ranks}) == 1
    assert ranks[0][3]["layers.0.made"].ne(ranks[0][2]["layers.0.made"]).all()


def test_unchanged_buffers_need_no_extra_collective(monkeypatch):
    """The change flags are sent together with the flags of used parameters."""
    calls = []
    original = ThreadGroup._contribute

    def counting(self, left):
        calls.append(self._rank)
        return original(self, left)

    monkeypatch.setattr(ThreadGroup, "_contribute", counting)

    def count(layer):
        def body(world):
            pipe = make(world, layer, num_layers=1, replicas=2)
            step(pipe, batch())
            before = calls.count(world.rank)
            step(pipe, batch(8, 1))
            return calls.count(world.rank) - before

        first, second = run_on_threads(2, body)
        assert first == second
        return first

    with_buffers, without = (count(layer) for layer in (Still, Bare))
    assert with_buffers == without <= 2


class Bare(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH, dtype=torch.float64)


class Still(Bare):
    def __init__(self):
        super().__init__()
        self.register_buffer("constant", torch.ones(1000))


class Unequal(nn.Module):
    """Initialise buffers with values that differ between ranks."""

    def __init__(self, value):
        super().__init__()
        self.register_buffer("stored", torch.full((2,), value))
        self.register_buffer("hidden", self.stored.clone() * 2, persistent=False)
        self.register_buffer("spread", self.stored.clone()[:1].expand(3), persistent=False)
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x):
        return self.linear(x)


def test_initial_buffers_are_those_of_replica_0():
    """Regression: only persistent buffers were made equal."""

    def body(world):
        pipe = Pipeline([Unequal(1.0 + world.rank)], square_sum, replicas=2, world=world)
        return buffers_of(pipe)

    for buffers in run_on_threads(2, body):
        assert buffers["layers.0.stored"].tolist() == [1.0, 1.0]
        assert buffers["layers.0.hidden"].tolist() == [2.0, 2.0]
        assert buffers["layers.0.spread"].tolist() == [1.0, 1.0, 1.0]


def test_next_step_synchronizes_buffers_changed_by_evaluation():
    class Counts(Bare):
        def __init__(self):
            super().__init__()
            self.register_buffer("num_rows", torch.zeros((), dtype=torch.float64))

        def forward(self, x):
            if not self.training:
                self.num_rows += len(x)
            return super().forward(x)

    def body(world):
        pipe = make(world, Counts, num_layers=1, replicas=2)
        data = batch(9)
        part = pipe.share(9)
        pipe.evaluate(data[0][part], data[1][part])
        step(pipe, data)
        return buffers_of(pipe)

    found = tensors_by_name(run_on_threads(2, body))
    assert all_equal(found["layers.0.num_rows"])
    assert found["layers.0.num_rows"][0].item() == pytest.approx((5 * 5 + 4 * 4) / 9)


def test_unknown_policy_raises_error():
    with pytest.raises(ConfigError, match=r"bad buffers, expected one of average, first, each"):
        make(None, buffers="sum")


def test_buffers_are_synchronized_between_processes(processes, tmp_path):
    """Two replicas of two stages over Gloo, and a buffer whose shape differs between ranks."""

    def body(rank):
        pipe = make(None, stages=2, replicas=2, microbatches=2)
        growing = make(None, Growing, replicas=4, num_layers=1)
        for number in range(3):
            step(pipe, batch(9, number))
            step(growing, batch(9 + number, number))
        return buffers_of(pipe), buffers_of(growing)

    ranks = processes(4, body, tmp_path)
    for number, count in ((0, 2), (1, 4)):
        found = tensors_by_name(rank[number] for rank in ranks)
        assert all(len(c) == count and all_equal(c) for c in found.values())
        assert len(found) >= 2
