"""Part: description of the machine, and whether the requirements of other parts are installed."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

from experiments.gpu.devices import the_device
from experiments.gpu.running import Findings, enter, options, timed
from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.loss import power_near_inverse
from gpipe_hpc.planner.costs.device_peaks import peak_flops_per_s

PACKAGES: Final = (
    *("torch", "triton", "numpy", "hydra-core", "omegaconf", "pytest", "pytest-timeout"),
    *("hypothesis", "pillow", "rich", "tensorboard", "fairscale"),
)


def main() -> None:
    args = options(__doc__).parse_args()
    enter()
    findings = Findings(args.found)
    findings.add("packages", {name: version(name) for name in PACKAGES})
    findings.add("python", platform.python_version())
    findings.add("system", f"{platform.system()} {platform.release()} {platform.machine()}")
    findings.add("cores", len(os.sched_getaffinity(0)))
    findings.add("compiler", shutil.which("gcc") or shutil.which("cc"))
    with findings.attempt("driver"):
        findings.add("driver", smi())
    with findings.attempt("build"):
        findings.add("build", build())
    device = the_device(args.device)
    findings.add("device", {"name": device.name, "type": device.type, "backend": device.backend})
    findings.add("devices", torch.accelerator.device_count() if device.is_accelerator else 0)
    with findings.attempt("identity"):
        findings.add("identity", device.identity)
    for name in ("memory_total", "memory_free", "memory_allocated", "memory_reserved"):
        with findings.attempt(name):
            findings.add(name, getattr(device, name)())
    with findings.attempt("matrix"):
        findings.add("matrix", matrix_rates(device))
    with findings.attempt("copies"):
        findings.add("copies", copy_rates(device))
    with findings.attempt("one of everything"):
        findings.add("one of everything", one_of_everything(device))


def version(package: str) -> str | None:
    """Return the installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def smi() -> str:
    """Return the output of the driver's tool, one line per device."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "no nvidia-smi"
    query = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,temperature.gpu,power.draw"
    command = [tool, f"--query-gpu={query}", "--format=csv,noheader"]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=False
    ).stdout.strip()


def build() -> dict[str, Any]:
    """Return the build configuration of torch."""
    found: dict[str, Any] = {
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "backends": [
            name
            for name in ("gloo", "nccl", "xccl", "mpi")
            if dist.is_available() and dist.is_backend_available(name)
        ],
    }
    if dist.is_available() and dist.is_nccl_available() and torch.version.cuda:
        version_of: Any = torch.cuda.nccl.version
        found["nccl"] = str(version_of())
    return found


def matrix_rates(device: Device) -> dict[str, Any]:
    """Return FLOP/s of bfloat16 matmuls of random matrices, the median of 15 for each width."""
    found: dict[str, Any] = {"data_sheet": peak_flops_per_s(device.name, "bfloat16")}
    for width in (2048, 4096, 8192) if device.is_accelerator else (256,):
        pair = [device.to_device(torch.randn(width, width).to(torch.bfloat16)) for _ in "ab"]
        times = [timed(partial(torch.matmul, *pair), device.synchronize) for _ in range(20)]
        found[str(width)] = 2 * width**3 / statistics.median(times[5:])
    return found


def copy_rates(device: Device) -> dict[str, float]:
    """Return bytes per second between pinned memory and the device, and within the device."""
    nbytes = 2**28 if device.is_accelerator else 2**22
    pinned, own = (make([nbytes], torch.uint8) for make in (device.pinned, device.empty))
    other = device.empty([nbytes], torch.uint8)
    ways = {
        "to the device": lambda: device.copy_to_device(own, pinned),
        "to the host": lambda: device.copy_to_host(pinned, own),
        "within the device": lambda: other.copy_(own),
    }
    return {
        name: nbytes / statistics.median([timed(run, device.synchronize) for _ in range(8)][3:])
        for name, run in ways.items()
    }


def one_of_everything(device: Device) -> dict[str, str]:
    """Call each device function that the package uses once; return which fail, and how."""
    tensor = device.to_device(torch.arange(1024.0))
    pinned = device.pinned([1024], torch.float32)
    side = device.stream()

    def beside() -> str:
        """Copy on a side stream, ordered by events, as the package does."""
        made = device.event()
        made.record()
        with device.on(side):
            side.wait_event(made)
            device.copy_to_host(pinned, tensor)
            done = side.record_event()
        device.keep_for_stream(tensor, side)
        done.synchronize()
        assert torch.equal(pinned, torch.arange(1024.0)), "the copy has other values"
        assert done.query()
        device.current_stream().wait_stream(side)
        device.current_stream().wait_event(done)
        return "ok"

    def marks() -> str:
        first, second = device.event(timing=True), device.event(timing=True)
        first.record()
        tensor.mul(2)
        second.record(device.current_stream())
        second.synchronize()
        return f"{first.elapsed_ms(second):.4f} ms"

    def drawn() -> str:
        for generator in device.generators():
            generator.manual_seed(5)
        first = torch.rand(4, device=device.torch)
        for generator in device.generators():
            generator.manual_seed(5)
        assert torch.equal(first, torch.rand(4, device=device.torch)), "other numbers"
        state = [generator.get_state() for generator in device.generators()]
        for generator, each in zip(device.generators(), state, strict=True):
            generator.set_state(each)
        return f"{len(state)} generators"

    def memory() -> str:
        device.reset_peak()
        before = device.memory_allocated()
        held = device.empty([2**20], torch.uint8)
        after = device.memory_allocated() - before
        assert device.memory_peak() >= device.memory_allocated() > 0
        return f"{after} bytes for {held.numel()}"

    def full() -> str:
        total = device.memory_total()
        if total is None:
            return "no limit known"
        try:
            device.empty([2 * total], torch.uint8)
        except Exception as error:
            assert device.out_of_memory(error), f"not known as out of memory: {error!r}"
            return f"{type(error).__name__}"
        return "twice the memory was given"

    def fetched() -> str:
        assert device.holds(tensor)
        assert torch.equal(device.to_host(tensor), torch.arange(1024.0))
        non_blocking = device.to_device(pinned, non_blocking=True)
        device.synchronize()
        assert device.holds(non_blocking)
        return "ok"

    def exactly() -> str:
        """Compute the same bits twice in the package's deterministic context."""
        with device.deterministic():
            left = device.to_device(torch.ones(64, 64))
            assert torch.equal(left @ left, left @ left)
        return "ok"

    def float64() -> str:
        value = device.to_device(torch.tensor(3.0, dtype=torch.float64))
        exact = power_near_inverse(value)
        assert float(exact) == 0.25, f"a power of two is {float(exact)}"
        return "ok"

    found: dict[str, str] = {}
    for check in (beside, marks, drawn, memory, full, fetched, exactly, float64):
        try:
            found[check.__name__] = check()
        except Exception as error:
            found[check.__name__] = f"FAILED: {type(error).__name__}: {error}"
    return found


if __name__ == "__main__":
    main()
