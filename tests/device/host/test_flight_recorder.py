"""Ranks on CPUs leave no record of their collectives, which cut their memory into pieces.

Seen as ranks of ``make train`` grew by half a megabyte a step: of their heap 94 MB were free after
150 steps, between strings with the name of a group, two for each step.
"""

import subprocess
import sys

import pytest

from gpipe_hpc.device.host.flight_recorder import disable_flight_recorder

SCRIPT = """
import json
import torch
from torch._C._distributed_c10d import _dump_fr_trace_json
from gpipe_hpc.comm.world.start import start_world

world = start_world(device="cpu", timeout_s=60)
for _ in range(5):
    world.world_group.all_reduce(torch.zeros(1))
print(len(json.loads(_dump_fr_trace_json()).get("entries", [])))
"""


def recorded(environ, port):
    """Return how many collectives torch holds on to, on each of two ranks."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env=environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    return [int(rank.communicate(timeout=120)[0]) for rank in ranks]


@pytest.mark.slow
def test_ranks_on_cpus_record_no_collectives(environ, free_port):
    assert recorded(environ, free_port()) == [0, 0]


@pytest.mark.slow
def test_who_asks_torch_for_a_record_gets_it(environ, free_port):
    some = recorded(environ | {"TORCH_FR_BUFFER_SIZE": "100"}, free_port())
    assert min(some) >= 5


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_what_a_user_has_set_stays(name):
    environment = {name: "7"}
    disable_flight_recorder(environment)
    assert environment == {name: "7"}
