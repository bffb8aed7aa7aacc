"""How much a step trains on in a second."""

from gpipe_hpc.config import DataConfig, TokenDataConfig


def tokens_per_sample(data: DataConfig) -> int | None:
    """Return the tokens of a sample, None where samples are no sequences of tokens."""
    return data.seq_len if isinstance(data, TokenDataConfig) else None
