"""What a plan says of the optimizer's step and of what is saved, against memory that is tracked."""

import itertools

import pytest
import torch
from torch import nn

from gpipe_hpc import LayerSpec, Pipeline, run_on_threads
from gpipe_hpc.checkpoint import BackgroundSaver
from gpipe_hpc.checkpoint.in_memory import open_copies
from gpipe_hpc.config import compose_config
from gpipe_hpc.models import normalise_layers
from gpipe_hpc.optim.optimizer import build_optimizer, optimizer_memory
from gpipe_hpc.planner.costs.counted import count_model
from gpipe_hpc.planner.forecast import RankForecast, rank_states
from gpipe_hpc.planner.memory.optimizer import OptimizerMemory
from gpipe_hpc.planner.memory.workspace import LiveBytes
from gpipe_hpc.planner.stages import count_stages
from gpipe_hpc.settings import AdamWConfig, LAMBConfig, LARSConfig, RMSPropConfig, SGDConfig
from gpipe_hpc.trainer.pipeline_request import request_of
from tests.support import mean_square

WIDTH = 64
SCALARS = 2000
"""Bytes of steps, norms and ratios, of which a plan knows nothing."""
CONFIGS = {
    "adamw": AdamWConfig(),
    "sgd": SGDConfig(),
    "sgd with all": SGDConfig(momentum=0.9, nesterov=True, weight_decay=0.1),
    "rmsprop": RMSPropConfig(),
    "rmsprop with all": RMSPropConfig(momentum=0.9, centered=True, weight_decay=0.1),
    "lars": LARSConfig(),
    "lamb": LAMBConfig(),
}


def layers(dtype=torch.float32):
    wide = LayerSpec(nn.Linear, WIDTH, 3 * WIDTH, dtype=dtype)
    return [wide, LayerSpec(nn.Linear, 3 * WIDTH, WIDTH, dtype=dtype)] * 4


