"""Settings that older versions had, and what to do instead. Needs no Hydra."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from gpipe_hpc.errors import ConfigError

_STUDY: Final = "python -m experiments.outer.collectives measure"
_IDX_LABELS: Final = (
    "the label file has the name of the image file, with 'labels' in place of 'images' and 'idx1' "
    "in place of 'idx3'"
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
            "Gloo and the watchdog listen on ephemeral ports; to limit their range, set sysctl "
            "net.ipv4.ip_local_port_range on each host, and open that range in the firewall",
        ),
        "outer.algorithm": Removed(
            "backend",
            "gradients are summed by the backend's all-reduce, or as set by outer.order=rank and "
            f"outer.hierarchy; {_STUDY} compares it with other algorithms",
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
            "MPI is queried for support of accelerator memory; to override the result, set the "
            "environment variable MPICH_GPU_SUPPORT_ENABLED to 1 or 0",
        ),
        "trace.review_after": Removed(
            10, "the partition is compared with measured times once, after 10 steps"
        ),
        "lr.smoothing": Removed(
            None, "lr.scaling=adascale uses 1 - parts / 1000, the value of its authors"
        ),
        "metrics.project": Removed(
            "gpipe_hpc",
            "set the environment variable WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME",
        ),
        "report.format": Removed(
            "auto", "use report.out=report.md for Markdown; any other name gives HTML"
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
