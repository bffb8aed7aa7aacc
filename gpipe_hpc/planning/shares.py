"""How large each micro-batch of a step is: a batch is cut once, into nearly equal pieces."""

from gpipe_hpc.engine.batch.cutting import share_of


def microbatch_shares(
    num_samples: int, *, replicas: int, microbatches: int, replica: int = 0
) -> tuple[float, ...]:
    """Return what share of the largest micro-batch each one of a replica is, 0 for an empty one.

    `num_samples`: of the global batch; `microbatches`: of a replica's step. Where all of that
    replica are as large as the largest the result is empty. The first replica has the largest.
    """
    pieces = replicas * microbatches
    largest = -(-num_samples // pieces)
    own = range(replica * microbatches, (replica + 1) * microbatches)
    parts = [share_of(num_samples, pieces, each, 1) for each in own]
    sizes = [part.stop - part.start for part in parts]
    if not largest or min(sizes) == largest:
        return ()
    return tuple(size / largest for size in sizes)
