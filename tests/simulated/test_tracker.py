"""The tracker finds what is seeded, and is silent where all is in order."""

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.simulated.errors import (
    EventError,
    PinnedError,
    PlaceError,
    RaceError,
    ReuseError,
    ThreadError,
)
from tests.simulated.interpose import OTHER


def on_device(device, *shape):
    return torch.ones(*shape, device=device.torch)


def waits_of(device):
    """Return what the host has waited for since the last call."""
    found = [wait.operator for wait in device.host_waits]
    device.host_waits.clear()
    return found


# Accesses that no wait orders.


def test_a_stream_that_reads_what_another_has_just_made(device):
    made = on_device(device, 3) * 2
    with device.on(device.stream()), pytest.raises(RaceError, match=r"mul.*test_tracker\.py:\d+"):
        made + 1


def test_the_error_names_operator_and_line_of_both(device):
    made = on_device(device, 3).exp()
    with device.on(device.stream()), pytest.raises(RaceError) as caught:
        made.sigmoid()
    assert str(caught.value).startswith("sigmoid at tests/simulated/test_tracker.py:")
    assert "exp at tests/simulated/test_tracker.py:" in str(caught.value)
    assert device.tracker.faults == [caught.value]


@pytest.mark.parametrize("way", ["wait_stream", "wait_event", "record", "host"])
def test_any_wait_orders(device, way):
    made, side, current = on_device(device, 3) * 2, device.stream(), device.current_stream()
    if way == "wait_stream":
        side.wait_stream(current)
    elif way == "wait_event":
        side.wait_event(current.record_event())
    elif way == "record":
        event = device.event()
        event.record()
        side.wait_event(event)
    else:
        current.synchronize()
    with device.on(side):
        made + 1
    assert device.tracker.faults == []


def test_an_event_recorded_too_early_orders_nothing_behind_it(device):
    side, event = device.stream(), device.current_stream().record_event()
    made = on_device(device, 3)
    side.wait_event(event)
    with device.on(side), pytest.raises(RaceError):
        made + 1


def test_an_event_that_was_never_recorded_orders_nothing(device):
    made, side = on_device(device, 3), device.stream()
    side.wait_event(device.event())
    with device.on(side), pytest.raises(RaceError):
        made + 1


def test_a_write_waits_for_reads(device):
    made, side = on_device(device, 3), device.stream()
    side.wait_stream(device.current_stream())
    with device.on(side):
        made.sum()
    with pytest.raises(RaceError, match=r"add_.*reads it"):
        made.add_(1)


def test_reads_of_two_streams_need_no_order(device):
    made, side = on_device(device, 3), device.stream()
    side.wait_stream(device.current_stream())
    with device.on(side):
        made.sum()
    made.sum()
    assert device.tracker.faults == []


def test_waits_are_handed_on(device):
    """One stream waits for the second, which has waited for the first."""
    first, second, third = device.stream(), device.stream(), device.stream()
    with device.on(first):
        made = on_device(device, 3)
    second.wait_stream(first)
    third.wait_stream(second)
    with device.on(third):
        made + 1
    assert device.tracker.faults == []


def test_parts_of_one_memory_do_not_meet(device):
    whole, side = on_device(device, 8), device.stream()
    side.wait_stream(device.current_stream())
    with device.on(side):
        whole[:4].add_(1)
    whole[4:].add_(1)
    with pytest.raises(RaceError):
        whole[3:5].add_(1)


def test_views_use_no_memory(device):
    made, side = on_device(device, 4, 2), device.stream()
    with device.on(side):
        views = [
            made.view(8),
            made.t(),
            made[0],
            *made.unbind(),
            made.detach(),
            made.expand(1, 4, 2),
        ]
        assert all(device.holds(view) for view in views)
        with pytest.raises(RaceError):
            views[0].contiguous().add_(1)


