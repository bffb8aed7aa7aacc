"""Checkpoint intervals and goodput in closed form.

Young, A first order approximation to the optimum checkpoint interval, 1974; Daly, A higher order
estimate of the optimum checkpoint interval for restart dumps, 2006. Legend: M mean time between
failures of the job, save_s one checkpoint, interval_s the work between two of them.
"""

from math import exp, expm1, sqrt


def young_s(mtbf_s: float, save_s: float) -> float:
    """Return Young's interval: sqrt(2 save M)."""
    return sqrt(2 * save_s * mtbf_s)


def daly_s(mtbf_s: float, save_s: float) -> float:
    """Return Daly's interval (his equation 37), or M if a checkpoint takes more than 2 M."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    half = save_s / (2 * mtbf_s)
    return young_s(mtbf_s, save_s) * (1 + sqrt(half) / 3 + half / 9) - save_s


def daly_goodput(mtbf_s: float, interval_s: float, save_s: float, recovery_s: float) -> float:
    """Return the share of time spent on lasting work (his equation 20, inverted).

    Failures occur at any time, also during checkpoints and during `recovery_s`; each costs the work
    since the last checkpoint, and a complete recovery.
    """
    per_interval = mtbf_s * exp(recovery_s / mtbf_s) * expm1((interval_s + save_s) / mtbf_s)
    return interval_s / per_interval
