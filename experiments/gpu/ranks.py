"""Part: several ranks train small layouts over real transports; gradients equal the reference.

With ``staged``, the ranks share one device, and boundaries use pinned memory and Gloo. With
``own``, each rank has a device, and boundaries use the device's backend.
"""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from experiments.gpu.devices import the_device
from experiments.gpu.gradients import (
    LAYOUTS,
    LIMIT,
    LIMIT_BFLOAT16,
    REPLICATED,
    largest_error,
    plain_gradients,
)
from experiments.gpu.running import Findings, enter, options
from gpipe_hpc.comm.world.group_factory import ProcessGroupFactory
from gpipe_hpc.comm.world.start import start_world
from gpipe_hpc.comm.world.world import World


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--over", choices=("staged", "own"), required=True)
    args = parser.parse_args()
    enter()
    world = staged(args.device) if args.over == "staged" else own(args.device)
    # All ranks print their progress; only rank 0 writes the file.
    findings = Findings(args.found if world.rank == 0 else args.found.with_suffix(".other"))
    backend = str(dist.get_backend_config()) if dist.is_initialized() else "none"
    findings.add("started", {"backend": backend, "world": type(world).__name__, "size": world.size})
    findings.add("sum over the ranks", summed(world))
    expected = plain_gradients(world.device)
    layouts = LAYOUTS if world.size > 1 else {k: LAYOUTS[k] for k in ("gpipe", "zb_v", "bfloat16")}
    if world.size == 2:
        layouts = {**layouts, **REPLICATED}
    wrong: list[str] = []
    for name, settings in layouts.items():

        def note(what: str, name: str = name) -> None:
            print(f"{time.monotonic():.2f} rank {world.rank}: {name}: {what}", flush=True)

        note("begins")
        error = largest_error(world, expected, settings, note)
        limit = LIMIT_BFLOAT16 if settings.get("precision") == "bfloat16" else LIMIT
        # All ranks get the largest error, so that all continue or all stop.
        worst = torch.tensor([error], dtype=torch.float64)
        if world.size > 1:
            world.world_group.all_reduce_max(worst)
        findings.add(f"gradient error of {name}", float(worst))
        if not float(worst) < limit:
            wrong.append(f"{name}: gradients are {float(worst):.1e} off, over {limit:g}")
            findings.add("wrong", wrong)
    findings.add("layouts", len(layouts))
    assert not wrong, "; ".join(wrong)


def staged(kind: str) -> World:
    """Return a world whose ranks share one device; all communication goes through the host."""
    return start_world(device=kind if kind == "cpu" else f"{kind}:0", backend="gloo", timeout_s=60)


def own(kind: str) -> World:
    """Return a world over the device's backend, also for one rank."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        device = the_device(kind)
        store = HashStore()
        backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{device.backend}"
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
    return start_world(device=kind, timeout_s=60)


def summed(world: World) -> float:
    """All-reduce a device tensor over all ranks, with the kind of group that the package uses.

    A world of one rank has no such group, so one is created here; otherwise no backend would start.
    """
    tensor = world.device.to_device(torch.full([1024], float(world.rank + 1)))
    if world.size == 1 and dist.is_initialized():
        backend = dist.get_backend_config()
        former = ProcessGroupFactory("alone", timedelta(seconds=60), backend)
        dist.all_reduce(tensor, group=former.form((0,)))
    else:
        world.world_group.all_reduce(tensor)
    found = world.device.to_host(tensor)
    wanted = world.size * (world.size + 1) / 2
    assert bool((found == wanted).all()), f"the sum is {found[0]}, not {wanted}"
    return float(found[0])


if __name__ == "__main__":
    main()