def test_new_memory_may_still_be_in_use_by_what_its_stream_did_before(device):
    """The allocator hands a block out again at once, to works of the same stream alone."""
    on_device(device, 4).add_(1)
    fresh = device.empty((4,), torch.float32)
    with device.on(device.stream()), pytest.raises(RaceError, match="empty"):
        fresh.zero_()


def test_a_backward_is_watched(device):
    weight = on_device(device, 3).requires_grad_()
    loss = (weight * weight).sum()
    with (
        device.on(device.stream()),
        pytest.raises(RaceError, match=r"^mul at"),
    ):
        loss.backward()


def test_lists_of_tensors_are_watched(device):
    made = [on_device(device, 3), on_device(device, 4)]
    with device.on(device.stream()), pytest.raises(RaceError, match="_foreach_mul_"):
        torch._foreach_mul_(made, 2.0)


def test_statistics_that_batchnorm_writes_are_watched(device):
    layer = nn.BatchNorm1d(3).to(device.torch)
    x, side = on_device(device, 4, 3), device.stream()
    side.wait_stream(device.current_stream())
    with device.on(side):
        layer.running_mean.sum()
    with pytest.raises(RaceError, match="batch_norm"):
        layer(x)


def test_threads_play_the_device_of_the_one_that_starts_them(device):
    made, faults = on_device(device, 3), []

    def beside():
        device.use()
        with device.on(device.stream()):
            try:
                made.add_(1)
            except RaceError as error:
                faults.append(error)

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    assert len(faults) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda device, made: made + 1,
        lambda device, made: device.stream(),
        lambda device, made: device.pinned((3,), torch.float32),
        lambda device, made: device.event().record(),
        lambda device, made: device.current_stream().synchronize(),
        lambda device, made: device.to_host(made),
    ],
)
def test_a_new_thread_makes_the_device_its_own_first(device, call):
    """On CUDA a thread begins on device 0, whichever its process computes on."""
    made, faults = on_device(device, 3), []

    def beside():
        try:
            call(device, made)
        except ThreadError as error:
            faults.append(str(error))
        device.use()
        call(device, made)

    thread = threading.Thread(target=beside, name="forgetful")
    thread.start()
    thread.join()
    assert len(faults) == 1 and "expected the thread 'forgetful' to have called use()" in faults[0]


# Memory that is handed out again.


def copied_beside(device, *, lends, waits):
    """Use a tensor on another stream and let go of it; then ask for new memory."""
    side = device.stream()
    made = on_device(device, 3)
    side.wait_stream(device.current_stream())
    with device.on(side):
        made.sum()
    if lends:
        device.keep_for_stream(made, side)
    del made
    if waits:
        device.current_stream().wait_stream(side)
    on_device(device, 3)


@pytest.mark.parametrize(("lends", "waits"), [(True, False), (False, True), (True, True)])
def test_memory_that_was_lent_or_waited_for_may_be_let_go(device, lends, waits):
    copied_beside(device, lends=lends, waits=waits)
    assert device.tracker.faults == []


def test_memory_that_another_stream_reads_is_not_handed_out(device):
    with pytest.raises(ReuseError, match="lend it") as caught:
        copied_beside(device, lends=False, waits=False)
    assert "sum at tests/simulated/test_tracker.py" in str(caught.value)


def test_memory_of_a_side_stream_used_by_the_main_one(device):
    """What is made on a side stream returns to it: that of a fetch, while the compute reads it."""
    side = device.stream()
    with device.on(side):
        made = on_device(device, 3)
    device.current_stream().wait_stream(side)
    made.sum()
    del made
    with device.on(side), pytest.raises(ReuseError):
        on_device(device, 1)


def test_memory_lent_to_another_stream_than_its_reader(device):
    side, made = device.stream(), on_device(device, 3)
    side.wait_stream(device.current_stream())
    with device.on(side):
        made.sum()
    device.keep_for_stream(made, device.stream())
    del made
    with pytest.raises(ReuseError):
        on_device(device, 3)


