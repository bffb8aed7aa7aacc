"""What layers cost, and how they are cut into stages."""

from gpipe_hpc.planning.budget import Budget, choose_recompute, fit_recompute
from gpipe_hpc.planning.choice import POLICIES, Example, Partition, choose_partition
from gpipe_hpc.planning.measured import LayerCost, measure_layers
from gpipe_hpc.planning.optimizer import OptimizerMemory
from gpipe_hpc.planning.partition import by_hand, by_parameters, minimax, uniform
from gpipe_hpc.planning.table import check_conservation, cut_table

__all__ = [
    "POLICIES",
    "Budget",
    "Example",
    "LayerCost",
    "OptimizerMemory",
    "Partition",
    "by_hand",
    "by_parameters",
    "check_conservation",
    "choose_partition",
    "choose_recompute",
    "cut_table",
    "fit_recompute",
    "measure_layers",
    "minimax",
    "uniform",
]
