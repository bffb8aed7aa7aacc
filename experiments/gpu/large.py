"""Part: a model of 6.9 billion parameters, or the largest that fits, compared with a plain loop.

Both recompute by layer or virtual stage, and each has the device for itself. Measures seconds to
build, seconds per step, FLOP/s and peak memory, then GB/s of a checkpoint of the weights.
"""

import gc
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from experiments.gpu.devices import the_device
from experiments.gpu.one_rank import LEARNING_RATE, SEED
from experiments.gpu.running import Findings, enter, options, timed
from experiments.gpu.sizes import SIZES, Size
from gpipe_hpc import Pipeline
from gpipe_hpc.device.device import Device
from gpipe_hpc.models import token_cross_entropy

VIRTUAL_STAGES = 8
BYTES_OF_A_WEIGHT = 16  # itself, its gradient and two moments in float32
# From the largest: 6.9, 3.1 and 1.4 billion parameters.
LARGE = {
    "6.9b": Size(32, 4096, 32, 2048, 50304, 2, 8, 5),
    "3.1b": Size(24, 3200, 32, 2048, 50304, 2, 8, 5),
    "1.4b": replace(SIZES["xl"], rounds=5),
    "tiny": replace(SIZES["tiny"], num_layers=4),
}


def size_that_fits(free_bytes: int | None, is_accelerator: bool) -> str:
    """Return the largest size whose weights, optimizer and casts leave memory for a micro-batch."""
    if not is_accelerator:
        return "tiny"
    for name, size in LARGE.items():
        # Also the cast of a stage, and the logits of one micro-batch with their gradient.
        logits = 12 * size.samples * size.seq_len * size.vocab_size
        if BYTES_OF_A_WEIGHT * num_parameters(size) * 1.05 + logits <= 0.95 * (free_bytes or 0):
            return name
    return "tiny"


def num_parameters(size: Size) -> int:
    """Return the number of parameters without biases and norms."""
    return size.multiplied + size.width * (size.vocab_size + size.seq_len)


def measure(
    make: Callable[[], tuple[list[nn.Parameter], Callable[[], object], Any]],
    size: Size,
    device: Device,
) -> tuple[dict[str, Any], Any]:
    """Build one contestant and time its steps; return the results and the contestant."""
    made: list[tuple[list[nn.Parameter], Callable[[], object], Any]] = []
    build_s = timed(lambda: made.append(make()), device.synchronize)
    parameters, run, whole = made[0]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=device.is_accelerator)

    def step() -> None:
        optimizer.zero_grad()
        run()
        optimizer.step()

    first_s = timed(step, device.synchronize)
    timed(step, device.synchronize)
    if device.is_accelerator:
        device.reset_peak()
    steps = [timed(step, device.synchronize) for _ in range(size.rounds)]
    found = {
        "parameters": sum(p.numel() for p in parameters),
        "seconds to build": build_s,
        "first step, s": first_s,
        "step_s": statistics.median(steps),
        "all_s": [round(each, 4) for each in steps],
        "model flops_per_s": size.flops / statistics.median(steps),
        "peak_bytes": device.memory_peak() if device.is_accelerator else None,
    }
    optimizer.zero_grad()
    return found, whole


def plain(size: Size, batch: tuple[Tensor, Tensor], device: Device) -> Any:
    """Return gradient accumulation under autocast with recomputation of each layer."""
    inputs, targets = map(device.to_device, batch)
    with torch.device(device.torch):
        layers = nn.ModuleList(spec.build() for spec in size.layers())

    def run() -> None:
        for value, target in zip(
            inputs.tensor_split(size.microbatches),
            targets.tensor_split(size.microbatches),
            strict=True,
        ):
            with torch.autocast(device.type, torch.bfloat16):
                for layer in layers:
                    value = checkpoint(layer, value, use_reentrant=False)
                total, _ = token_cross_entropy(value, target)
            torch.autograd.backward(total / targets.numel())

    return list(layers.parameters()), run, layers


def ours(size: Size, batch: tuple[Tensor, Tensor], device: Device, build_on: str) -> Any:
    """Return a pipeline of one rank with virtual stages, each recomputed."""
    inputs, targets = map(device.to_device, batch)
    pipe = size.pipeline(
        device,
        seed=SEED,
        schedule="interleaved",
        schedule_options={"stages_per_rank": VIRTUAL_STAGES},
        recompute="always",
        build_on=build_on,
    )
    return pipe.parameters(), lambda: pipe.step(inputs, targets), pipe


def checkpoint_rates(pipe: Pipeline) -> dict[str, float]:
    """Save and load the weights in a separate folder; return GB/s of both."""
    size_bytes = sum(p.numel() * p.element_size() for p in pipe.parameters())
    folder = Path(tempfile.mkdtemp(prefix="gpipe_hpc_large_"))
    try:
        free = shutil.disk_usage(folder).free
        if free < 1.2 * size_bytes:
            raise OSError(f"{folder}: {free / 1e9:.0f} GB free, {size_bytes / 1e9:.0f} GB to save")
        save_s = timed(lambda: pipe.save(folder / "step_1"), lambda: None)
        load_s = timed(lambda: pipe.load(folder / "step_1"), lambda: None)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {
        "GB": size_bytes / 1e9,
        "save, GB/s": size_bytes / 1e9 / save_s,
        "load, GB/s": size_bytes / 1e9 / load_s,
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--size", choices=("auto", *LARGE), default="auto")
    args = parser.parse_args()
    enter()
    findings = Findings(args.found)
    device = the_device(args.device)
    name = args.size
    if name == "auto":
        name = size_that_fits(device.memory_free(), device.is_accelerator)
    size = LARGE[name]
    findings.add("size", {"name": name, **vars(size)})
    batch = size.batch()
    with findings.attempt("plain"):
        found, whole = measure(lambda: plain(size, batch, device), size, device)
        findings.add("plain", found)
        del whole
    release(device)
    with findings.attempt("ours"):
        found, pipe = measure(lambda: ours(size, batch, device, "device"), size, device)
        beside = findings.found["plain"].get("step_s")
        findings.add("ours", found | ({"over plain": found["step_s"] / beside} if beside else {}))
        with findings.attempt("checkpoint"):
            findings.add("checkpoint", checkpoint_rates(pipe))
        del pipe
    release(device)


def release(device: Device) -> None:
    """Free memory before the next contestant."""
    gc.collect()
    if device.is_accelerator:
        torch.accelerator.empty_cache()


if __name__ == "__main__":
    main()