@pytest.mark.parametrize("has_waited", [True, False])
def test_memory_lent_to_a_stream_that_has_waited_for_its_reader(device, has_waited):
    """Its owner waits for that stream, and so for all that this one has waited for."""
    side, third, made = device.stream(), device.stream(), on_device(device, 3)
    side.wait_stream(device.current_stream())
    with device.on(side):
        made.sum()
    if has_waited:
        third.wait_stream(side)
    device.keep_for_stream(made, third)
    del made
    if has_waited:
        on_device(device, 3)
        return
    third.wait_stream(side)  # too late
    with pytest.raises(ReuseError):
        on_device(device, 3)


def test_a_view_keeps_memory(device):
    made, side = on_device(device, 3), device.stream()
    side.wait_stream(device.current_stream())
    with device.on(side):
        made.sum()
    view = made[1:]
    del made
    on_device(device, 3)
    del view
    with pytest.raises(ReuseError):
        on_device(device, 3)


def test_memory_is_counted(device):
    before = device.memory_allocated()
    made = on_device(device, 256)
    assert device.memory_allocated() - before == 1024
    del made
    assert device.memory_allocated() == before
    assert device.memory_peak() >= before + 1024


# Pinned memory.


def test_pinned_memory_read_before_the_copy_has_come(device):
    pinned = device.pinned((3,), torch.float32)
    device.copy_to_host(pinned, on_device(device, 3))
    with pytest.raises(PinnedError, match="tolist"):
        pinned.tolist()


@pytest.mark.parametrize("how", ["synchronize", "event", "query"])
def test_pinned_memory_read_behind_an_event(device, how):
    pinned = device.pinned((3,), torch.float32)
    device.copy_to_host(pinned, on_device(device, 3))
    event = device.current_stream().record_event()
    if how == "synchronize":
        device.synchronize()
    elif how == "event":
        event.synchronize()
    else:
        assert not event.query()
        assert event.query()
    assert pinned.tolist() == [1.0, 1.0, 1.0]


def test_pinned_memory_written_again_before_its_copy_is_done(device):
    pinned = device.pinned((3,), torch.float32)
    pinned.fill_(1.0)
    device.copy_to_device(device.empty((3,), torch.float32), pinned)
    with pytest.raises(PinnedError, match=r"fill_.*reads it"):
        pinned.fill_(2.0)
    device.current_stream().record_event().synchronize()
    pinned.fill_(2.0)


def test_pinned_memory_filled_twice_without_order(device):
    pinned, side = device.pinned((3,), torch.float32), device.stream()
    first, second = on_device(device, 3), on_device(device, 3)
    device.copy_to_host(pinned, first)
    side.wait_event(device.event())
    with device.on(side), pytest.raises(RaceError):
        device.copy_to_host(pinned, second)


def test_a_move_to_the_host_that_does_not_wait_is_not_there_yet(device):
    """`tensor.to("cpu", non_blocking=True)` gives pinned memory that is still being written."""
    moved = on_device(device, 3).to("cpu", non_blocking=True)
    with pytest.raises(PinnedError):
        moved.sum()


# Where tensors are.


@pytest.mark.parametrize(
    "operation",
    [
        lambda own, host: own + host,
        lambda own, host: own.add_(host),
        lambda own, host: host.add_(own),
        lambda own, host: torch.cat([own, host]),
        lambda own, host: torch.stack([own[0], torch.tensor(1.0)]),
        lambda own, host: F.linear(own, host.expand(2, 3)),
        lambda own, host: torch._foreach_add_([own], [host]),
        lambda own, host: torch._foreach_mul_([own], torch.tensor(2.0)),
        lambda own, host: own.copy_(own + torch.zeros(3)),
        lambda own, host: torch.where(host > 0, own, own),
        lambda own, host: own.numpy(),
    ],
)
def test_tensors_of_host_and_device_do_not_mix(device, operation):
    with pytest.raises(PlaceError):
        operation(on_device(device, 3), torch.ones(3))


