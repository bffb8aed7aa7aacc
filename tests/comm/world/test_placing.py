"""Which device a rank takes, and that no two ranks take one, on a machine that has others."""

import ctypes
import threading
from types import SimpleNamespace
from uuid import UUID

import pytest
import torch
import torch.distributed as dist

from gpipe_hpc.comm.collectives.group import PeerTensor
from gpipe_hpc.comm.world import start as starting
from gpipe_hpc.comm.world.claim import claim_device
from gpipe_hpc.comm.world.start import _backend, start_world
from gpipe_hpc.comm.world.world import collective_errors
from gpipe_hpc.config.commands import exit_code_of
from gpipe_hpc.device import device as devices
from gpipe_hpc.device.device import Accelerator, HostDevice, device_of_rank
from gpipe_hpc.errors import ConfigError, GpipeError, PeerError


class Machine:
    """What torch tells of the accelerators that one process sees, by their UUIDs."""

    def __init__(self, monkeypatch, kind, seen):
        self.seen, self.used, self.woken = seen, [], []
        here = torch.device(kind) if seen else None
        told = {
            "current_accelerator": lambda check_available=False: here,
            "device_count": lambda: len(self.seen),
            "current_device_index": lambda: 0,
            "set_device_index": self.used.append,
        }
        for name, answer in told.items():
            monkeypatch.setattr(torch.accelerator, name, answer)
        monkeypatch.setattr(devices, "wake_backward", self.woken.append)
        module = SimpleNamespace(
            get_device_properties=lambda index: SimpleNamespace(uuid=seen[index]),
            get_device_name=lambda index: "H100",
        )
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)


def claimed(monkeypatch, views, name="auto", backend="cpu:gloo,cuda:nccl"):
    """Let ranks that see these devices take theirs; return the indices, or raise what one says."""
    store = dist.HashStore()
    found = []
    for rank, seen in enumerate(views):
        Machine(monkeypatch, "cuda", seen)
        device = device_of_rank(name, rank)
        claim_device(store, device, rank, name, backend)
        found.append(device.torch.index)
    return found


def test_each_rank_takes_the_device_of_its_local_rank(monkeypatch):
    assert claimed(monkeypatch, [["a", "b", "c", "d"]] * 4) == [0, 1, 2, 3]


def test_a_launcher_that_shows_each_rank_its_own_alone_is_right(monkeypatch):
    """Rank 3 with one visible device: by counts it would be one of four ranks on one device."""
    assert claimed(monkeypatch, [["a"], ["b"], ["c"], ["d"]]) == [0, 0, 0, 0]
    assert claimed(monkeypatch, [["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]]) == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("views", "first", "second"),
    [
        ([["a", "b"]] * 3, 0, 2),
        ([["a"]] * 2, 0, 1),
        ([["a"], ["b"], ["b"]], 1, 2),  # hidden, but two are shown the same one
    ],
)
def test_more_ranks_than_devices_are_refused_by_name(monkeypatch, views, first, second):
    """Before, local rank 2 of two devices took the first again, and nobody said so."""
    told = rf"ranks {first} and {second} use the same device.*; start at most as many ranks"
    with pytest.raises(ConfigError, match=told):
        claimed(monkeypatch, views)


def test_a_device_is_shared_by_who_names_it(monkeypatch):
    assert claimed(monkeypatch, [["a", "b"]] * 3, "cuda:1", "gloo") == [1, 1, 1]
    with pytest.raises(ConfigError, match="ranks 0 and 1 use the same"):  # NCCL takes none twice
        claimed(monkeypatch, [["a", "b"]] * 2, "cuda:1")


def test_who_started_the_ranks_has_chosen_their_devices(monkeypatch):
    machine = Machine(monkeypatch, "cuda", ["a", "b"])
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert device_of_rank("auto", None) == Accelerator(torch.device("cuda", 1))
    assert machine.used == [torch.device("cuda", 1)]


def test_auto_is_the_cpu_where_there_is_no_other(monkeypatch):
    Machine(monkeypatch, "cuda", [])
    assert isinstance(device_of_rank("auto", 3), HostDevice)
    assert isinstance(device_of_rank("cpu", 3), HostDevice)


def test_apples_device_is_left_alone(monkeypatch):
    """It has no float64: the first sum of a loss would fail."""
    Machine(monkeypatch, "mps", ["a"])
    assert isinstance(device_of_rank("auto", 0), HostDevice)
    with pytest.raises(ConfigError, match=r"train.device=mps is not supported: .* float64"):
        device_of_rank("mps", 0)


@pytest.mark.parametrize("kind", ["cuda", "xpu", "hpu", "privateuseone"])
def test_any_kind_that_torch_sees_is_taken(monkeypatch, kind):
    machine = Machine(monkeypatch, kind, ["a", "b"])
    assert device_of_rank("auto", 1).torch == torch.device(kind, 1)
    assert device_of_rank(kind, 1).torch == torch.device(kind, 1)
    assert machine.woken == [Accelerator(torch.device(kind, 1))] * 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("gpu", r"expected auto, cpu, cuda \(NVIDIA and AMD\), xpu .*, got 'gpu'"),
        ("meta", "got 'meta'"),
        (
            "xpu",
            "expected a device of type xpu, but torch finds cuda on this machine; "
            "use train.device=cpu",
        ),
        ("cuda:2", "expected one of the 2 cuda devices visible to this process, cuda:0 to cuda:1"),
    ],
)
def test_what_is_not_there_is_named(monkeypatch, name, says):
    Machine(monkeypatch, "cuda", ["a", "b"])
    with pytest.raises(ConfigError, match=says):
        device_of_rank(name, 0)


