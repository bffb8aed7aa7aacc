"""Time layers under the conditions of a planned rank: its threads, and other ranks computing.

Processes of one host share caches, memory bandwidth and power: on two cores of an EPYC, layers of a
GPT and of an MLP took 8 % longer while another process ran the same layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from gpipe_hpc.device.cores.planned_ranks import CpuShare, planned_share
from gpipe_hpc.device.device import Device
from gpipe_hpc.planner import CountedCosts, MeasuredCosts
from gpipe_hpc.planner.costs.cost_models import MEASURED_HERE
from gpipe_hpc.planner.costs.stretch import MOST_STRETCH_BYTES
from gpipe_hpc.settings import Config
from gpipe_hpc.trainer.machines import cluster_of, with_values
from gpipe_hpc.trainer.measuring.load_generators import load_generators
from gpipe_hpc.trainer.start_world import keep_memory


def measured_under_load(
    config: Config, counted: CountedCosts, num_samples: int, share: CpuShare | None
) -> MeasuredCosts:
    """Return the times of the layers of `counted`, measured on first access.

    Args:
        config: the settings.
        counted: the layers, with a micro-batch of meta tensors.
        num_samples: samples of that micro-batch.
        share: threads and competing processes of the planned rank, see `share_of_rank`; None: this
            process's threads, without load generators.
    """
    example = counted.example
    assert example is not None, "a plan has an example micro-batch"
    keep_memory(config)
    counted = replace(counted, example=with_values(example, config))
    if share is None:
        return MeasuredCosts(counted)
    around = partial(_under_load, config, counted, num_samples, share)
    return MeasuredCosts(counted, around, measurement_mode(share))


def measurement_mode(share: CpuShare | None) -> str:
    """Return the name of the measurement mode used for a rank with this share of the host."""
    return MEASURED_HERE if share is None else f"{MEASURED_HERE}, {share}"


def share_of_rank(config: Config, device: Device, num_ranks: int | None) -> CpuShare | None:
    """Return the numbers of threads and competing ranks of a rank on the planned run's first host.

    None if `num_ranks`, the total number of ranks, is unknown, and for accelerators, which ranks do
    not share.
    """
    if device.is_accelerator or num_ranks is None:
        return None
    train, ranks_of_host = config.train, cluster_of(config, num_ranks).hosts[0]
    return planned_share(ranks_of_host, train.num_threads, binds=train.bind == "auto")


@contextmanager
def on_threads(share: CpuShare | None) -> Iterator[None]:
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
def _under_load(
    config: Config, counted: CountedCosts, num_samples: int, share: CpuShare
) -> Iterator[None]:
    others = load_generators(config, num_samples, share, _layer_bytes(counted))
    with others, on_threads(share):
        yield


def _layer_bytes(counted: CountedCosts) -> int:
    """Return the bytes of memory needed to time the layers one by one or in short sequences."""
    each = [
        2 * (sum(weight.nbytes for weight in layer.weights) + layer.activation_bytes)
        for layer in counted.count.layers
    ]
    return max(*each, min(MOST_STRETCH_BYTES, sum(each)))
