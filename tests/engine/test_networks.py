"""Every schedule over networks in which a send completes when it is received, as in Gloo and NCCL.

Between processes, a Gloo group that is used without tags stands for a device backend.
"""

import pytest
import torch
from torch import nn

import gpipe_hpc.comm.world.processes as world_of_processes
from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.comm.world.processes import ProcessWorld
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.schedule import schedule_names
from tests.comm.transport.networks import LateDevice, Network, NetworkWorld
from tests.support import batches, product, square_sum

NAMES = [name for name in schedule_names() if name not in ("file", "auto")]
BATCHES = batches(3, size=8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


def train(world, name, *, stages, replicas=1):
    """Train with a schedule; return the loss and the gradients by name of each step."""
    pipe = Pipeline(
        [LayerSpec(Block) for _ in range(16)],
        square_sum,
        stages=stages,
        replicas=replicas,
        microbatches=8 // replicas,
        schedule=name,
        seed=3,
        world=world,
    )
    seen = []
    for inputs, targets in BATCHES:
        part = pipe.share(len(inputs))
        loss = pipe.step(inputs[part], targets[part]).loss
        seen.append((float(loss), {n: p.grad.tolist() for n, p in pipe.named_parameters()}))
    pipe.evaluate(*BATCHES[0])
    return seen


def train_over_network(network, name, *, stages, has_backend, **settings):
    def body(world):
        own = NetworkWorld(world, network, LateDevice(), has_backend=has_backend)
        return train(own, name, stages=stages, **settings)

    ranks = run_on_threads(stages * settings.get("replicas", 1), body, timeout_s=20)
    network.assert_quiet()
    return ranks


# Two ranks run every schedule. Four ranks, in which a rank has two neighbours, run one schedule of
# each placement (one stage per rank, looped, V-shaped, mirrored) and those that used to hang.
ON_FOUR = ("one_f_one_b", "interleaved", "zb_v", "hanayo", "dualpipe_v", "chimera")


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        *((name, 2) for name in NAMES),
        *((name, 4) if name in ON_FOUR else product(name, 4) for name in NAMES),
    ],
)
def test_schedule_trains_if_sends_complete_only_when_received(name, stages):
    """Regression: with pinned memory, `zb_v`, `hanayo` and `dualpipe_v` hung in the first step.

    With a device backend, all channels from one rank to another share one queue. Regression: each
    channel had its own.
    """
    expected = run_on_threads(stages, lambda world: train(world, name, stages=stages))
    for has_backend in (False, True):
        network = Network()
        assert train_over_network(network, name, stages=stages, has_backend=has_backend) == expected
        queues = {key for key, _ in network.started if key[-1] == "device"}
        pairs = {key[:2] for key, _ in network.started}
        assert queues == {(*pair, "device") for pair in pairs if has_backend}


@pytest.mark.parametrize(
    ("name", "has_backend"), [("zb_v", False), ("zb_v", True), ("gems", False), ("gems", True)]
)
def test_replicas_use_separate_queues(name, has_backend):
    expected = run_on_threads(4, lambda world: train(world, name, stages=2, replicas=2))
    assert (
        train_over_network(Network(), name, stages=2, replicas=2, has_backend=has_backend)
        == expected
    )


# Peers of each rank, for two stages and two replicas or for four stages.
TWO_BY_TWO = {"stages": 2, "replicas": 2}
PEERS = {
    "zb_v": ({1}, {0}, {3}, {2}),
    "hanayo": ({1}, {0}, {3}, {2}),
    "interleaved": ({1, 3}, {0, 2}, {1, 3}, {2, 0}),
    "chimera": ({1}, {0, 2}, {1, 3}, {2}),
}


class OnDevice(ProcessWorld):
    """Process world that treats activations as device tensors, with or without a device backend."""

    has_backend = True

    def transport(self, channels, device=None):
        # Patched in this process only, which ends with the test.
        world_of_processes._is_carried = lambda device: self.has_backend
        return super().transport(channels, LateDevice())


class OnDeviceOverGloo(OnDevice):
    has_backend = False


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("zb_v", OnDevice),
        ("chimera", OnDeviceOverGloo),
        # hanayo has the peers of zb_v; interleaved has two per rank, as inner ranks of chimera.
        product("hanayo", OnDeviceOverGloo),
        product("interleaved", OnDevice),
    ],
)
def test_process_forms_one_host_group_and_two_device_groups_per_peer(
    name, kind, processes, tmp_path
):
    """Without a device backend there are only host groups.

    Regression: all ranks formed two groups for each channel of each replica.
    """
    settings = {"stages": 4, "replicas": 1} if len(PEERS[name][1]) > 1 else TWO_BY_TWO
    expected = run_on_threads(4, lambda world: train(world, name, **settings))

    def body(rank):
        world = kind(HostDevice(), 30.0)
        world.transport([])
        formed = []
        form = world._former.form
        world._former.form = lambda ranks, *backend: (
            formed.append((ranks, *backend)) or form(ranks, *backend)
        )
        trained = train(world, name, **settings)
        train(world, name, **settings)  # a second pipeline forms no further groups
        queues = [ranks for ranks, backend in formed if backend == "cpu:gloo"]
        pairs = [ranks for ranks, backend in formed if backend == "gloo"]
        world.close()
        return trained, queues, pairs

    ranks = processes(4, body, tmp_path)
    assert [rank[0] for rank in ranks] == expected
    for rank, (_, queues, pairs) in enumerate(ranks):
        peers = PEERS[name][rank]
        assert sorted(pairs) == sorted(tuple(sorted((rank, peer))) for peer in peers)
        both_ways = {ends for peer in peers for ends in ((rank, peer), (peer, rank))}
        assert sorted(queues) == (sorted(both_ways) if kind is OnDevice else [])
