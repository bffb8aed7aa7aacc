import itertools

import pytest

from gpipe_hpc.schedule import (
    Costs,
    Memory,
    ScheduleError,
    build,
    forward_only,
    from_text,
    lower,
    memory_over_time,
    peak_memory,
    simulate,
)

ONE_EACH = Costs(forward=1, input_gradient=1, weight_gradient=1, recompute=1)
# M_B and M_W of the zero bubble papers: all that is kept, and what W alone still needs.
ALL, FOR_W = 34.0, 32.0


def test_by_default_stage_micro_batches_are_counted(variant):
    name, options = variant
    bare = build(name, ranks=4, microbatches=7, **options)
    assert peak_memory(bare, Memory()) == bare.max_activations
    assert peak_memory(lower(bare), Memory()) == bare.max_activations


@pytest.mark.parametrize(("name", "depth"), [("zb_h1", 1), ("zb_h2", 2)])
def test_zero_bubble_peaks_are_the_published_ones(name, depth):
    """(p - i + 1) M_B + (i - 1) M_W and (2p - 2i + 1) M_B + (2i - 2) M_W on worker i, from 1."""
    for k in (1, 2, 4, 7):
        bare = build(name, ranks=k, microbatches=4 * k)
        peaks = peak_memory(bare, Memory(forward=ALL, input_gradient=ALL - FOR_W))
        expected = [(depth * (k - i) + 1) * ALL + depth * (i - 1) * FOR_W for i in range(1, k + 1)]
        assert list(peaks) == expected


def test_one_f_one_b_against_v_shapes_in_bytes():
    """Stages of a V are half as big: ZB-V keeps what 1F1B's first rank keeps, V-Half about half."""
    for k in (2, 4, 8, 16):
        whole = peak_memory(build("one_f_one_b", ranks=k, microbatches=4 * k), Memory(forward=2))
        zb_v = peak_memory(build("zb_v", ranks=k, microbatches=4 * k), Memory(forward=1))
        v_half = peak_memory(build("v_half", ranks=k, microbatches=4 * k), Memory(forward=1))
        assert max(zb_v) == max(whole) == 2 * k
        assert max(v_half) == 2 * ((k + 2) // 2)


def test_recomputation_keeps_boundaries_and_one_micro_batch_in_full():
    """M boundary inputs and the activations of one micro-batch: the peak of GPipe's paper."""
    memory = Memory(forward=10, boundary=1)
    for k, m in itertools.product((1, 2, 4), (1, 3, 8)):
        always = build("gpipe", ranks=k, microbatches=m, recompute="always")
        assert peak_memory(always, memory) == (m * 1 + 9,) * k
        never = build("gpipe", ranks=k, microbatches=m)
        assert peak_memory(never, memory) == (10 * m,) * k
    dearer = Memory(forward=10, boundary=1, recompute=20)
    assert peak_memory(build("gpipe", ranks=1, microbatches=3, recompute="always"), dearer) == (23,)


def test_weights_are_held_by_every_holder():
    mirrored = build("gems", ranks=3, microbatches=2)
    memory = Memory(forward=1, weights=[100, 10, 1000])
    assert peak_memory(mirrored, memory) == (1101, 11, 1101)
    assert peak_memory(forward_only(mirrored), memory) == (1101, 11, 1101)


def test_memory_follows_the_events():
    timeline = simulate(from_text("0F0,0F1,0I0,0W0,0B1\n"), Costs(1, 2, 1, 1))
    held = memory_over_time(timeline, Memory(forward=5, input_gradient=2), 0)
    assert held == [(0, 0), (0, 5), (1, 10), (3, 8), (4, 5), (6, 0)]


def test_amounts_that_make_no_sense_are_refused():
    with pytest.raises(ScheduleError, match="costs: forward"):
        peak_memory(build("gpipe", ranks=2, microbatches=1), Memory(forward=[1, 2, 3]))


def test_what_is_in_flight_counts_until_it_is_sent_or_taken():
    """The output of rank 0, its buffer on rank 1, and the gradient on its way back."""
    table = lower(from_text("0F0,0B0\n1F0,1B0\n"))
    plain = peak_memory(table, Memory(forward=10))
    assert plain == (10, 10)
    # Rank 0: the output beside its activations, then the posted buffer of the gradient.
    assert peak_memory(table, Memory(forward=10, output=[3, 0])) == (13, 10)
    assert peak_memory(table, Memory(forward=10, gradient=[0, 4])) == (14, 14)
    # An input that waits for its turn: two posted ahead of the first forward.
    early = from_text("0F0,0SEND_F0,0F1,0SEND_F1\n1RECV_F0,1RECV_F1,1F0,1F1\n")
    assert peak_memory(early, Memory(forward=1, output=[5, 0]))[1] == 10


def test_what_goes_over_a_skip_is_counted_by_its_own_size():
    table = lower(from_text("0F0,0B0\n1F0,1B0\n2F0,2B0\nskips,0>2\n"))
    # Rank 0 has posted for the gradient by the time that its output leaves.
    assert peak_memory(table, Memory(forward=0, skips={(0, 2): 7})) == (14, 0, 7)
