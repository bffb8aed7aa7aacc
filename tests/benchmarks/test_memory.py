"""What the benchmark says about memory: counts, no clock."""

import mmap
from dataclasses import replace

import pytest
import torch

from benchmarks.cells import CONTESTANTS, Block, Cell, our_cells, torch_cells
from benchmarks.peak_memory import weigh
from benchmarks.probes import memory
from benchmarks.rounds import Conductor

MIB = 1 << 20


def test_weighed_is_what_tensors_take_at_once():
    before = torch.ones(MIB)

    def run():
        first = torch.ones(3 * MIB, dtype=torch.uint8)
        del first
        kept = torch.ones(MIB, dtype=torch.uint8)
        other = torch.ones(4 * MIB, dtype=torch.uint8)
        return kept + other[:MIB]

    kept, num_bytes = weigh(run)
    assert num_bytes == 6 * MIB and len(kept) == MIB
    assert len(before) == MIB


def test_memory_that_two_processes_touch_counts_half():
    before = memory()
    with mmap.mmap(-1, 64 * MIB) as shared:  # anonymous and shared
        shared.write(bytes(64 * MIB))
        after = memory()
    assert after.shared_bytes - before.shared_bytes == 64 * MIB
    assert 30 * MIB < after.now_bytes - before.now_bytes < 40 * MIB


@pytest.mark.slow
def test_cells_are_weighed_and_one_that_fails_is_left_out(tmp_path):
    chosen = [each for each in CONTESTANTS if each.name in ("ours", "torch")]
    cells = [
        *our_cells("C", 4, ("gpipe", "one_f_one_b")),
        replace(our_cells("C", 4, ("gpipe",))[0], variant="no such schedule"),
        torch_cells("C", 4, again=False)[0],
        Cell("nobody", "C", "gpipe", 4),
    ]
    said = []
    conductor = Conductor(chosen, tmp_path, size="tiny", say=said.append)
    try:
        weighed = conductor.weigh(Block("C", 4, "core", tuple(cells)))
    finally:
        conductor.close()
    assert list(weighed) == ["ours gpipe", "ours one_f_one_b", "torch GPipe"]
    assert "no such schedule" in said[0]
    # 1F1B's last rank keeps one micro-batch, GPipe's four.
    assert weighed["ours one_f_one_b"][1] < weighed["ours gpipe"][1]
