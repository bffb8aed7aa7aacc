"""Settings that older versions had, and what to do instead. Needs no Hydra."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from gpipe_hpc.errors import ConfigError

_STUDY: Final = "python -m experiments.outer.collectives measure"
_IDX_LABELS: Final = (
    "labels are read from the file that is named as that of the images, with labels for images and "
    "idx1 for idx3"
)


class Removed(NamedTuple):
    """A setting that was removed.

    Args:
        inert: Value with which older versions computed the same as this version.
        instead: What to do instead.
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
        "preflight.bytes": Removed(
            "4MB", "preflight sends messages of up to 4 MB, and smaller ones on slow links"
        ),
        "preflight.prices": Removed(
            "prices.yaml", "preflight.steps=true writes prices.yaml next to preflight.out"
        ),
        "comm.loopback": Removed(
            None,
            "ranks listen on the loopback interface if all of them are on one machine; choose "
            "another interface with comm.interface",
        ),
        "comm.mpi_device_pointers": Removed(
            None,
            "MPI is asked whether it reads the memory of accelerators; to answer for it, set the "
            "environment variable MPICH_GPU_SUPPORT_ENABLED to 1 or 0",
        ),
        "trace.review_after": Removed(
            10, "the partition is compared with measured times after 10 steps, once"
        ),
        "lr.smoothing": Removed(
            None, "lr.scaling=adascale uses 1 - parts / 1000, the value of its authors"
        ),
        "metrics.project": Removed(
            "gpipe_hpc",
            "set the environment variable WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME",
        ),
        "report.format": Removed(
            "auto", "name the file, as report.out=report.md for Markdown; all others are HTML"
        ),
        "data.train_labels": Removed("train-labels-idx1-ubyte", _IDX_LABELS),
        "data.validation_labels": Removed("t10k-labels-idx1-ubyte", _IDX_LABELS),
        "bench.limit_s": Removed(600.0, "a combination may take an hour"),
        "bench.message_bytes": Removed(None, f"{_STUDY} takes --bytes"),
        "bench.repeats": Removed(None, f"{_STUDY} takes --repeats"),
    }
)


def refusal_of_removed(setting: str, value: str = "") -> ConfigError | None:
    """Return the error for a removed setting, which says what to do instead; None for others."""
    removed = REMOVED.get(setting)
    if removed is None:
        return None
    got = f"{setting}={value}" if value else setting
    return ConfigError(f"config: {setting} was removed, got {got}; leave it out: {removed.instead}")
