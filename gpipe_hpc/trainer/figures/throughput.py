"""How much a step trains on in a second, and how far from the best that is."""

from gpipe_hpc.planner.costs.device_peaks import peak_flops_per_s
from gpipe_hpc.settings import DataConfig, TokenDataConfig
from gpipe_hpc.trainer.session import Session


def tokens_per_sample(data: DataConfig) -> int | None:
    """Return the tokens of a sample, None where samples are no sequences of tokens."""
    return data.seq_len if isinstance(data, TokenDataConfig) else None


def device_flops_per_s(session: Session) -> float | None:
    """Return what a rank's device could do at best: as the settings say, or known by its name."""
    train, device = session.config.train, session.pipe.world.device
    if train.device_flops_per_s is not None:
        return train.device_flops_per_s
    return peak_flops_per_s(device.name, train.precision) if device.is_accelerator else None


def model_flops_per_s(session: Session, samples_per_s: float | None) -> float | None:
    """Return the model's FLOPs a second, of all ranks; None where layers were not counted.

    Counted are the FLOPs of forward and backward. Those of recomputation are no gain for anybody.
    """
    if session.foreseen is None or samples_per_s is None:
        return None
    return session.foreseen.model_flops * samples_per_s / session.batch_size


def share_of_peak(session: Session, samples_per_s: float | None) -> float | None:
    """Return the model's FLOPs a second over what all devices could do; None if not known."""
    peak, reached = device_flops_per_s(session), model_flops_per_s(session, samples_per_s)
    if peak is None or reached is None:
        return None
    return reached / (peak * session.pipe.world.size)
