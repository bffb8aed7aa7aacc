"""Part: peak memory of a step compared with the plan, in several modes."""

import gc
from typing import Any

import torch
from torch import Tensor

from experiments.gpu.devices import the_device
from experiments.gpu.one_rank import LEARNING_RATE, SEED, STAGES
from experiments.gpu.running import LEFT, Findings, enter, options, timed
from experiments.gpu.sizes import SIZES, Size
from gpipe_hpc import Pipeline
from gpipe_hpc.device.device import Device
from gpipe_hpc.engine.precision import casting
from gpipe_hpc.models import token_cross_entropy
from gpipe_hpc.planner import CountedCosts, Example, measure_layers
from gpipe_hpc.planner.forecast import forecast

MODES: dict[str, dict[str, Any]] = {
    "recompute never": {"recompute": "never"},
    "recompute always": {"recompute": "always"},
    "gpipe, recompute except_last": {"schedule": "gpipe", "recompute": "except_last"},
    "virtual stages": {
        "schedule": "interleaved",
        "schedule_options": {"stages_per_rank": STAGES},
        "recompute": "never",
    },
    "offload": {
        "schedule": "gpipe",
        "recompute": "never",
        "offload": True,
    },
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--size", choices=SIZES, required=True)
    args = parser.parse_args()
    enter()
    findings = Findings(args.found)
    device = the_device(args.device)
    size = SIZES[args.size]
    findings.add("size", args.size)
    batch = size.batch()
    with findings.attempt(LEFT):
        findings.add(LEFT, left_by_measuring(size, batch, device))
    for mode, settings in MODES.items():
        with findings.attempt(mode):
            findings.add(mode, measured(size, batch, device, settings))
        gc.collect()
        if device.is_accelerator:
            torch.accelerator.empty_cache()


def measured(
    size: Size, batch: tuple[Tensor, Tensor], device: Device, settings: dict[str, Any]
) -> dict[str, Any]:
    """Return the peak of the third step, its forecast, and the memory kept between steps."""
    inputs, targets = map(device.to_device, batch)
    before = device.memory_allocated()
    pipe = size.pipeline(device, seed=SEED, **{"schedule": "one_f_one_b", **settings})
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=LEARNING_RATE, fused=device.is_accelerator)

    def step() -> None:
        pipe.step(inputs, targets)
        optimizer.step()

    step()
    step()
    device.synchronize()
    device.reset_peak()
    step_s = timed(step, device.synchronize)
    # On a CPU, the peak is that of the whole process so far.
    peak = device.memory_peak() - before if device.is_accelerator else None
    active = active_peak(device)
    planned = planned_bytes(size, batch, pipe)
    return {
        "peak_bytes": peak,
        "planned_bytes": planned,
        "over_plan": None if peak is None else peak / planned,
        "active_over_plan": None if active is None else (active - before) / planned,
        "held_between_steps_bytes": device.memory_allocated() - before,
        "step_s": step_s,
    }


def left_by_measuring(size: Size, batch: tuple[Tensor, Tensor], device: Device) -> int | None:
    """Return the bytes that remain allocated after layers were measured; None on CPUs."""
    if not device.is_accelerator:
        return None
    inputs, targets = (device.to_device(each[: size.samples]) for each in batch)

    def left() -> int:
        with casting("bfloat16", device):
            measure_layers(
                size.layers(), inputs, targets, token_cross_entropy, device=device, rounds=1
            )
            return device.memory_allocated()  # autocast keeps its cache until the block ends

    first = left()  # libraries have allocated their memory by then
    return left() - first


def active_peak(device: Device) -> int | None:
    """Return the peak of allocated memory, including freed memory still in use by other streams."""
    if not device.is_accelerator:
        return None
    found = torch.accelerator.memory_stats().get("active_bytes.all.peak")
    return None if found is None else int(found)


def planned_bytes(size: Size, batch: tuple[Tensor, Tensor], pipe: Pipeline) -> int:
    """Return the memory forecast of `train` for the rank."""
    inputs, targets = (each[: size.samples].to("meta") for each in batch)
    request = pipe.request
    on = Example(inputs, targets, token_cross_entropy, request.seed, pipe.world.device)
    counted = CountedCosts(size.layers(), on, request.precision, shares_casts=not request.offload)
    layout = pipe.layout
    planned = forecast(
        counted.count,
        pipe.partition.counts,
        layout.schedule,
        request.kept_states,
        layout.recomputed,
        sharing=layout.sharing,
    )
    return planned.ranks[0].total_bytes


if __name__ == "__main__":
    main()