def test_numbers_of_the_host_mix_with_tensors_of_the_device(device):
    own, number = on_device(device, 3), torch.tensor(2.0)
    own * number + 1.0
    own.mul_(number).fill_(number).masked_fill_(own > 0, number)
    torch.where(own > 0, own, number)
    own[1] = 3.0
    torch._foreach_mul_([own], 2.0)
    assert waits_of(device) == []


def test_where_tensors_are_is_told(device):
    host, own = torch.ones(3), on_device(device, 3)
    assert host.device == torch.device("cpu") and own.device == device.torch
    assert not device.holds(host) and device.holds(own)
    made = [own + 1, own.new_zeros(2), torch.zeros_like(own), torch.empty(2, device=own.device)]
    made += [
        own.clone(),
        own.to(torch.float64),
        own[own.long()[:1]],
        own.sum(),
        own.requires_grad_(),
    ]
    assert all(device.holds(tensor) for tensor in made)
    of_host = [host + 1, host.new_zeros(2), torch.zeros_like(host), torch.tensor([1.0]), host.sum()]
    of_host += [torch.zeros_like(own, device="cpu"), own.new_zeros(1, device="cpu"), own.cpu()]
    assert not any(device.holds(tensor) for tensor in of_host)


def test_moves_move(device):
    host = torch.arange(3.0)
    own = device.to_device(host)
    assert (
        device.holds(own)
        and own.data_ptr() != host.data_ptr()
        and torch.equal(host, device.to_host(own))
    )
    assert device.to_device(own) is own and host.to("cpu") is host
    half = host.to(device.torch, torch.float16)
    assert half.dtype is torch.float16 and device.holds(half)
    assert device.holds(torch.tensor([1.0], device=device.torch))
    assert device.holds(torch.as_tensor(host, device=device.torch))


def test_modules_move(device):
    layer = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(device.torch)
    assert all(device.holds(each) for each in (*layer.parameters(), *layer.buffers()))
    loss = layer(on_device(device, 4, 3)).square().sum()
    loss.backward()
    assert all(device.holds(each.grad) for each in layer.parameters())
    assert waits_of(device) == ["_to_copy to the device"] * 7


def test_sparse_gradients_are_of_the_device(device):
    table = nn.Embedding(5, 2, sparse=True).to(device.torch)
    table(torch.tensor([1, 2], device=device.torch)).sum().backward()
    assert device.holds(table.weight.grad)
    with device.on(device.stream()), pytest.raises(RaceError):
        table.weight.grad.to_dense()


# What the host waits for.


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (lambda t: t.sum().item(), "_local_scalar_dense"),
        (lambda t: float(t[0]), "_local_scalar_dense"),
        (lambda t: bool(t[0] > 0), "_local_scalar_dense"),
        (lambda t: t.tolist(), "tolist"),
        (lambda t: t.nonzero(), "nonzero"),
        (lambda t: t[t > 0], "index"),
        (lambda t: t.masked_select(t > 0), "masked_select"),
        (lambda t: t.cpu(), "_to_copy to the host"),
        (lambda t: t.to("cpu"), "_to_copy to the host"),
        (lambda t: torch.zeros(3).copy_(t), "copy_ to the host"),
        (lambda t: torch.equal(t, t + 1), "equal"),
        (lambda t: t.unique(), "_unique2"),
        (lambda t: t.numpy(force=True), "numpy"),
        (lambda t: t.repeat_interleave(t.long()), "repeat_interleave"),
        (lambda t: t.to(t.device).add(torch.ones(3).to(t.device)), "_to_copy to the device"),
        (lambda t: t.add(torch.tensor([1.0, 2.0, 3.0], device=t.device)), "_to_copy to the device"),
        (lambda t: t[torch.tensor([0, 1])], "index"),
        # Copies from the host that no name of a move gives away.
        (lambda t: t.new_tensor([1.0, 2.0]), "_to_copy to the device"),
        (lambda t: t.new_tensor(1.0), "_to_copy to the device"),
        (lambda t: torch.as_tensor([1.0], device=t.device), "_to_copy to the device"),
        (lambda t: torch.as_tensor(torch.ones(2), device=t.device), "_to_copy to the device"),
        (lambda t: torch.asarray([1.0], device=t.device), "_to_copy to the device"),
        (lambda t: torch.asarray(torch.ones(2), device=t.device), "_to_copy to the device"),
        (lambda t: torch.tensor(1.0, device=t.device), "_to_copy to the device"),
        (lambda t: torch.ones(2).type_as(t), "_to_copy to the device"),
        (lambda t: torch.ones(2).to(t), "_to_copy to the device"),
        (lambda t: t.copy_(torch.ones(3)), "copy_ to the device"),
        (lambda t: t[[0, 2]], "index"),
        (lambda t: t.__setitem__([0, 2], 1.0), "index_put_"),
        (lambda t: t.__setitem__(t.long(), torch.tensor(1.0)), "index_put_"),
        (lambda t: torch._foreach_copy_([t], [torch.ones(3)]), "_foreach_copy_"),
    ],
)
def test_host_reads_are_counted_and_located(device, read, expected):
    own = on_device(device, 3)
    assert waits_of(device) == []
    read(own)
    places = [str(wait.where) for wait in device.host_waits]
    assert expected in waits_of(device)
    assert all(place.startswith("tests/simulated/test_tracker.py:") for place in places)


