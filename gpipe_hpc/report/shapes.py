"""Schema of the run files that a report reads, and checks of their consistency."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from gpipe_hpc.small_files import Number, OrNull

_COUNT: Final = Number(0, is_whole=True)
_POSITIVE: Final = Number(1, is_whole=True)
_SECONDS: Final = Number(0)
_LEAST_PACE: Final = 1e-9
_ANY_SECONDS: Final = OrNull(_SECONDS)

SUMMARY: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "outcome": str,
        "error": OrNull(str),
        "began": str,
        "written": str,
        "first_step": OrNull(_COUNT),
        "last_step": _COUNT,
        "steps_asked": _COUNT,
        "layout": {
            "ranks": _POSITIVE,
            "stages": _POSITIVE,
            "replicas": _POSITIVE,
            "microbatches": _POSITIVE,
            "schedule": str,
            "recompute": str,
            "partition": str,
            "layers_of_stages": [_COUNT],
            "paces": OrNull([Number(_LEAST_PACE)]),
        },
        "loss": OrNull({"last": OrNull(Number()), "validation": OrNull(Number())}),
        "throughput": OrNull(
            dict.fromkeys(
                ("samples_per_s", "tokens_per_s", "model_flops_per_s", "share_of_peak"),
                OrNull(Number()),
            )
        ),
        "step": OrNull({"bubble": OrNull(Number())}),
        "expected": OrNull({"pipeline_s": _SECONDS, "bubble": Number()}),
        "balance": OrNull({"weights": [_COUNT], "gain": Number()}),
        "traced_step": OrNull({"file": str}),
        "peak_memory_meaning": OrNull(str),
        "ranks": OrNull(
            [
                {
                    "rank": _COUNT,
                    "stage_rank": _COUNT,
                    "host": str,
                    "stages": [_COUNT],
                    "busy_s": _ANY_SECONDS,
                    "reading_s": _ANY_SECONDS,
                    "peak_memory_bytes": _COUNT,
                    "memory_before_bytes": _COUNT,
                    "layers": OrNull([{"layer": _COUNT, "forward_s": _SECONDS}]),
                    "planned_memory": OrNull(
                        {
                            "total_bytes": _COUNT,
                            "activation_bytes": _COUNT,
                            "workspace_bytes": OrNull(_COUNT),  # older runs did not count it
                        }
                    ),
                }
            ]
        ),
        "layers": OrNull(
            [
                {
                    "kind": str,
                    "parameters": _COUNT,
                    "forward_flops": Number(0),
                    "backward_flops": Number(0),
                }
            ]
        ),
        "versions": OrNull({}),
        "advice": OrNull(
            [
                {
                    "settings": str,
                    "gain": Number(),
                    "more_bytes": OrNull(Number()),
                    "assumes": OrNull(str),
                    "without": OrNull([str]),
                }
            ]
        ),
    }
)


def disagreement(summary: Mapping[str, Any]) -> str | None:
    """Describe an inconsistency between valid parts of a summary, or return None."""
    layout, ranks = summary["layout"], summary.get("ranks") or []
    size, counts = layout["ranks"], layout["layers_of_stages"]
    if size % layout["replicas"]:
        return f"{layout['replicas']} replicas do not divide {size} ranks"
    numbers = [each["rank"] for each in ranks]
    # The summary of a failed run contains only the ranks that could still report.
    wanted = sorted({number for number in numbers if number < size})
    if summary["outcome"] != "failed" and numbers:
        wanted = list(range(size))
    if numbers != wanted:
        return f"expected {size} ranks in order in ranks, got {len(ranks)} or another order"
    per_replica = size // layout["replicas"]
    for each in ranks:
        if each["stage_rank"] >= per_replica:
            return f"rank {each['rank']} is not within its replica of {per_replica} ranks"
    return _layers_that_lack(ranks, sum(counts), len(summary.get("layers") or []))


def _layers_that_lack(
    ranks: Sequence[Mapping[str, Any]], num_cut: int, num_told: int
) -> str | None:
    indices = {own["layer"] for each in ranks for own in each.get("layers") or ()}
    most = max(indices, default=-1)
    if most >= num_cut or (indices and num_told and most >= num_told):
        return f"layer {most} was timed, but the cut has {num_cut} layers and {num_told} are listed"
    return None
