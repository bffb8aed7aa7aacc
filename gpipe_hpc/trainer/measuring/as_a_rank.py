"""Time layers under the conditions of a planned rank: its threads, and other ranks computing.

Processes of one host share caches, memory bandwidth and power: on two cores of an EPYC, layers of a
GPT and of an MLP took 8 % longer while another process ran the same layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from gpipe_hpc.device.cores.to_come import Share, share_to_come
from gpipe_hpc.device.device import Device
from gpipe_hpc.planner import Counted, Measured
from gpipe_hpc.planner.costs.gauges import MEASURED_HERE
from gpipe_hpc.planner.costs.stretch import MOST_STRETCH_BYTES
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.joining import keep_memory
from gpipe_hpc.trainer.machines import cluster_of, with_values
from gpipe_hpc.trainer.measuring.companions import companions


def measured_as_a_rank(
    config: Config, counted: Counted, num_samples: int, share: Share | None
) -> Measured:
    """Return the times of the layers of `counted`, measured on first access.

    Args:
        config: the settings.
        counted: the layers, with a micro-batch of meta tensors.
        num_samples: samples of that micro-batch.
        share: threads and competing processes of the planned rank, see `share_of_rank`; None: this
            process's threads, without load generators.
    """
    example = counted.example
    assert example is not None, "a plan has an example"
    keep_memory(config)
    counted = replace(counted, example=with_values(example, config))
    if share is None:
        return Measured(counted)
    around = partial(_as_a_rank, config, counted, num_samples, share)
    return Measured(counted, around, how_measured(share))


def how_measured(share: Share | None) -> str:
    """Return the name of the measurement mode used for a rank with this share of the host."""
    return MEASURED_HERE if share is None else f"{MEASURED_HERE}, {share}"


def share_of_rank(config: Config, device: Device, num_ranks: int | None) -> Share | None:
    """Return the numbers of threads and competing ranks of a rank on the planned run's first host.

    None if `num_ranks`, the total number of ranks, is unknown, and for accelerators, which ranks do
    not share.
    """
    if device.is_accelerator or num_ranks is None:
        return None
    train, ranks_of_host = config.train, cluster_of(config, num_ranks).hosts[0]
    return share_to_come(ranks_of_host, train.num_threads, binds=train.bind == "auto")


@contextmanager
def on_threads(share: Share | None) -> Iterator[None]:
    """Use the number of threads of `share` within the context; do nothing if it is None."""
    before = torch.get_num_threads()
    if share is not None and share.num_threads != before:
        torch.set_num_threads(share.num_threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextmanager
def _as_a_rank(config: Config, counted: Counted, num_samples: int, share: Share) -> Iterator[None]:
    others = companions(config, num_samples, share, _layer_bytes(counted))
    with others, on_threads(share):
        yield


def _layer_bytes(counted: Counted) -> int:
    """Return the bytes of memory needed to time the layers one by one or in short sequences."""
    each = [
        2 * (sum(weight.nbytes for weight in layer.weights) + layer.activation_bytes)
        for layer in counted.count.layers
    ]
    return max(*each, min(MOST_STRETCH_BYTES, sum(each)))
