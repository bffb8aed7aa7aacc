"""Data parallelism: all-reduce gradients over the ranks that hold the same parameters.

This package knows parameters and process groups, not stages, layers or schedules. Its replicas are
the ranks with the same parameters. In import order:

- `layout`: arithmetic of flat buffers, buckets and shards, also used by the planner.
- `buckets`: the gradients of a bucket (all-reduced, sharded or local), and how they are summed:
  all-reduce, ordered, hierarchical, reduce-scatter.
- `reducer`: when buckets are all-reduced; `GradientReducer` corresponds to DDP's Reducer.
- `optimizer_checks`: whether an optimizer can update a part of the parameters.
- `sharding`: optimizers of a rank, with sharded state (ZeRO).
- `compressors`, `compression`: compressed all-reduce with error feedback.
"""

from gpipe_hpc.data_parallel.buckets import Divisor, ReduceStrategy, choose_strategy
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
from gpipe_hpc.data_parallel.reducer import AccumulationHook, GradientBuckets, GradientReducer
from gpipe_hpc.data_parallel.sharding import (
    Factory,
    NoParameters,
    OptimizerSharding,
    choose_sharding,
    make_optimizer,
)

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
    "NoParameters",
    "OptimizerSharding",
    "OwnedParameter",
    "ReduceStrategy",
    "ShardSpan",
    "assign_owners",
    "choose_sharding",
    "choose_strategy",
    "fill_buckets",
    "make_optimizer",
]
