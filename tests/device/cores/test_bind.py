"""Ranks agree on who computes where: what is told, and ranks that are processes."""

import os

import pytest
import torch

from gpipe_hpc import run_on_threads
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.device.cores.assignment import CpuRequest
from gpipe_hpc.device.cores.bind import _BindReport, _merge_reports, _sorted_by_machine, bind, bound
from gpipe_hpc.errors import ConfigError


def test_ranks_are_sorted_by_machine_wherever_they_stand():
    told = [(host, CpuRequest(frozenset({number}))) for number, host in enumerate("abab")]
    found = _sorted_by_machine(told)
    assert [machine.number for machine in found] == [0, 0, 1, 1]
    assert [each.allowed for each in found[2].ranks] == [{0}, {2}]
    assert found[1].ranks == found[3].ranks


def test_equal_machines_are_told_of_once_and_many_unequal_ones_are_counted():
    whole = _BindReport(8, {"same": ("a", 1)})
    for number in range(20):
        whole = _merge_reports(whole, _BindReport(4, {"same": ("b", 1), f"own {number}": ("c", 1)}))
    assert whole.num_threads == 4
    assert whole.hosts["same"] == ("a", 21)
    assert len(whole.hosts) == 8 and whole.more == 13


def test_one_process_stays_where_it_is_and_its_threads_come_back():
    world, before = start_world(), torch.get_num_threads()
    with bound(world, num_threads=before + 1) as lines:
        assert torch.get_num_threads() == before + 1
        assert "1 rank on CPUs" in lines[0] and "affinity unchanged" in lines[0]
    assert torch.get_num_threads() == before


def test_what_is_no_way_to_bind_is_refused():
    for words in ({"how": "core"}, {"num_threads": "many"}):
        with pytest.raises(ConfigError):
            bind(start_world(), **words)


def test_ranks_that_are_threads_bind_nothing():
    before = os.sched_getaffinity(0)
    assert run_on_threads(2, lambda world: bind(world).lines) == [[], []]
    assert os.sched_getaffinity(0) == before
