"""Throughput of training, absolute and relative to the peak of the devices."""

from gpipe_hpc.planner.costs.device_peaks import peak_flops_per_s
from gpipe_hpc.settings import DataConfig, TokenDataConfig
from gpipe_hpc.trainer.session import Session


def tokens_per_sample(data: DataConfig) -> int | None:
    """Return the number of tokens per sample; None if samples are not token sequences."""
    return data.seq_len if isinstance(data, TokenDataConfig) else None


def device_flops_per_s(session: Session) -> float | None:
    """Return the peak FLOP/s of a rank's device, from the settings or its name; None if unknown."""
    train, device = session.config.train, session.pipe.world.device
    if train.device_flops_per_s is not None:
        return train.device_flops_per_s
    return peak_flops_per_s(device.name, train.precision) if device.is_accelerator else None


def model_flops_per_s(session: Session, samples_per_s: float | None) -> float | None:
    """Return the model's FLOP/s over all ranks; None if the layers could not be counted.

    FLOPs of forward and backward are counted, without recomputation.
    """
    if session.foreseen is None or samples_per_s is None:
        return None
    return session.foreseen.model_flops * samples_per_s / session.batch_size


def share_of_peak(session: Session, samples_per_s: float | None) -> float | None:
    """Return the model FLOPs utilization (MFU) over all devices, a fraction; None if unknown."""
    peak, reached = device_flops_per_s(session), model_flops_per_s(session, samples_per_s)
    if peak is None or reached is None:
        return None
    return reached / (peak * session.pipe.world.size)
