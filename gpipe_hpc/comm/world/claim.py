"""Check that no two ranks use the same device."""

import logging

from torch.distributed.distributed_c10d import Store

from gpipe_hpc.device.device import Device
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.setting_names import setting

log = logging.getLogger("gpipe_hpc.comm")


def claim_device(store: Store, device: Device, rank: int, name: str, backend: str) -> None:
    """Reserve a device for a rank; raise ConfigError if another rank uses it.

    Devices are compared by identity, not by index, because a launcher may expose a single device to
    each rank. Partitions of one device (MIG) are separate devices. Each rank makes two requests to
    the store, whatever the number of ranks.

    Args:
        store: store shared by all ranks.
        device: device of this rank.
        rank: this rank.
        name: device in the settings; if it has an index and `backend` is gloo, ranks may share it.
        backend: communication backend.
    """
    if not device.is_accelerator or (":" in name and backend == "gloo"):
        return
    if device.is_slice and backend != "gloo":
        log.warning(
            "rank %d: %s is a partition of a device; if its backend %s fails because two ranks "
            "have partitions of one device ('Duplicate GPU detected'), set %s",
            *(rank, device.name, device.backend, setting("comm.backend", "gloo")),
        )
    key = f"devices/{device.identity}"
    if store.add(f"{key}/ranks", 1) == 1:
        store.set(f"{key}/first", str(rank))
        return
    first = int(store.get(f"{key}/first"))
    shown = " (a process uses only the first partition visible to it)" if device.is_slice else ""
    raise ConfigError(
        f"train.device: ranks {first} and {rank} use the same device, {device.torch} "
        f"({device.name}); start at most as many ranks on a machine as it has devices, make the "
        f"launcher expose one to each rank{shown}, or, to share one intentionally, set "
        f"{setting('train.device', device.torch)}, and {setting('comm.backend', 'gloo')}"
    )
