"""Data parallelism: all-reduce gradients over the ranks that hold the same parameters.

This package knows parameters and process groups, not stages, layers or schedules. Its replicas are
the ranks with the same parameters. In import order:

- `settings`: how micro-batches are divided over replicas.
- `layout`: arithmetic of flat buffers, buckets and shards, also used by the planner.
- `strategies`: how a bucket is summed: all-reduce, ordered, hierarchical, reduce-scatter.
- `buckets`: the gradients of a bucket: all-reduced, sharded, or local.
- `reducer`: when buckets are all-reduced; `GradientReducer` corresponds to DDP's Reducer.
- `optimizers`: optimizers over a part of the parameters.
- `sharding`: sharded optimizer state (ZeRO).
- `compressors`, `compression`: compressed all-reduce with error feedback.

Names are imported on first use, so that settings load no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpipe_hpc.data_parallel.buckets import Divisor
    from gpipe_hpc.data_parallel.compression import Compression
    from gpipe_hpc.data_parallel.layout import (
        BucketItem,
        Buckets,
        FlatLayout,
        GradientSize,
        OwnedParameter,
        ShardSpan,
        assign_owners,
        fill_buckets,
    )
    from gpipe_hpc.data_parallel.optimizers import (
        Factory,
        NoParameters,
        OptimizerSharding,
        make_optimizer,
    )
    from gpipe_hpc.data_parallel.reducer import AccumulationHook, GradientBuckets, GradientReducer
    from gpipe_hpc.data_parallel.settings import MicrobatchSplit, log_inexact
    from gpipe_hpc.data_parallel.sharding import choose_sharding
    from gpipe_hpc.data_parallel.strategies import ReduceStrategy, choose_strategy

__all__ = [
    "AccumulationHook",
    "BucketItem",
    "Buckets",
    "Compression",
    "Divisor",
    "Factory",
    "FlatLayout",
    "GradientBuckets",
    "GradientReducer",
    "GradientSize",
    "MicrobatchSplit",
    "NoParameters",
    "OptimizerSharding",
    "OwnedParameter",
    "ReduceStrategy",
    "ShardSpan",
    "assign_owners",
    "choose_sharding",
    "choose_strategy",
    "fill_buckets",
    "log_inexact",
    "make_optimizer",
]


def __getattr__(name: str) -> Any:
    homes = {
        "AccumulationHook": "reducer",
        "BucketItem": "layout",
        "Buckets": "layout",
        "Compression": "compression",
        "Divisor": "buckets",
        "Factory": "optimizers",
        "FlatLayout": "layout",
        "GradientBuckets": "reducer",
        "GradientReducer": "reducer",
        "GradientSize": "layout",
        "MicrobatchSplit": "settings",
        "NoParameters": "optimizers",
        "OptimizerSharding": "optimizers",
        "OwnedParameter": "layout",
        "ReduceStrategy": "strategies",
        "ShardSpan": "layout",
        "assign_owners": "layout",
        "choose_sharding": "sharding",
        "choose_strategy": "strategies",
        "fill_buckets": "layout",
        "log_inexact": "settings",
        "make_optimizer": "optimizers",
    }
    if name not in homes:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{homes[name]}"), name)
