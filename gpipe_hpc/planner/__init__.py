"""Plan a pipeline: measure layers, partition the model, forecast memory and step time."""

from gpipe_hpc.planner.costs.gauges import Counted, Example, Gauge, LayerTimes, Measured
from gpipe_hpc.planner.costs.measured import LayerCost, measure_layers
from gpipe_hpc.planner.cutting.cut_table import check_conservation, cut_table
from gpipe_hpc.planner.cutting.minimax import by_hand, minimax, uniform
from gpipe_hpc.planner.cutting.partition import POLICIES, Partition, choose_partition
from gpipe_hpc.planner.fit import FIT, Fit, fit_stages, on_stages
from gpipe_hpc.planner.handing_out import hand_out
from gpipe_hpc.planner.layout import Layout, cut, lay_out
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.planner.request import Request, Settings

__all__ = [
    "FIT",
    "POLICIES",
    "Counted",
    "Example",
    "Fit",
    "Gauge",
    "LayerCost",
    "LayerTimes",
    "Layout",
    "Measured",
    "OptimizerMemory",
    "Partition",
    "Request",
    "Settings",
    "by_hand",
    "check_conservation",
    "choose_partition",
    "cut",
    "cut_table",
    "fit_stages",
    "hand_out",
    "lay_out",
    "measure_layers",
    "minimax",
    "on_stages",
    "uniform",
]
