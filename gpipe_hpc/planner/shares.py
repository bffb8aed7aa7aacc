"""Relative sizes of the micro-batches of a step, as a batch may not divide evenly."""

from gpipe_hpc.batches import share_of


def microbatch_shares(num_samples: int, num_global: int, own: range) -> tuple[float, ...]:
    """Return the sizes of a replica's micro-batches relative to the largest, 0 for empty ones.

    The result is empty if all have the largest size. The first replica has the largest one.

    Args:
      num_samples, num_global: samples and micro-batches of the global batch.
      own: indices of the replica's micro-batches.
    """
    largest = -(-num_samples // num_global)
    parts = [share_of(num_samples, num_global, each, 1) for each in own]
    sizes = [part.stop - part.start for part in parts]
    if not largest or min(sizes) == largest:
        return ()
    return tuple(size / largest for size in sizes)
