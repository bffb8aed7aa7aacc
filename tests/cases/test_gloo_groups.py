"""Where the Gloo groups of a run listen: one listener a group, on the address that is asked for."""

import ipaddress
import os
import socket
from contextlib import suppress

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline
from gpipe_hpc.comm.net.addresses import is_loopback, own_interfaces
from gpipe_hpc.comm.world.start import start_world
from tests.support import patience


def listeners():
    """Return on which addresses this process listens, by port."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as seen:
                listens = seen.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and seen.family != socket.AF_UNIX:
                    address, port, *_ = seen.getsockname()
                    found[port] = address
    return found


def train(**settings):
    """Train two stages over Gloo; return the loss of the first step and a plain model's."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4, dtype=torch.float64) for _ in range(2)]
    x, y = torch.randn(2, 8, 4, dtype=torch.float64)
    plain = nn.functional.mse_loss(nn.Sequential(*layers)(x), y)
    world = start_world(timeout_s=60, shares_memory=False, **settings)
    pipe = Pipeline(layers, nn.MSELoss(), stages=2, microbatches=2, world=world)
    return float(pipe.step(x, y).loss), float(plain)


def test_on_one_machine_all_listen_on_loopback_alone(start_ranks, tmp_path, repository):
    """A host whose name means an address of a network opened Gloo's groups to that network."""
    (tmp_path / "own_script.py").write_text(
        "from tests.cases.test_gloo_groups import listeners, train\n"
        "loss, plain = train()\n"
        "assert abs(loss - plain) < 1e-10\n"
        "print('listens', *sorted(listeners().values()), flush=True)\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{repository}"}
    ranks = start_ranks(2, module="own_script", env=env).wait(60 * patience())
    assert ranks.codes == [0, 0], "\n".join(ranks.outputs)
    for rank, output in enumerate(ranks.outputs):
        (line,) = (line for line in output.splitlines() if line.startswith("listens "))
        # torch's default group, that of all ranks, of the stages, of the channel; and the store.
        assert line.split()[1:] == ["127.0.0.1"] * (4 + (rank == 0))


def test_groups_listen_on_the_interface_that_is_asked_for(processes, tmp_path):
    """What the host's name means counted, not GLOO_SOCKET_IFNAME."""
    outside = [each for each in own_interfaces() if not is_loopback(each.address)]
    if not outside:
        pytest.skip("this machine has the loopback interface alone")
    chosen = outside[0]
    subnet = str(ipaddress.ip_network(f"{chosen.address}/30", strict=False))

    def body(rank):
        found = []
        for settings in ({"interface": chosen.name}, {"interface": subnet}, {}):
            os.environ.pop("GLOO_SOCKET_IFNAME", None)
            if not settings:
                os.environ["GLOO_SOCKET_IFNAME"] = chosen.name
            before = listeners()
            loss, plain = train(**settings)
            new = {port: at for port, at in listeners().items() if port not in before}
            found.append((abs(loss - plain) < 1e-10, list(new.values())))
        return found

    # Of all ranks, of the stages and of the channel.
    expected = [(True, [chosen.address] * 3)] * 3
    assert processes(2, body, tmp_path) == [expected] * 2
