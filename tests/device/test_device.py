"""The two devices of the package: what the CPU does, and what is asked of torch's accelerator."""

import importlib
import os
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpipe_hpc.device import device as device_module
from gpipe_hpc.device.device import (
    NEEDED,
    OF_MEMORY,
    Accelerator,
    Device,
    HostDevice,
    known_backends,
    maker_name,
    name_here,
    refuse_old_torch,
)
from gpipe_hpc.device.host.machine import processor_name
from gpipe_hpc.errors import ConfigError


class Played:
    """torch's streams and events as far as the accelerator uses them: who did what, in order."""

    def __init__(self):
        self.log = []
        self.current = threading.local()
        outer = self

        class Event:
            def __init__(self, device, enable_timing=False):
                self.device, self.at = device, None

            def record(self, stream):
                outer.log.append(("record", stream.name))

            def wait(self, stream):
                outer.log.append(("wait", stream.name))

            def elapsed_time(self, other):
                return 2.5

        class Stream:
            def __init__(self, device, name="side"):
                self.device, self.name = device, name

            def wait_event(self, event):
                outer.log.append(("wait_event", self.name))

            def wait_stream(self, other):
                outer.log.append(("wait_stream", self.name, other.name))

        self.Event, self.Stream = Event, Stream
        self.main = Stream(torch.device("cuda", 1), "main")

    def current_stream(self, device):
        return getattr(self.current, "stream", self.main)

    def set_stream(self, stream):
        self.current.stream = stream


@pytest.fixture
def played(monkeypatch):
    played = Played()
    monkeypatch.setattr(torch, "Event", played.Event)
    monkeypatch.setattr(torch, "Stream", played.Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", played.current_stream)
    monkeypatch.setattr(torch.accelerator, "set_stream", played.set_stream)
    return played


def cuda() -> Accelerator:
    return Accelerator(torch.device("cuda", 1))


def test_both_are_devices():
    devices: list[Device] = [HostDevice(), cuda()]
    assert [each.type for each in devices] == ["cpu", "cuda"]
    assert [each.is_accelerator for each in devices] == [False, True]


def test_the_backend_is_that_of_torchs_own_table():
    assert HostDevice().backend == "gloo"
    assert cuda().backend == "nccl"
    assert Accelerator(torch.device("xpu", 0)).backend == "xccl"


def test_the_backend_of_torchs_tests_is_no_devices():
    """It was listed among those to choose from, and taken for a kind that had no other."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")
    assert "fake" not in known_backends()
    assert Accelerator(torch.device("hpu", 0)).backend == "gloo"


def test_a_block_puts_the_stream_back_whatever_happens(played):
    device = cuda()
    side = device.stream()
    with pytest.raises(KeyError), device.on(side):
        device.event().record()
        raise KeyError
    device.event().record()
    assert played.log == [("record", "side"), ("record", "main")]


def test_two_threads_are_on_one_stream_at_a_time(played):
    """torch's own block keeps what was before in the stream: a second thread may not enter it."""
    device = cuda()
    side, found = device.stream(), []

    def other():
        with device.on(side):
            found.append(torch.accelerator.current_stream(device.torch).name)
        found.append(torch.accelerator.current_stream(device.torch).name)

    with device.on(side):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        device.event().record()
    assert found == ["side", "main"]
    assert played.log == [("record", "side")]


def test_waits_name_the_streams_that_wait(played):
    device = cuda()
    side = device.stream()
    mark = side.record_event()
    side.wait_stream(device.current_stream())
    device.current_stream().wait_event(mark)
    assert played.log == [
        ("record", "side"),
        ("wait_stream", "side", "main"),
        ("wait_event", "main"),
    ]
    assert mark.elapsed_ms(side.record_event()) == 2.5


def test_memory_is_lent_to_the_stream(played):
    lent = []

    class Tensor:
        def record_stream(self, stream):
            lent.append(stream)

    device = cuda()
    side = device.stream()
    device.keep_for_stream(Tensor(), side)
    assert lent == [side.torch]


def test_free_memory_is_what_nobody_has_and_what_the_allocator_keeps(monkeypatch):
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: 20)
    assert cuda().memory_free() == 130
    assert cuda().memory_total() == 1000


def test_an_old_torch_is_refused_by_the_names_of_what_it_lacks(monkeypatch):
    """Before, torch 2.9 failed at the first report of memory, in the first step."""
    refuse_old_torch("cuda")
    monkeypatch.delattr(torch.accelerator, "get_memory_info")
    refuse_old_torch("cuda")  # torch.cuda has it
    monkeypatch.delattr(torch.cuda, "mem_get_info")
    monkeypatch.delattr(torch, "Stream")
    told = r"needs torch.Stream, torch.accelerator.get_memory_info, which .*; use torch 2.10"
    with pytest.raises(ConfigError, match=told):
        refuse_old_torch("cuda")


def test_before_torch_2_9_the_module_of_the_kind_tells_of_memory(monkeypatch):
    for name, own in OF_MEMORY.items():
        monkeypatch.delattr(torch.accelerator, name)
        monkeypatch.setattr(torch.cuda, own, lambda *device, name=name: (name, *device))
    device = cuda()
    assert device._memory_info() == ("get_memory_info", device.torch)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    assert (device.memory_reserved(), device.memory_allocated()) == (50, 20)
    assert device.memory_peak() == 30
    assert (device.memory_free(), device.memory_total()) == (130, 1000)
    device.reset_peak()
    device.trim()


