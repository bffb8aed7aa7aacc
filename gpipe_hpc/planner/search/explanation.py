"""Explain in a sentence why one layout is slower than another."""

from typing import Final

from gpipe_hpc.planner.search.trial import CandidateEvaluation
from gpipe_hpc.units import bytes_text

_ALIKE: Final = 0.0005  # relative differences below this are reported as none
_WORTH_TELLING: Final = 0.25  # of the total difference; smaller parts are not reported


def parts_s(trial: CandidateEvaluation) -> dict[str, float]:
    """Return the mean seconds of ranks in a step by cause; they add up to the step time."""
    causes = trial.causes
    return {
        "compute": trial.compute_s,
        "fill and drain": causes.fill_and_drain * trial.step_s,
        "imbalance": causes.imbalance * trial.step_s,
        "transfers": causes.transfers * trial.step_s,
        "reduction": causes.reduction_tail * trial.step_s,
        "optimizer and overhead": trial.overhead_s,
    }


def explain_slower(trial: CandidateEvaluation, best: CandidateEvaluation) -> str:
    """Describe how much slower a layout is than the best, and which parts take longer."""
    slower = trial.step_s / best.step_s - 1
    if slower < _ALIKE:
        more = trial.nbytes - best.nbytes
        return f"as fast; {bytes_text(more)} more memory" if more > 0 else "as fast"
    own, least = parts_s(trial), parts_s(best)
    whole = trial.step_s - best.step_s
    more_s = {name: seconds - least[name] for name, seconds in own.items()}
    ranked = sorted(more_s, key=lambda name: -more_s[name])
    longer = [name for name in ranked if more_s[name] >= _WORTH_TELLING * whole] or ranked[:1]
    reasons = [f"{_reason(name, trial, best)} +{1e3 * more_s[name]:.3g} ms" for name in longer]
    gains = [name for name in ranked if -more_s[name] >= _WORTH_TELLING * whole]
    saved = [f"{name} {1e3 * more_s[name]:.3g} ms" for name in gains]
    but = f", though {', '.join(saved)}" if saved else ""
    return f"{100 * slower:.1f} % slower: {', '.join(reasons)}{but}"


def _reason(name: str, trial: CandidateEvaluation, best: CandidateEvaluation) -> str:
    """Return the name of a part of the step, with the cause of additional compute if known."""
    if name != "compute":
        return name
    if trial.candidate.precision != best.candidate.precision:
        return f"compute ({trial.candidate.precision})"
    if trial.candidate.recompute != best.candidate.recompute and trial.recomputes:
        return "compute (recomputation)"
    samples = [each.candidate.replicas * each.candidate.microbatches for each in (trial, best)]
    return "compute (smaller micro-batches)" if samples[0] > samples[1] else "compute"
