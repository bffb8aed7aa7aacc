"""Each rank has a device of its own: those that two ranks have taken are refused by name."""

from torch.distributed.distributed_c10d import Store

from gpipe_hpc.comm.device import Device
from gpipe_hpc.errors import ConfigError


def claim_device(store: Store, device: Device, rank: int, name: str, backend: str) -> None:
    """Take a device for a rank; raise ConfigError where another rank has taken it.

    What is compared is the device itself, not its number: a launcher may show each rank its own
    alone. `name`: what was asked for; one with an index may be shared, over a `backend` that goes
    by way of the host. Costs a rank two words with the store, whatever the number of ranks.
    """
    if not device.is_accelerator or (":" in name and backend == "gloo"):
        return
    key = f"devices/{device.identity}"
    if store.add(f"{key}/ranks", 1) == 1:
        store.set(f"{key}/first", str(rank))
        return
    first = int(store.get(f"{key}/first"))
    raise ConfigError(
        f"device: expected one for each rank, got {device.torch} ({device.name}) for rank {first} "
        f"and for rank {rank}; start at most as many ranks on a machine as it has devices, let the "
        f"launcher show each rank its own, or, to share one on purpose, set device={device.torch} "
        f"and backend=gloo"
    )