def test_without_an_accelerator_none_is_seen(monkeypatch):
    Machine(monkeypatch, "cuda", [])
    with pytest.raises(ConfigError, match="type cuda, but torch finds no accelerator"):
        device_of_rank("cuda", 0)


def test_two_that_claim_at_once_know_of_each_other():
    """The second asks who came first before that one has said so: it waits for the word."""

    class Named(HostDevice):
        is_accelerator, identity = True, "cuda a"

    store, told = dist.HashStore(), []

    def claim(rank):
        try:
            claim_device(store, Named(), rank, "auto", "cpu:gloo,cuda:nccl")
        except ConfigError as error:
            told.append(str(error))

    threads = [threading.Thread(target=claim, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(told) == 3 and len({text.split("ranks ")[1][0] for text in told}) == 1


def driver_of(*uuids, refuses=()):
    """Return NVIDIA's driver of a process that is shown devices, or slices, with these UUIDs."""

    def get(device, ordinal):
        device._obj.value = 100 + ordinal  # a handle is no number
        return 101 if "get" in refuses or ordinal >= len(uuids) else 0

    def uuid_of(uuid, device):
        uuid[:] = UUID(uuids[device.value - 100]).bytes
        return 0

    driver = SimpleNamespace(cuInit=lambda flags: int("init" in refuses), cuDeviceGet=get)
    if "uuid" not in refuses:
        driver.cuDeviceGetUuid_v2 = uuid_of
    return driver


SLICES = [str(UUID(int=number)) for number in (1, 2)]
WHOLE = str(UUID(int=9))


def claim_slices(monkeypatch, drivers, backend="gloo", name="NVIDIA A100 MIG 1g.5gb"):
    """Let ranks take the one slice, or device, that each is shown; return what each has taken.

    Torch tells the UUID of the whole.
    """
    store, taken = dist.HashStore(), []
    for rank, driver in enumerate(drivers):
        Machine(monkeypatch, "cuda", [WHOLE])
        torch.get_device_module(None).get_device_name = lambda index: name
        monkeypatch.setattr(ctypes, "CDLL", lambda path, driver=driver: driver)
        device = device_of_rank("auto", rank)
        claim_device(store, device, rank, "auto", backend)
        taken.append(device.identity)
    return taken


def test_slices_of_one_device_are_devices_of_their_own(monkeypatch):
    """Torch may tell all of them the UUID and the bus of the whole; the driver knows better."""
    taken = claim_slices(monkeypatch, [driver_of(each) for each in SLICES])
    assert taken == [f"cuda {uuid}" for uuid in SLICES]


def test_a_slice_is_taken_once(monkeypatch):
    """A process sees one slice alone, so two ranks that are shown two both take the first."""
    told = r"ranks 0 and 1 use the same .* expose one to each rank \(a process uses only the first"
    with pytest.raises(ConfigError, match=told):
        claim_slices(monkeypatch, [driver_of(SLICES[0])] * 2)


@pytest.mark.parametrize("shown", [("0", "0"), ("GPU-aa", "0"), ("MIG-aa", "MIG-a")])
def test_it_is_the_same_device_by_whatever_name_it_is_shown(monkeypatch, shown):
    """CUDA_VISIBLE_DEVICES takes numbers, UUIDs and beginnings of UUIDs."""
    identities = set()
    monkeypatch.setattr(ctypes, "CDLL", lambda path: driver_of(SLICES[0]))
    for name in shown:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", name)
        identities.add(Accelerator(torch.device("cuda", 0)).identity)
    assert identities == {f"cuda {SLICES[0]}"}


def test_the_driver_is_asked_for_the_device_of_this_number(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda path: driver_of(*SLICES))
    found = [Accelerator(torch.device("cuda", index)).identity for index in (0, 1)]
    assert found == [f"cuda {uuid}" for uuid in SLICES]


@pytest.mark.parametrize("refuses", ["init", "get", "uuid"])
def test_a_driver_that_does_not_tell_leaves_it_to_torch(monkeypatch, refuses):
    monkeypatch.setattr(ctypes, "CDLL", lambda path: driver_of(*SLICES, refuses=(refuses,)))
    assert identity_of(monkeypatch, SimpleNamespace(uuid=WHOLE)) == f"cuda {WHOLE}"


@pytest.mark.parametrize(
    ("backend", "name", "warns"),
    [
        ("cpu:gloo,cuda:nccl", "NVIDIA A100 MIG 1g.5gb", True),
        ("gloo", "NVIDIA A100 MIG 1g.5gb", False),
        ("cpu:gloo,cuda:nccl", "NVIDIA A100-SXM4-40GB", False),
    ],
)
def test_a_slice_under_nccl_is_warned_of(monkeypatch, caplog, backend, name, warns):
    """NCCL takes one rank for a device (NVIDIA/nccl, issue 1716): it may, one day, take slices."""
    claim_slices(monkeypatch, [driver_of(SLICES[0])], backend, name)
    told = [
        record.message
        for record in caplog.records
        if "is a partition of a device" in record.message
    ]
    assert bool(told) == warns and all(
        "set comm.backend=gloo, in a script backend=" in text for text in told
    )


def identity_of(monkeypatch, properties, env=()):
    module = SimpleNamespace(get_device_properties=lambda index: properties)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    for name, value in env:
        monkeypatch.setenv(name, value)
    return Accelerator(torch.device("cuda", 0)).identity


def test_a_device_is_known_by_what_its_maker_gave_it(monkeypatch):
    by_uuid = [identity_of(monkeypatch, SimpleNamespace(uuid=each)) for each in ("GPU-1", "GPU-2")]
    assert len(set(by_uuid)) == 2
    no_uuid = "00000000-0000-0000-0000-000000000000"
    by_bus = [
        identity_of(
            monkeypatch,
            SimpleNamespace(uuid=no_uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0),
        )
        for bus in (3, 4, 4)
    ]
    assert by_bus[0] != by_bus[1] == by_bus[2]


def test_a_device_that_tells_nothing_is_known_by_what_is_shown(monkeypatch):
    """An accelerator out of the tree: number 0 of what the launcher shows each rank alone."""
    shown = [
        identity_of(monkeypatch, SimpleNamespace(), [("ASCEND_RT_VISIBLE_DEVICES", each)])
        for each in ("0", "1", "1")
    ]
    assert shown[0] != shown[1] == shown[2]


@pytest.mark.parametrize(
    ("device", "name", "expected"),
    [
        (Accelerator(torch.device("cuda", 0)), "auto", "cpu:gloo,cuda:nccl"),
        (Accelerator(torch.device("cuda", 0)), "nccl", "cpu:gloo,cuda:nccl"),
        (Accelerator(torch.device("xpu", 0)), "auto", "cpu:gloo,xpu:xccl"),
        (Accelerator(torch.device("xpu", 0)), "gloo", "gloo"),
        (Accelerator(torch.device("ve", 0)), "auto", "gloo"),  # nobody has registered one
        (HostDevice(), "auto", "gloo"),
    ],
)
def test_the_backend_follows_the_device(monkeypatch, device, name, expected):
    monkeypatch.setattr(dist, "is_backend_available", lambda backend: True)
    assert _backend(name, device) == expected


def test_a_backend_of_another_device_is_refused():
    with pytest.raises(ConfigError, match=r"torch's backend for xpu devices \(xccl\), got 'nccl'"):
        _backend("nccl", Accelerator(torch.device("xpu", 0)))
    with pytest.raises(ConfigError, match=r"torch's backend for cpu devices \(gloo\), got 'nccl'"):
        _backend("nccl", HostDevice())


def test_a_process_alone_refuses_it_too(monkeypatch):
    """One process trained on, and said nothing of the backend that it has not."""
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match=r"torch's backend for cpu devices \(gloo\), got 'nccl'"):
        start_world(device="cpu", backend="nccl")


def test_a_torch_without_the_backend_says_what_goes():
    with pytest.raises(ConfigError, match=r"built without xccl, .* use comm.backend=gloo"):
        _backend("auto", Accelerator(torch.device("xpu", 0)))


class Elsewhere(HostDevice):
    """A device that Gloo knows nothing of, though its memory is the host's."""

    is_accelerator, type, identity = True, "xpu", "xpu a"

    def holds(self, tensor):
        return not hasattr(tensor, "is_fetched")

    def to_host(self, tensor):
        fetched = tensor.clone()
        fetched.is_fetched = True
        return fetched


def test_all_ranks_stop_with_the_report_of_the_one_whose_device_is_taken(processes, tmp_path):
    def body(rank):
        starting.device_of_rank = lambda name, local_rank: Elsewhere()
        try:
            world = start_world(timeout_s=30)
            with collective_errors(world, "the first step"):
                world.world_group.all_gather_object(rank)
        except GpipeError as error:
            return type(error), exit_code_of(error), str(error)
        return None

    told = processes(2, body, tmp_path)
    assert {kind for kind, _, _ in told} == {ConfigError, PeerError}
    assert {code for _, code, _ in told} == {2}, "one refusal, one code"
    assert all("start at most as many ranks on a machine as it has devices" in t for *_, t in told)


def test_a_backend_that_knows_nothing_of_a_device_is_given_the_hosts_memory(processes, tmp_path):
    """Gloo takes tensors of the CPU and of CUDA alone; an accelerator over it had no way."""

    def body(rank):
        starting.device_of_rank = lambda name, local_rank: Elsewhere()
        world = start_world(device="xpu:0", timeout_s=30)
        group = world.world_group
        total, largest = torch.tensor([1.0 + rank]), torch.tensor([1.0 + rank])
        pending = group.start_all_reduce(total)
        before = total.item()
        pending.wait()
        group.all_reduce_max(largest)
        word = torch.tensor([7.0 * rank])
        group.broadcast(word, 1)
        own, came = torch.tensor([float(rank)]), torch.empty(1)
        group.start_exchange([PeerTensor(1 - rank, own)], [PeerTensor(1 - rank, came)]).wait()
        return before, total.item(), largest.item(), word.item(), came.item()

    assert processes(2, body, tmp_path) == [(1, 3, 2, 7, 1), (2, 3, 2, 7, 0)]
