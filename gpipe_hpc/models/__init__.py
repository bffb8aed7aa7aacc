"""Layers of a pipeline, long skips, tied weights, BatchNorm, losses and predefined models."""

from importlib import import_module
from importlib.util import find_spec

from gpipe_hpc.models.batchnorm import (
    Conversion,
    Moments,
    PipelineStep,
    PooledBatchNorm,
    SumOver,
    convert_batchnorm,
    normalising_together,
    pooled,
    refuse_shared_statistics,
    refuse_single_values,
    shifted_sums,
)
from gpipe_hpc.models.building import build_abstract, build_layer, seeded_generators
from gpipe_hpc.models.counting import (
    count_parameters,
    layer_parameters,
    parameter_sizes,
    sizes_of_layers,
)
from gpipe_hpc.models.cut import layer_stages, long_skips, skip_routes, stage_layers
from gpipe_hpc.models.direction import looks_back, sees_ahead
from gpipe_hpc.models.layers import (
    Layer,
    LayerSpec,
    global_name,
    layer_name,
    named_layer_parameters,
    normalise_layers,
)
from gpipe_hpc.models.losses import (
    LossFunction,
    Reductions,
    TorchLoss,
    bert_pretraining,
    causal_lm,
    classification,
    classification_with_auxiliary,
    loss_function,
    mean_squared_error,
    segmentation,
    token_cross_entropy,
    torch_loss,
)
from gpipe_hpc.models.randomness import (
    GENERATOR_LOCK,
    ProcessStates,
    init_key,
    layer_key,
    message_key,
    microbatch_key,
    microbatch_keys,
    microbatch_prefix,
    mix64,
    numpy_is_seedable,
    numpy_words,
    process_generators_kept,
    seed_numpy,
    seed_python,
    source_key,
)
from gpipe_hpc.models.reports import (
    CURRENT_REPORTS,
    MAIN_LOSS,
    Reports,
    add_loss,
    add_metric,
    current_reports,
    reporting,
)
from gpipe_hpc.models.skips import Skip, SkipNames, find_skips, run_layer, run_layers, skip_names
from gpipe_hpc.models.ties import Tie, find_ties, first_names, parameter_at, replace_parameter
from gpipe_hpc.models.zoo.alexnet import build_alexnet
from gpipe_hpc.models.zoo.amoebanet import build_amoebanet_d
from gpipe_hpc.models.zoo.bert import build_bert
from gpipe_hpc.models.zoo.googlenet import build_googlenet
from gpipe_hpc.models.zoo.gpt import build_gpt
from gpipe_hpc.models.zoo.mlp import build_mlp
from gpipe_hpc.models.zoo.names import build_model, model_names
from gpipe_hpc.models.zoo.resnet import build_resnet, build_small_resnet
from gpipe_hpc.models.zoo.resnet_v2 import build_resnet_v2
from gpipe_hpc.models.zoo.transformer import build_transformer
from gpipe_hpc.models.zoo.unet import build_unet
from gpipe_hpc.models.zoo.vgg import build_vgg

__all__ = [
    "CURRENT_REPORTS",
    "GENERATOR_LOCK",
    "MAIN_LOSS",
    "Conversion",
    "Layer",
    "LayerSpec",
    "LossFunction",
    "Moments",
    "PipelineStep",
    "PooledBatchNorm",
    "ProcessStates",
    "Reductions",
    "Reports",
    "Skip",
    "SkipNames",
    "SumOver",
    "Tie",
    "TorchLoss",
    "add_loss",
    "add_metric",
    "bert_pretraining",
    "build_abstract",
    "build_alexnet",
    "build_amoebanet_d",
    "build_bert",
    "build_googlenet",
    "build_gpt",
    "build_layer",
    "build_mlp",
    "build_model",
    "build_resnet",
    "build_resnet_v2",
    "build_small_resnet",
    "build_transformer",
    "build_unet",
    "build_vgg",
    "causal_lm",
    "classification",
    "classification_with_auxiliary",
    "convert_batchnorm",
    "count_parameters",
    "current_reports",
    "find_skips",
    "find_ties",
    "first_names",
    "global_name",
    "init_key",
    "layer_key",
    "layer_name",
    "layer_parameters",
    "layer_stages",
    "long_skips",
    "looks_back",
    "loss_function",
    "mean_squared_error",
    "message_key",
    "microbatch_key",
    "microbatch_keys",
    "microbatch_prefix",
    "mix64",
    "model_names",
    "named_layer_parameters",
    "normalise_layers",
    "normalising_together",
    "numpy_is_seedable",
    "numpy_words",
    "parameter_at",
    "parameter_sizes",
    "pooled",
    "process_generators_kept",
    "refuse_shared_statistics",
    "refuse_single_values",
    "replace_parameter",
    "reporting",
    "run_layer",
    "run_layers",
    "seed_numpy",
    "seed_python",
    "seeded_generators",
    "sees_ahead",
    "segmentation",
    "shifted_sums",
    "sizes_of_layers",
    "skip_names",
    "skip_routes",
    "source_key",
    "stage_layers",
    "token_cross_entropy",
    "torch_loss",
]


def __getattr__(name: str) -> object:
    """Return a zoo module by its former name, which settings of old runs contain."""
    if find_spec(f"gpipe_hpc.models.zoo.{name}") is None:
        raise AttributeError(f"module 'gpipe_hpc.models' has no attribute {name!r}")
    return import_module(f"gpipe_hpc.models.zoo.{name}")
