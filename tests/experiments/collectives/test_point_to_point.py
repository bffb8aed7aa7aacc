"""Messages between two processes: every path brings them, and the models fit what they describe."""

import pytest
import torch

from experiments.outer.collectives.__main__ import main
from experiments.outer.collectives.point_to_point import (
    Curve,
    PathResults,
    Staged,
    link_of,
    measured,
    paths_of,
    pipeline_of,
    report,
)
from gpipe_hpc.comm.world.start import start_world

SIZES = [1, 100, 1000, 300_000]


@pytest.mark.long
def test_every_path_brings_each_message_in_order(processes, tmp_path):
    def body(rank):
        world = start_world(device="cpu", timeout_s=60)
        paths = paths_of(world) | {"small blocks": Staged(world, 64)}
        del paths["shared memory"]  # what it brings is a tensor of its own
        wrong = []
        for name, path in paths.items():
            for size in SIZES:
                sent = [torch.full((size,), 7 + i, dtype=torch.uint8) for i in range(5)]
                if rank == 0:
                    for wait in [path.start_send(each) for each in sent]:
                        wait()
                else:
                    came = [torch.zeros_like(each) for each in sent]
                    for wait in [path.start_receive(each) for each in came]:
                        wait()
                    if not all(map(torch.equal, came, sent)):
                        wrong.append((name, size))
        found = measured(world, [1, 5000], 1, 100_000)
        assert [curve.path for curve in found.curves][-1] == "shared memory"
        times = [t for c in found.curves for each in (*c.latency_s, *c.bandwidth) for t in each]
        assert len(times) == 4 * 2 * 2 and min(times) > 0
        assert len(found.block_s) == len(found.blocks) > 0 and max(found.blocks) <= 100_000
        return wrong

    assert processes(2, body, tmp_path) == [[], []]


def made(alpha_s, beta_s, t_s, byte_s):
    """Return what a machine would give that is just as the models say."""
    sizes, m, blocks = [64, 4096, 1 << 20], 1 << 23, [1 << 14, 1 << 18, 1 << 22]
    curve = Curve(
        "direct",
        sizes,
        [[alpha_s + n * beta_s] * 5 for n in sizes],
        [[n / (alpha_s + n * beta_s)] * 5 for n in sizes],
    )
    block_s = [[(m / c + 2) * (t_s + c * byte_s)] * 5 for c in blocks]
    return PathResults("cpu", [curve], m, blocks, block_s)


def test_fits_recover_the_models_that_made_the_times():
    found = made(5e-6, 1e-10, 20e-6, 2e-10)
    link, error = link_of(found.curves[0])
    assert link.start_s == pytest.approx(5e-6) and link.byte_s == pytest.approx(1e-10)
    stages, staged_error = pipeline_of(found)
    assert stages.start_s == pytest.approx(20e-6) and stages.byte_s == pytest.approx(2e-10)
    assert max(error, staged_error) < 1e-6
    text = report(found)
    assert "- direct: alpha 5 us, beta 0.1 ns/B (10 GB/s)" in text
    assert "t 20 us (5 GB/s)" in text
    # 514 blocks of 16 KiB take 23.3 us each.
    assert "| 16 KiB | 12 (12-12) | 12 |" in text


@pytest.mark.long
def test_the_command_prints_its_tables(capsys):
    words = ["point_to_point", "--bytes=1,4096", "--repeats=1", "--staged-bytes=65536"]
    assert main(words) == 0
    assert "| 4 KiB |" in capsys.readouterr().out
