"""Memory that tensors leave behind stays in the process: seen by page faults."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from gpipe_hpc.comm.host.allocator import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "kept" else False
size = 64 * 2**20
for _ in range(12):
    torch.empty(size, dtype=torch.uint8).fill_(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    torch.empty(size, dtype=torch.uint8).fill_(1)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(how):
    run = [sys.executable, "-c", SCRIPT, how]
    kept, number = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    return kept == "True", int(number)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its malloc alone is told")
def test_freed_blocks_are_used_again():
    is_set, kept = faults("kept")
    assert is_set
    _, given_back = faults("default")
    assert kept < given_back / 2