def counted(own):
    return count_model(normalise_layers(own), torch.ones(2, WIDTH, dtype=own[0].kwargs["dtype"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_plan_counts_what_a_step_of_the_optimizer_takes_for_its_time(name, dtype):
    """LAMB had two copies of all weights, LARS one; no plan said so, nor of masters' gradients."""
    config, own = CONFIGS[name], layers(dtype)
    model = nn.Sequential(*(spec.factory(*spec.args, **spec.kwargs) for spec in own))
    optimizer = build_optimizer(list(model.named_parameters()), config)
    live = LiveBytes()
    for _ in range(2):  # the first makes the states, too
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with live.above() as most:
            optimizer.step()
    weights = counted(own).weights(range(len(own)))
    planned = optimizer_memory(config).update_of(weights)
    assert planned - SCALARS <= most() <= planned + SCALARS
    largest = max(weight.num_elements for weight in weights)
    masters = 4 * sum(w.num_elements for w in weights) * (dtype is torch.bfloat16)
    assert planned <= masters + 3 * 4 * largest


@pytest.mark.parametrize("name", ["sgd", "sgd with all", "rmsprop", "rmsprop with all"])
def test_on_a_device_torchs_own_optimizers_take_all_weights_at_once(name):
    """By the form that they choose there, here on the host."""
    config, own = CONFIGS[name], layers()
    model = nn.Sequential(*(spec.factory(*spec.args, **spec.kwargs) for spec in own))
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    (optimizer,) = [build_optimizer([("w", matrices[0])], config)]
    options = {**optimizer.defaults, "weight_decay": config.weight_decay, "foreach": True}
    every = type(optimizer)(matrices, **{k: v for k, v in options.items() if v is not None})
    live = LiveBytes()
    for _ in range(2):
        for parameter in matrices:
            parameter.grad = torch.ones_like(parameter)
        with live.above() as most:
            every.step()
    weights = [w for w in counted(own).weights(range(len(own))) if w.num_elements > 3 * WIDTH]
    planned = optimizer_memory(config)._replace(is_on_device=True).update_of(weights)
    assert planned - SCALARS <= most() <= planned + SCALARS


def test_on_a_device_our_own_optimizers_have_packs_in_hand():
    weights = counted(layers()).weights(range(8))
    whole = sum(weight.nbytes for weight in weights)
    lamb = optimizer_memory(LAMBConfig())._replace(is_on_device=True)
    assert lamb.update_of(weights) == 2 * whole, "one pack of them all"
    assert optimizer_memory(AdamWConfig())._replace(is_on_device=True).update_of(weights) == 0
    large = [LayerSpec(nn.Linear, WIDTH, 2**15, dtype=torch.float32, bias=False)]
    (weight,) = counted(large).weights(range(1))
    assert lamb.update_of([weight] * 8) == 2 * 4 * 2**22, "of 2 M numbers two are a pack"


def test_the_sum_has_the_larger_of_a_step_and_its_update():
    held = {"stages": (0,), "parameters": 1, "weight_bytes": 10, "cast_bytes": 0}
    held |= {"gradient_bytes": 10, "optimizer_bytes": 20, "workspace_bytes": 3, "process_bytes": 0}
    rank = RankForecast(**held, activation_bytes=4, sent_bytes=0, update_bytes=5, saving_bytes=30)
    assert rank.total_bytes == 40 + 7 + 30
    more = RankForecast(**held, activation_bytes=4, sent_bytes=0, update_bytes=9, saving_bytes=30)
    assert more.total_bytes == 40 + 9 + 30
    apart = RankForecast(
        **held, activation_bytes=4, sent_bytes=0, saving_bytes=30, is_on_device=True
    )
    assert apart.total_bytes == 40 + 7, "on an accelerator buffers lie on the host"


LAYOUTS = [
    (1, 1, "gpipe", "none"),
    (2, 1, "gpipe", "none"),
    (2, 2, "gpipe", "none"),
    (2, 2, "gpipe", "flat"),
    (2, 1, "chimera", "none"),
]
SAVED = [("background",), ("neighbours",), ("background", "neighbours")]


@pytest.mark.parametrize(("layout", "what"), list(itertools.product(LAYOUTS, SAVED)))
def test_a_plan_counts_what_saving_keeps(tmp_path, layout, what):
    """Copies for checkpoints in the background and for neighbours were in no plan."""
    stages, replicas, schedule, shard = layout
    config = AdamWConfig()

    def body(world):
        pipe = Pipeline(
            layers(),
            mean_square,
            stages=stages,
            replicas=replicas,
            microbatches=2,
            schedule=schedule,
            partition="uniform",
            world=world,
            outer={"shard": shard},
        )
        optimizer = pipe.optimizer(lambda _: build_optimizer(pipe.named_parameters(), config))
        inputs = torch.ones(8, WIDTH)
        part = pipe.share(8)
        pipe.step(inputs[part], inputs[part])
        optimizer.step()
        buffers, files = [], 0
        if "background" in what:
            saver = BackgroundSaver(pipe)
            saver.start(tmp_path / "saved", optimizer)
            saver.finish()
            buffers.append(saver._buffer)
        if "neighbours" in what:
            root = tmp_path / f"host{world.rank}"
            root.mkdir(exist_ok=True)
            copies = open_copies(world, root, "run", {"lineage": "a"})
            for _ in range(2):
                copies.save(pipe, optimizer, {})
                pipe.restore_position(pipe.steps_done + 1, 1.0, None)
            buffers.append(copies._buffer)
            files = sum(path.stat().st_size for path in root.glob("*/*/rank*"))
        return pipe.layout, sum(len(buffer._bytes) for buffer in buffers), files

    found = run_on_threads(stages * replicas, body)
    model = counted(layers())
    for rank, (plan, buffers, files) in enumerate(found):
        memory = optimizer_memory(config)._replace(
            replicas=replicas,
            saves_in_background="background" in what,
            copies_to_neighbours="neighbours" in what,
        )
        own = rank_states(
            model,
            count_stages(model, plan.partition.counts),
            plan.schedule.placement,
            rank % stages,
            memory,
            plan.sharing,
        )
        one = model.layers[0].weights[0].nbytes  # by which ranks differ that divide what is written
        near = SCALARS + 9000 * len(what)  # headers
        if "background" not in what:
            assert own.saving_bytes - near <= buffers <= own.saving_bytes + near
        else:
            assert own.saving_bytes - one - near <= buffers <= own.saving_bytes + one + near
        if len(found) > 1:
            assert own.neighbour_bytes - one <= files <= own.neighbour_bytes + one + 4 * near
        else:
            assert 2 * files == pytest.approx(own.neighbour_bytes, rel=0.05), "two on a single host"


def test_settings_say_what_is_saved():
    words = ["checkpoint.every=10", "checkpoint.in_background=true", "checkpoint.neighbour_every=5"]
    memory = request_of(compose_config(words)).kept_states
    assert memory.saves_in_background and memory.copies_to_neighbours
    none = request_of(
        compose_config(["checkpoint.every=0", "checkpoint.in_background=true"])
    ).kept_states
    assert not none.saves_in_background, "no checkpoint is written"
    assert OptimizerMemory.of(2).saving_of([], 1, 0) == 0
