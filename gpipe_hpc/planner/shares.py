"""How large each micro-batch of a step is: a batch is cut once, into nearly equal pieces."""

from gpipe_hpc.batches import share_of


def microbatch_shares(num_samples: int, num_global: int, own: range) -> tuple[float, ...]:
    """Return what share of the largest micro-batch each one of a replica is, 0 for an empty one.

    `num_samples` and `num_global`: samples and micro-batches of the global batch; `own`: those
    micro-batches that are the replica's. Where all of them are as large as the largest the result
    is empty. The first replica has the largest.
    """
    largest = -(-num_samples // num_global)
    parts = [share_of(num_samples, num_global, each, 1) for each in own]
    sizes = [part.stop - part.start for part in parts]
    if not largest or min(sizes) == largest:
        return ()
    return tuple(size / largest for size in sizes)
