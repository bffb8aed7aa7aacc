"""Settings that older versions had, and what to do in their place. Needs no Hydra."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from gpipe_hpc.errors import ConfigError

_STUDY: Final = "python -m experiments.outer.collectives measure"


class Removed(NamedTuple):
    """A setting that was removed.

    Args:
        inert: The value with which older runs computed what every run computes now.
        instead: What to do now.
    """

    inert: object
    instead: str


REMOVED: Final[Mapping[str, Removed]] = MappingProxyType(
    {
        "train.fuse_accumulation": Removed(
            False, "autograd accumulates weight gradients, which takes as long"
        ),
        "comm.ports": Removed(
            None,
            "Gloo and the watchdog listen on ports of the kernel's range; to bound it, set sysctl "
            "net.ipv4.ip_local_port_range on each host, and open that range in the firewall",
        ),
        "outer.algorithm": Removed(
            "backend",
            "gradients are summed by the backend's own all-reduce, or as outer.order=rank and "
            f"outer.hierarchy say; {_STUDY} compares other algorithms with it",
        ),
        "preflight.limit_s": Removed(
            20.0, "comm.reach_s limits how long preflight waits for other ranks, too"
        ),
        "bench.message_bytes": Removed(None, f"{_STUDY} takes --bytes"),
        "bench.repeats": Removed(None, f"{_STUDY} takes --repeats"),
    }
)


def refusal_of_removed(setting: str, value: str = "") -> ConfigError | None:
    """Return the error that says what replaces a removed setting; None for others."""
    removed = REMOVED.get(setting)
    if removed is None:
        return None
    got = f"{setting}={value}" if value else setting
    return ConfigError(
        f"config: {setting} was removed, expected it left out, got {got}; leave it out: "
        f"{removed.instead}"
    )