def test_what_needs_no_value_waits_for_nothing(device):
    own, index = on_device(device, 3), torch.tensor([0, 1], device=device.torch)
    waits_of(device)
    own[index], own.sum(), own > 0, own.masked_fill(own > 0, 0.0), own.shape, own.numel()
    own.repeat_interleave(torch.ones_like(own).long(), output_size=3)
    own[own > 5] = torch.tensor(1.0)
    pinned = device.pinned((3,), torch.float32).fill_(1.0)
    device.to_device(pinned, non_blocking=True)
    device.copy_to_host(pinned, own)
    torch.full((2,), 3.0, device=device.torch)
    torch.scalar_tensor(3.0, device=device.torch)
    own[index] = 2.0
    own[0] = 2.0
    own[own > 5] = 3.0
    torch.where(own > 0, own, 5.0), own.clamp(0.0, 1.0), own + 2, own.fill_(torch.tensor(1.0))
    own.new_zeros(3), own.new_full((3,), 1.0), torch.arange(3, device=device.torch)
    assert waits_of(device) == []


def test_a_read_orders_the_host_and_all_that_it_launches(device):
    made, side = on_device(device, 3), device.stream()
    made.sum().item()
    with device.on(side):
        made + 1
    assert device.tracker.faults == []


def test_a_host_read_races_too(device):
    side = device.stream()
    side.wait_stream(device.current_stream())
    with device.on(side):
        made = on_device(device, 3)
    with pytest.raises(RaceError):
        made.tolist()


# What time it was.


@pytest.mark.parametrize("is_recorded", [True, False])
def test_marks_that_are_not_done_have_no_time(device, is_recorded):
    first, last = device.event(timing=True), device.event(timing=True)
    first.record()
    on_device(device, 3)
    if is_recorded:
        last.record()
    with pytest.raises(EventError, match=r"not waited for|never recorded"):
        first.elapsed_ms(last)
    last.record()
    last.synchronize()
    assert first.elapsed_ms(last) > 0


# What is right stays silent.


def test_training_on_one_stream_is_in_order(device):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1), nn.Linear(4, 1))
    layer.to(device.torch)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, foreach=True)
    x = on_device(device, 8, 3)
    waits_of(device)
    for _ in range(3):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
        optimizer.step()
    assert device.tracker.faults == []
    assert device.tracker.num_works > 100


