"""Pinned memory that is kept."""

from gpipe_hpc.comm.transport.pool import PinnedPool
from tests.comm.transport.networks import LateDevice, LateEvent


def test_a_buffer_is_given_out_again_once_what_reads_it_is_done():
    device = LateDevice()
    pool, stream = PinnedPool(device), device.stream()
    first = pool.take(100)
    stream.put(lambda: None)
    read = LateEvent(stream, stream.num_put)
    pool.release(first, until=read)
    assert pool.take(100) is not first
    read.synchronize()
    assert pool.take(100) is first


def test_the_smallest_that_fits_is_taken_and_one_too_small_is_replaced():
    pool = PinnedPool(LateDevice())
    small, large = pool.take(4096), pool.take(2 * 4096)
    for buffer in (large, small):
        pool.release(buffer)
    assert pool.take(10) is small
    pool.release(small)
    larger = pool.take(3 * 4096)
    assert larger.size_bytes == 3 * 4096
    assert pool.take(1) is large, "the small one made room for the larger one"
    assert pool.num_made == 3
