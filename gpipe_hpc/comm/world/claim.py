"""Each rank has a device of its own: those that two ranks have taken are refused by name."""

import logging

from torch.distributed.distributed_c10d import Store

from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.setting_names import setting

log = logging.getLogger("gpipe_hpc.comm")


def claim_device(store: Store, device: Device, rank: int, name: str, backend: str) -> None:
    """Take a device for a rank; raise ConfigError where another rank has taken it.

    What is compared is the device itself, not its number: a launcher may show each rank its own
    alone. `name`: what was asked for; one with an index may be shared, over a `backend` that goes
    by way of the host. Slices of one device (MIG) are devices of their own. Costs a rank two words
    with the store, whatever the number of ranks.
    """
    if not device.is_accelerator or (":" in name and backend == "gloo"):
        return
    if device.is_slice and backend != "gloo":
        log.warning(
            "rank %d: %s is a slice of a device; if its backend, %s, stops because two ranks have "
            "slices of one device ('Duplicate GPU detected'), set %s",
            *(rank, device.name, device.backend, setting("comm.backend", "gloo")),
        )
    key = f"devices/{device.identity}"
    if store.add(f"{key}/ranks", 1) == 1:
        store.set(f"{key}/first", str(rank))
        return
    first = int(store.get(f"{key}/first"))
    shown = " (a process sees one slice, the first that it is shown)" if device.is_slice else ""
    raise ConfigError(
        f"train.device: expected one for each rank, got {device.torch} ({device.name}) for rank "
        f"{first} and for rank {rank}; start at most as many ranks on a machine as it has devices, "
        f"let the launcher show each rank its own{shown}, or, to share one on purpose, set "
        f"{setting('train.device', device.torch)}, and {setting('comm.backend', 'gloo')}"
    )
