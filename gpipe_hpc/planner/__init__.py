"""Plan a pipeline: measure layers, partition the model, forecast memory and step time."""

from gpipe_hpc.planner.costs.cost_models import (
    CostModel,
    CountedCosts,
    Example,
    LayerTimes,
    MeasuredCosts,
)
from gpipe_hpc.planner.costs.measured import LayerCost, measure_layers
from gpipe_hpc.planner.cutting.cut_table import check_conservation, cut_table
from gpipe_hpc.planner.cutting.minimax import check_given_cut, minimax, uniform
from gpipe_hpc.planner.cutting.partition import POLICIES, Partition, choose_partition
from gpipe_hpc.planner.fit import FIT, Fit, fit_stages, on_stages
from gpipe_hpc.planner.layout import Layout, cut, lay_out
from gpipe_hpc.planner.layout_broadcast import broadcast_layout
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.planner.request import Request, Settings

__all__ = [
    "FIT",
    "POLICIES",
    "CostModel",
    "CountedCosts",
    "Example",
    "Fit",
    "LayerCost",
    "LayerTimes",
    "Layout",
    "MeasuredCosts",
    "OptimizerMemory",
    "Partition",
    "Request",
    "Settings",
    "broadcast_layout",
    "check_conservation",
    "check_given_cut",
    "choose_partition",
    "cut",
    "cut_table",
    "fit_stages",
    "lay_out",
    "measure_layers",
    "minimax",
    "on_stages",
    "uniform",
]
