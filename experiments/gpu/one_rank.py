"""Part: gpipe_hpc on one rank compared with a good plain PyTorch loop, in one process."""

import gc
import statistics
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.gpu.devices import the_device
from experiments.gpu.running import Findings, enter, options, timed
from experiments.gpu.sizes import SIZES, Size, size_for
from gpipe_hpc.device.device import Device
from gpipe_hpc.models import build_layer, token_cross_entropy
from gpipe_hpc.planner.costs.device_peaks import peak_flops_per_s

SEED = 0
LEARNING_RATE = 1e-4
STAGES = 4  # virtual ones of the third contestant


class Contestant:
    """Parameters with their optimizer, and the forward and backward of a step."""

    def __init__(
        self, name: str, parameters: dict[str, nn.Parameter], run: Callable[[Any], object]
    ) -> None:
        self.name, self.parameters, self._run = name, parameters, run
        values = list(parameters.values())
        fused = values[0].device.type != "cpu"
        self.optimizer = torch.optim.AdamW(values, lr=LEARNING_RATE, fused=fused)

    def run(self) -> None:
        """Compute the gradients of one step."""
        self._run(self.optimizer)

    def step(self) -> None:
        """Train one step."""
        self.run()
        self.optimizer.step()


def plain(size: Size, batch: tuple[Tensor, Tensor], device: Device, backend: str) -> Contestant:
    """Return gradient accumulation under autocast, with layers compiled separately."""
    inputs, targets = map(device.to_device, batch)
    specs = size.layers()
    whole = nn.ModuleList(build_layer(s, index=i, seed=SEED) for i, s in enumerate(specs))
    whole.to(device.torch)
    if backend != "none":
        for module in whole:
            module.compile(backend=backend)
    weight = targets.numel()
    parts = list(
        zip(
            inputs.tensor_split(size.microbatches),
            targets.tensor_split(size.microbatches),
            strict=True,
        )
    )

    def run(optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        for value, target in parts:
            with torch.autocast(device.type, torch.bfloat16):
                for module in whole:
                    value = module(value)
                total, _ = token_cross_entropy(value, target)
            torch.autograd.backward(total / weight)

    return Contestant("plain", {f"layers.{n}": p for n, p in whole.named_parameters()}, run)


def ours(
    size: Size,
    batch: tuple[Tensor, Tensor],
    device: Device,
    backend: str,
    stages: int,
    name: str,
    **settings: Any,
) -> Contestant:
    """Return a pipeline of one rank, with virtual stages if there are several."""
    inputs, targets = map(device.to_device, batch)
    virtual = {"schedule": "interleaved", "schedule_options": {"stages_per_rank": stages}}
    pipe = size.pipeline(
        device,
        compile=False if backend == "none" else backend,
        seed=SEED,
        **{
            "recompute": "never",
            **(virtual if stages > 1 else {"schedule": "one_f_one_b"}),
            **settings,
        },
    )
    return Contestant(name, dict(pipe.named_parameters()), lambda _: pipe.step(inputs, targets))


def difference(left: Contestant, right: Contestant) -> float:
    """Return the norm of the gradients' difference relative to the first gradients."""
    error = norm = 0.0
    for name, parameter in left.parameters.items():
        other = right.parameters[name].grad
        assert parameter.grad is not None and other is not None, f"{name}: no gradient"
        error += float((parameter.grad - other).double().square().sum())
        norm += float(parameter.grad.double().square().sum())
    return float((error / norm) ** 0.5)


def waits_of(contestant: Contestant, device: Device) -> dict[str, int] | None:
    """Return the locations and counts of device synchronisations in a step, or None if unknown."""
    if device.type != "cuda":
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            contestant.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found: dict[str, int] = {}
    for each in caught:
        if "synchroniz" in str(each.message):
            where = f"{Path(each.filename).name}:{each.lineno}"
            found[where] = found.get(where, 0) + 1
    return found


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--size", choices=("auto", *SIZES), default="auto")
    parser.add_argument("--most", choices=SIZES, default="xl", help="the largest that auto takes")
    parser.add_argument("--backend", default="none", help="of torch.compile, or none")
    args = parser.parse_args()
    enter()
    findings = Findings(args.found)
    # Each kind of layer of each contestant has variants of its own.
    torch._dynamo.config.recompile_limit = 128
    device = the_device(args.device)
    name, size = size_for(args.size, device.memory_free(), device.is_accelerator, args.most)
    findings.add("size", {"name": name, **vars(size), "multiplied": size.multiplied})
    batch = size.batch()
    contestants: list[Contestant] = []

    def take_part(make: Callable[[], Contestant]) -> None:
        """Add a contestant after its first step; the compile time is reported."""
        each = make()
        findings.add(f"first step of {each.name}, s", timed(each.run, device.synchronize))
        if contestants:
            error = difference(contestants[0], each)
            findings.add(f"gradient difference of {each.name}", error)
        timed(each.step, device.synchronize)
        contestants.append(each)

    take_part(lambda: plain(size, batch, device, args.backend))
    take_part(lambda: ours(size, batch, device, args.backend, 1, "ours"))
    with findings.attempt("virtual stages"):
        take_part(lambda: ours(size, batch, device, args.backend, STAGES, "ours, virtual stages"))
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {each.name: [] for each in contestants}
    peak = peak_flops_per_s(device.name, "bfloat16")
    for number in range(size.rounds):
        turn = number % len(contestants)
        for each in contestants[turn:] + contestants[:turn]:
            times[each.name].append(timed(each.step, device.synchronize))
        if number:
            findings.add("contestants", told(times, size, peak))
    for each in contestants:
        with findings.attempt(f"waits of {each.name}"):
            waits = waits_of(each, device)
            findings.add(f"waits of {each.name}", waits)
            findings.add(
                f"number of waits of {each.name}", None if waits is None else sum(waits.values())
            )


def told(times: dict[str, list[float]], size: Size, peak: float | None) -> dict[str, Any]:
    """Return the results so far; ratios are computed within a round."""
    found: dict[str, Any] = {}
    names = list(times)
    before = dict(zip(names[1:], names, strict=False))
    for name, own in times.items():
        step_s = statistics.median(own)
        found[name] = {
            "step_s": step_s,
            "all_s": [round(each, 6) for each in own],
            "flops_per_s": size.flops / step_s,
            "share_of_peak": None if peak is None else size.flops / step_s / peak,
        }
        if name in before:
            pairs = zip(own, times[before[name]], strict=True)
            found[name][f"over {before[name]}"] = statistics.median(a / b for a, b in pairs)
    return found


if __name__ == "__main__":
    main()
