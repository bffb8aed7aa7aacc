"""Memory that tensors leave behind stays in the process: seen by page faults."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from gpipe_hpc.device.host.allocator import keep_freed_memory

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


CUT_UP = """
import sys
import torch
from gpipe_hpc.device.host import allocator
from gpipe_hpc.device.host.host_memory import used_bytes

getattr(allocator, sys.argv[1])()
before = used_bytes()
for _ in range(4):  # which is when glibc, left alone, would raise its bound
    torch.empty(16 * 2**20, dtype=torch.uint8).fill_(1)
gone, stays = [], []
for _ in range(20):
    gone.append(torch.empty(4 * 2**20, dtype=torch.uint8).fill_(1))
    stays.append(torch.empty(2**20 // 2, dtype=torch.uint8).fill_(1))
del gone
freed = used_bytes() - before
allocator.trim_freed_memory()
print(freed // 2**20, (used_bytes() - before) // 2**20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its malloc alone is told")
def test_freed_memory_goes_back_at_once_or_when_it_is_trimmed():
    """Of 90 MiB 10 are still in use."""

    def left(how):
        run = [sys.executable, "-c", CUT_UP, how]
        done = subprocess.run(run, capture_output=True, text=True, check=True)
        return [int(mib) for mib in done.stdout.split()]

    given_back, _ = left("return_freed_memory")
    assert given_back < 30
    kept, trimmed = left("keep_freed_memory")
    assert kept > 80 and trimmed < 30


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="its malloc alone is told")
def test_freed_blocks_are_used_again():
    is_set, kept = faults("kept")
    assert is_set
    _, given_back = faults("default")
    assert kept < given_back / 2
