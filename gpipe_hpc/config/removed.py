"""Settings that older versions had, and what a run does in their place."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from gpipe_hpc.errors import ConfigError

STUDY_OF_COLLECTIVES: Final = "python -m experiments.outer.collectives measure"
"""Times algorithms of collectives, in a checkout of the repository."""


class Removed(NamedTuple):
    """A setting that was removed. `inert`: the value that asked for what every run does now."""

    inert: object
    instead: str


REMOVED: Final[Mapping[str, Removed]] = MappingProxyType(
    {
        "train.fuse_accumulation": Removed(
            False, "autograd adds up weight gradients, which takes as long"
        ),
        "comm.ports": Removed(
            None,
            "Gloo and the watch listen on ports of the kernel's range; to bound it, set sysctl "
            "net.ipv4.ip_local_port_range on each host, and open that range in the firewall",
        ),
        "outer.algorithm": Removed(
            "backend",
            "gradients are summed by the backend's own all-reduce, or as outer.order=rank and "
            f"outer.hierarchy say; {STUDY_OF_COLLECTIVES} compares other algorithms with it",
        ),
        "bench.message_bytes": Removed(None, f"{STUDY_OF_COLLECTIVES} takes --bytes"),
        "bench.repeats": Removed(None, f"{STUDY_OF_COLLECTIVES} takes --repeats"),
    }
)


def refusal_of_removed(setting: str, value: str) -> ConfigError | None:
    """Return the error that says what is done instead of a removed setting; None for others."""
    removed = REMOVED.get(setting)
    if removed is None:
        return None
    got = f"{setting}={value}" if value else setting
    return ConfigError(
        f"config: {setting} is no setting any more, expected it left out, got {got}; leave it out: "
        f"{removed.instead}"
    )
