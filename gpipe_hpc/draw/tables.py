"""Text table that compares all schedules."""

from gpipe_hpc.config import portions_of
from gpipe_hpc.schedule import compare, comparison_table, gains_table, search_gains
from gpipe_hpc.settings import Config


def schedules_table(config: Config, num_stages: int) -> str:
    """Return a table that compares all schedules; for costs by stage, also the gain of a search.

    The table assumes equal stages: of costs given as lists it uses the mean.
    """
    costs = config.draw.costs
    num_microbatches = portions_of(config).most
    forward, inputs, weights = (
        _mean(cost) for cost in (costs.forward, costs.input_gradient, costs.weight_gradient)
    )
    table = comparison_table(
        compare(
            num_stages,
            num_microbatches,
            forward=forward,
            input_gradient=inputs,
            weight_gradient=weights,
            send=_mean(costs.send),
        )
    )
    if not isinstance(costs.forward, list):
        return table
    gains = search_gains(num_stages, num_microbatches, costs.forward, send=_mean(costs.send))
    head = f"Searched orders for stages with F = I = W = {costs.forward}:"
    return f"{table}\n\n{head}\n\n{gains_table(gains)}"


def _mean(cost: float | list[float] | None) -> float:
    if isinstance(cost, list):
        return sum(cost) / len(cost)
    return 1.0 if cost is None else cost
