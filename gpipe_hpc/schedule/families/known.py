"""Registry of the published schedules by name; add a new schedule here."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from gpipe_hpc.schedule.families.chimera import chimera
from gpipe_hpc.schedule.families.dualpipe import dualpipe, dualpipe_v
from gpipe_hpc.schedule.families.gems import gems
from gpipe_hpc.schedule.families.gpipe import gpipe
from gpipe_hpc.schedule.families.hanayo import hanayo
from gpipe_hpc.schedule.families.interleaved import interleaved
from gpipe_hpc.schedule.families.looped_bfs import looped_bfs
from gpipe_hpc.schedule.families.one_f_one_b import one_f_one_b
from gpipe_hpc.schedule.families.rerouted import rerouted
from gpipe_hpc.schedule.families.zero_bubble import zb_h1, zb_h2
from gpipe_hpc.schedule.families.zero_bubble_v import v_half, zb_v
from gpipe_hpc.schedule.table.schedule import Schedule

# Each function takes (ranks, microbatches) and its own options as further keywords.
FAMILIES: Final[Mapping[str, Callable[..., Schedule]]] = MappingProxyType(
    {
        "gpipe": gpipe,
        "one_f_one_b": one_f_one_b,
        "looped_bfs": looped_bfs,
        "interleaved": interleaved,
        "zb_h1": zb_h1,
        "zb_h2": zb_h2,
        "zb_v": zb_v,
        "v_half": v_half,
        "gems": gems,
        "chimera": chimera,
        "dualpipe": dualpipe,
        "dualpipe_v": dualpipe_v,
        "hanayo": hanayo,
        "rerouted": rerouted,
    }
)