def test_all_that_is_asked_of_torch_is_looked_for():
    text = Path(device_module.__file__).read_text()
    used = set(re.findall(r"torch\.(accelerator\.\w+|Event|Stream|get_device_module)\(", text))
    assert used == set(NEEDED)
    assert set(re.findall(r'_of_memory\("(\w+)"\)', text)) == set(OF_MEMORY)


def test_generators_are_the_cpus_and_the_devices(monkeypatch):
    fake = type("module", (), {"default_generators": ("a", "b", "c")})
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    assert cuda().generators() == [torch.default_generator, "b"]
    assert HostDevice().generators() == [torch.default_generator]


def test_generators_are_there_before_anything_was_done(monkeypatch):
    """torch makes them with the first use of the device; an empty tuple has no second one."""
    fake = SimpleNamespace(default_generators=())
    fake.init = lambda: setattr(fake, "default_generators", ("a", "b"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    assert cuda().generators() == [torch.default_generator, "b"]
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    with pytest.raises(ConfigError, match="has no default_generators, which are needed"):
        cuda().generators()


def test_a_kind_that_does_not_tell_of_its_memory_has_no_limit(monkeypatch):
    def refuse(device):
        raise NotImplementedError("get_memory_info")

    monkeypatch.setattr(torch.accelerator, "get_memory_info", refuse)
    assert cuda().memory_total() is None and cuda().memory_free() is None


@pytest.mark.parametrize(
    ("told", "capability", "expected"),
    [
        (None, (9, 0), 2 * 33_554_432),  # as allocated on an H200 beside all that was counted
        (None, (8, 0), 2 * 8_519_680),
        (":4096:2:16:8", (9, 0), 2 * 8_519_680),
        (":16:8", (8, 0), 2 * 131_072),
        ("nonsense", (9, 0), 2 * 33_554_432),
        ("4096:2", (9, 0), 2 * 33_554_432),  # without a colon in front torch takes its own
    ],
)
def test_cublas_has_a_workspace_for_forwards_and_one_for_backwards(
    monkeypatch, told, capability, expected
):
    """The peak of a step was 67 MB above the plan on the first GPU that told."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if told is not None:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", told)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert Accelerator(torch.device("cuda", 0)).library_bytes == expected


def test_other_libraries_are_not_known(monkeypatch):
    assert Accelerator(torch.device("xpu", 0)).library_bytes == 0
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert Accelerator(torch.device("cuda", 0)).library_bytes == 0


def test_the_name_is_its_makers(monkeypatch):
    named = type("module", (), {"get_device_name": staticmethod(lambda index: f"H100 {index}")})
    monkeypatch.setattr(torch, "get_device_module", lambda device: named)
    assert cuda().name == "H100 1"
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    assert cuda().name == "cuda"


def test_a_machine_without_a_kind_of_device_has_no_name_for_it(monkeypatch):
    assert name_here(HostDevice()) == maker_name(HostDevice()) == processor_name()
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert name_here(cuda()) is None
    found = torch.device("cuda")
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace())
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    assert name_here(cuda()) == cuda().name


@pytest.mark.parametrize(
    ("device", "error", "is_it"),
    [
        (cuda(), torch.OutOfMemoryError("Tried to allocate 2 GiB"), True),
        (cuda(), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), True),
        (cuda(), torch.AcceleratorError("CUDA error: out of memory"), True),
        (cuda(), RuntimeError("shapes cannot be multiplied"), False),
        (cuda(), ValueError("out of memory"), False),
        (HostDevice(), MemoryError(), True),
        (HostDevice(), RuntimeError("shapes cannot be multiplied"), False),
    ],
)
def test_what_says_that_memory_ran_out(device, error, is_it):
    assert device.out_of_memory(error) is is_it


def test_the_cpus_own_refusal_is_known():
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert HostDevice().out_of_memory(refused.value)


def test_the_cpu_tells_times_and_keeps_order():
    device = HostDevice()
    first, later = device.event(timing=True), device.event(timing=True)
    first.record()
    later.record(device.stream())
    assert 0 <= first.elapsed_ms(later) < 60_000
    with device.on(device.stream()):
        tensor = device.to_device(torch.arange(3.0), non_blocking=True)
    into = device.pinned((3,), torch.float32)
    device.copy_to_host(into, tensor)
    assert into.tolist() == [0.0, 1.0, 2.0]
    assert device.holds(device.empty((2,), torch.int8))


def test_the_cpu_knows_its_process():
    device = HostDevice()
    used = device.memory_allocated()
    assert device.memory_peak() + 2**20 >= used > 2**20
    assert device.memory_total() is None
    free = device.memory_free()
    assert free is None or free > 0


@pytest.mark.parametrize("device", [HostDevice(), cuda()])
def test_deterministic_settings_are_put_back(device, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    with pytest.raises(KeyError), device.deterministic():
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
        with pytest.raises(RuntimeError, match="deterministic"):
            torch.empty(2, 2).put_(torch.tensor([0]), torch.tensor([1.0]), accumulate=False)
        raise KeyError
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == device.is_accelerator
