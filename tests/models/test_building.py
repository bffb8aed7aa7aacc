import threading

import pytest
import torch
from torch import nn

from gpipe_hpc import Pipeline
from gpipe_hpc.device.device import HostDevice
from gpipe_hpc.errors import ConfigError, ModelError
from gpipe_hpc.models import (
    LayerSpec,
    build_abstract,
    build_gpt,
    build_layer,
    init_key,
    seeded_generators,
)


def states_equal(one: nn.Module, two: nn.Module) -> bool:
    left, right = one.state_dict(), two.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


def test_weights_depend_on_seed_and_index_alone():
    layers = build_gpt(32, 8, num_layers=2, num_heads=2, width=16)
    whole = [build_layer(layer, index=i, seed=5) for i, layer in enumerate(layers)]
    torch.rand(17)
    for index in reversed(range(len(layers))):
        alone = build_layer(layers[index], index=index, seed=5)
        assert states_equal(alone, whole[index])
    # Equal specs at another index, or with another seed, have other weights.
    assert not states_equal(whole[1], whole[3])
    assert not states_equal(build_layer(layers[3], index=3, seed=6), whole[3])


def test_weights_are_those_after_manual_seed_of_the_key():
    built = build_layer(LayerSpec(nn.Linear, 4, 4), index=3, seed=11)
    torch.manual_seed(init_key(11, 3))
    assert states_equal(built, nn.Linear(4, 4))


def test_random_state_is_left_alone_also_after_a_failure():
    def failing() -> nn.Module:
        torch.rand(5)
        raise OSError("no such file")

    before = torch.get_rng_state()
    build_layer(LayerSpec(nn.Linear, 4, 4), index=0, seed=1)
    with pytest.raises(ModelError):
        build_layer(LayerSpec(failing), index=0, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_built_modules_keep_their_weights_and_identity():
    module = nn.Linear(3, 3)
    weight = module.weight.detach().clone()
    assert build_layer(module, index=2, seed=9) is module
    assert torch.equal(module.weight, weight)


def test_meta_builds_without_values():
    built = build_abstract(LayerSpec(nn.Linear, 10**6, 10**6), index=0)
    assert built.weight.is_meta
    assert built.weight.numel() == 10**12


def test_a_callers_default_device_does_not_leak_in():
    with torch.device("meta"):
        built = build_layer(LayerSpec(nn.Linear, 2, 2), index=0, seed=0)
    assert built.weight.device.type == "cpu"


def test_a_layer_may_be_built_on_the_device_itself():
    """With on_device, the factory runs on the device with the same seeds; else on the CPU."""
    seen: list[torch.Tensor] = []

    class Watched(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            seen.append(self.weight.data)

    class Elsewhere(HostDevice):
        torch = torch.device("meta")

    spec = LayerSpec(Watched)
    on_host = build_layer(spec, index=1, seed=5)
    on_device = build_layer(spec, index=1, seed=5, device=HostDevice(), on_device=True)
    assert states_equal(on_host, on_device)
    with pytest.raises(ModelError, match="meta"):
        build_layer(spec, index=1, seed=5, device=Elsewhere(), on_device=True)
    build_layer(spec, index=1, seed=5, device=Elsewhere())
    assert [each.device.type for each in seen] == ["cpu", "cpu", "meta", "cpu"]


def test_threads_do_not_disturb_each_other():
    expected = [build_layer(LayerSpec(nn.Linear, 64, 64), index=i, seed=3) for i in range(4)]
    wrong = []

    def rank(index: int) -> None:
        for _ in range(30):
            built = build_layer(LayerSpec(nn.Linear, 64, 64), index=index, seed=3)
            if not states_equal(built, expected[index]):
                wrong.append(index)

    threads = [threading.Thread(target=rank, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_seeded_generators_nest():
    before = torch.get_rng_state()
    with seeded_generators(1):
        first = torch.rand(1)
        with seeded_generators(2):
            torch.rand(1)
        second = torch.rand(1)
    with seeded_generators(1):
        assert torch.equal(torch.cat([first, second]), torch.cat([torch.rand(1), torch.rand(1)]))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (LayerSpec(nn.Linear, 3), r"layers\.6: the factory Linear failed.*TypeError.*out_feat"),
        (LayerSpec(dict, a=1), r"layers\.6: the factory dict must return an nn.Module, got dict"),
        (LayerSpec(nn.LazyLinear, 3), r"layers\.6: weight has no shape yet"),
    ],
)
def test_failures_name_layer_and_factory(layer: LayerSpec, message: str):
    with pytest.raises(ModelError, match=message):
        build_layer(layer, index=6, seed=0)


def test_built_meta_modules_are_refused():
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    with pytest.raises(ModelError, match=r"layers\.1: weight is on the meta device"):
        build_layer(module, index=1, seed=0)


def test_spec_build_names_the_spec():
    with pytest.raises(ModelError, match=r"LayerSpec\(Linear, 3\): the factory Linear failed"):
        LayerSpec(nn.Linear, 3).build()


def test_a_pipeline_builds_where_it_is_asked_to():
    """On a CPU, both values of build_on give the same weights."""
    spec = LayerSpec(nn.Linear, 4, 4)
    pipes = [Pipeline([spec, spec], nn.MSELoss(), build_on=where) for where in ("cpu", "device")]
    one, two = (dict(pipe.named_parameters()) for pipe in pipes)
    assert all(torch.equal(one[name], two[name]) for name in one)
    with pytest.raises(ConfigError, match=r"build_on.*cpu, device.*gpu"):
        Pipeline([spec], nn.MSELoss(), build_on="gpu")
