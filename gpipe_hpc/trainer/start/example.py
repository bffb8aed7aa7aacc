"""Read samples before training, to measure layers or check the data."""

from gpipe_hpc.batches import unwrapped
from gpipe_hpc.comm.world.world import World, collective_errors
from gpipe_hpc.data import BatchReader, DataSource, ReadRequest, ShuffledSampler, tolerance
from gpipe_hpc.data.dataset import samples_that_fit
from gpipe_hpc.errors import ConfigError
from gpipe_hpc.planner.cutting.partition import SIMULATED
from gpipe_hpc.pytree import Nest
from gpipe_hpc.settings import Config


def example_of(
    config: Config, world: World, source: DataSource | None, sampler: ShuffledSampler
) -> tuple[Nest, Nest] | None:
    """Return the first micro-batch on rank 0 if layers will be measured or counted, else None."""
    pipeline = config.pipeline
    is_counted = pipeline.recompute == "budget" or pipeline.memory_bytes is not None
    if source is None or not (pipeline.partition in ("time", SIMULATED) or is_counted):
        return None
    with collective_errors(world, "reading an example"):
        return first_microbatch(config, source, sampler)


def first_microbatch(
    config: Config, source: DataSource, sampler: ShuffledSampler
) -> tuple[Nest, Nest]:
    """Read inputs and targets of the run's first micro-batch, which has the maximum size."""
    indices, _ = sampler.batch(0)
    pieces = config.pipeline.num_replicas * config.pipeline.microbatches * config.train.accumulation
    return read_samples(config, source, indices[: max(1, -(-len(indices) // pieces))])


def read_samples(config: Config, source: DataSource, indices: list[int]) -> tuple[Nest, Nest]:
    """Return inputs and targets of training samples; raise ConfigError if there are none."""
    if not indices:
        raise ConfigError(
            "data: there are no training samples; add data, or use less of it for validation"
        )
    reader = BatchReader(source.train, True, True, tolerance(config.data))
    with samples_that_fit():
        reading = reader.read(ReadRequest(indices, epoch=0))
    return unwrapped(reading.inputs), unwrapped(reading.targets)
