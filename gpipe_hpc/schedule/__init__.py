"""Pipeline schedules as tables: build, parse, lower, check and simulate them, without torch."""

from gpipe_hpc.errors import ScheduleError
from gpipe_hpc.schedule.bubble import BubbleCauses, explain_bubble, explain_measured, replayed_end
from gpipe_hpc.schedule.checker import check
from gpipe_hpc.schedule.cluster import Cluster, ReductionTime
from gpipe_hpc.schedule.comparison import (
    ScheduleStats,
    SearchGain,
    compare,
    comparison_table,
    gains_table,
    search_gains,
)
from gpipe_hpc.schedule.costs import Costs, Link
from gpipe_hpc.schedule.families.gpipe import gpipe
from gpipe_hpc.schedule.families.one_f_one_b import one_f_one_b
from gpipe_hpc.schedule.job import Job, ReductionEvent, ReplicaTimes, side_by_side, simulate_job
from gpipe_hpc.schedule.measured import (
    costs_for_others,
    mean_costs,
    mean_forwards,
    recompute_of,
    schedule_of,
)
from gpipe_hpc.schedule.memory import (
    Memory,
    MemoryLevel,
    memory_over_time,
    peak_copies,
    peak_memory,
)
from gpipe_hpc.schedule.parallelism import Parallelism, parallelism_of
from gpipe_hpc.schedule.partial_replicas import (
    WITH_HOLES,
    PartialReplicas,
    in_rows,
    num_rows,
    one_table,
    refuse_whole_replicas,
    replicas_on,
    rows_text,
)
from gpipe_hpc.schedule.passes.averaging import with_averages, without_reductions
from gpipe_hpc.schedule.passes.lowering import forward_only, lower
from gpipe_hpc.schedule.passes.offload import add_offload
from gpipe_hpc.schedule.passes.recompute import add_recompute
from gpipe_hpc.schedule.registry import (
    build,
    canonical_schedule,
    nearest_schedule,
    num_stages,
    schedule_names,
)
from gpipe_hpc.schedule.search.auto import AutoResult, MemoryAllowance, place, search
from gpipe_hpc.schedule.search.bounds import lower_bound
from gpipe_hpc.schedule.simulator import simulate
from gpipe_hpc.schedule.table.actions import Action, Op, parse_action
from gpipe_hpc.schedule.table.dependencies import (
    Channel,
    arrival,
    channel_of,
    counterpart,
    dependencies,
    provides,
    skip_of,
)
from gpipe_hpc.schedule.table.rows import Row
from gpipe_hpc.schedule.table.schedule import (
    Placement,
    Schedule,
    Skip,
    digest,
    with_row,
    without_rows,
)
from gpipe_hpc.schedule.table.text_form import from_text, to_text
from gpipe_hpc.schedule.timeline import Event, Timeline, idle_share

__all__ = [
    "WITH_HOLES",
    "Action",
    "AutoResult",
    "BubbleCauses",
    "Channel",
    "Cluster",
    "Costs",
    "Event",
    "Job",
    "Link",
    "Memory",
    "MemoryAllowance",
    "MemoryLevel",
    "Op",
    "Parallelism",
    "PartialReplicas",
    "Placement",
    "ReductionEvent",
    "ReductionTime",
    "ReplicaTimes",
    "Row",
    "Schedule",
    "ScheduleError",
    "ScheduleStats",
    "SearchGain",
    "Skip",
    "Timeline",
    "add_offload",
    "add_recompute",
    "arrival",
    "build",
    "canonical_schedule",
    "channel_of",
    "check",
    "compare",
    "comparison_table",
    "costs_for_others",
    "counterpart",
    "dependencies",
    "digest",
    "explain_bubble",
    "explain_measured",
    "forward_only",
    "from_text",
    "gains_table",
    "gpipe",
    "idle_share",
    "in_rows",
    "lower",
    "lower_bound",
    "mean_costs",
    "mean_forwards",
    "memory_over_time",
    "nearest_schedule",
    "num_rows",
    "num_stages",
    "one_f_one_b",
    "one_table",
    "parallelism_of",
    "parse_action",
    "peak_copies",
    "peak_memory",
    "place",
    "provides",
    "recompute_of",
    "refuse_whole_replicas",
    "replayed_end",
    "replicas_on",
    "rows_text",
    "schedule_names",
    "schedule_of",
    "search",
    "search_gains",
    "side_by_side",
    "simulate",
    "simulate_job",
    "skip_of",
    "to_text",
    "with_averages",
    "with_row",
    "without_reductions",
    "without_rows",
]