def test_copies_beside_compute_in_order(device):
    """Out beside compute, and back ahead of its use."""
    side, kept = device.stream(), on_device(device, 64).mul_(2)
    side.wait_stream(device.current_stream())
    pinned = device.pinned((64,), torch.float32)
    with device.on(side):
        device.copy_to_host(pinned, kept)
    device.keep_for_stream(kept, side)
    del kept
    for _ in range(3):
        on_device(device, 64).exp_()
    side.wait_stream(device.current_stream())
    with device.on(side):
        back = device.empty((64,), torch.float32)
        device.copy_to_device(back, pinned)
        is_here = side.record_event()
    current = device.current_stream()
    current.wait_event(is_here)
    device.keep_for_stream(back, current)
    back.sum()
    del back, pinned
    with device.on(side):
        on_device(device, 64)
    assert device.tracker.faults == []


# Backwards run on a thread of the device's own.


class Noting(torch.autograd.Function):
    """Notes on which thread its backward runs, and whether the caller's locals are there."""

    @staticmethod
    def forward(ctx, given, note):
        ctx.note = note
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.note(gradient)
        return gradient, None


def backward_noting(device, note):
    weight = nn.Parameter(on_device(device, 3))
    weight.register_post_accumulate_grad_hook(note)
    Noting.apply(weight * 2, note).sum().backward()
    return weight


def test_a_backward_and_its_hooks_run_on_another_thread(device):
    """On a CPU they run on the caller's: what they keep for a thread would be found there."""
    own, found = threading.local(), []
    own.value = 1
    backward_noting(device, lambda _: found.append((threading.get_ident(), hasattr(own, "value"))))
    backward_noting(device, lambda _: found.append((threading.get_ident(), False)))
    assert len(found) == 4 and len(set(found)) == 1, "one thread for all backwards"
    assert found[0] != (threading.get_ident(), True) and not found[0][1]


def test_a_hook_works_on_the_stream_of_the_caller(device):
    side, found = device.stream(), []
    with device.on(side):
        backward_noting(device, lambda _: found.append(device.current_stream()))
    assert found == [side, side]


def test_what_a_hook_waits_for_the_caller_waits_for(device):
    backward_noting(device, lambda gradient: [gradient.sum().item()].clear())
    waits = [wait for wait in device.host_waits if wait.operator == "_local_scalar_dense"]
    assert [wait.thread for wait in waits] == [threading.get_ident()] * 2


def test_what_a_hook_raises_comes_back(device):
    def fail(_):
        raise KeyError("hook")

    with pytest.raises(KeyError, match="hook"):
        backward_noting(device, fail)
    assert backward_noting(device, lambda _: None).grad is not None


def test_a_backward_within_a_backward_goes_on(device):
    weight, found = nn.Parameter(on_device(device, 3)), []

    def again(_):
        other = nn.Parameter(on_device(device, 2))
        with torch.enable_grad():
            (other * 3).sum().backward()
        found.append(other.grad.tolist())

    backward_noting(device, again)
    assert found == [[3.0, 3.0]] * 2 and weight.grad is None


def test_a_hook_that_uses_a_lock_of_the_caller_would_wait_for_ever(device):
    """A lock that its owner may take again is no lock of the hook's: it is found, not hung on."""
    lock, taken = threading.RLock(), []
    with lock:
        backward_noting(device, lambda _: taken.append(lock.acquire(timeout=0.01)))
    assert taken == [False, False]


def test_what_the_engine_does_is_ordered_behind_what_the_caller_waited_for(device):
    made, side = on_device(device, 3), device.stream()
    with device.on(side):
        other = on_device(device, 3)
    side.synchronize()
    weight = nn.Parameter(made)
    weight.register_post_accumulate_grad_hook(lambda p: [p.grad.add_(other)].clear())
    (weight * 2).sum().backward()
    assert weight.grad.tolist() == [3.0] * 3


# Tensors of another device.


def test_a_tensor_of_another_device_is_none_of_ours(device):
    own = on_device(device, 3)
    other = own.to(OTHER)
    assert other.device == OTHER and other.device != own.device
    assert device.is_astray(other) and not device.holds(other)
    assert not device.is_astray(own) and not device.is_astray(torch.ones(2))
    assert (other * 2).device == OTHER
    with pytest.raises(PlaceError):
        own + other
    assert device.holds(other.to(own.device))
