"""Every family of transformers: it trains as transformers does, or is refused by name; plans."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from gpipe_hpc import Pipeline, plan, run_on_threads
from gpipe_hpc.errors import ModelError
from gpipe_hpc.models.huggingface import causal_lm, huggingface_layers

TOLERANCE = 1e-10
VOCABULARY = 64

# What makes a model small, by the names that configs of transformers have for it.
SIZES = """
1: n_group topk_group first_k_dense_replace mamba_n_groups n_groups bos_token_id
2: num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers eos_token_id
2: num_key_value_heads num_kv_heads num_experts_per_tok moe_k moe_topk linear_num_key_heads
4: num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads
4: mamba_n_heads mamba_num_heads linear_num_value_heads linear_conv_kernel_dim rotary_dim
4: sliding_window num_experts num_local_experts n_routed_experts moe_num_experts
4: mamba_chunk_size chunk_size time_step_rank mamba_dt_rank
8: head_dim attention_head_size hidden_size_per_head qk_rope_head_dim qk_nope_head_dim v_head_dim
8: qk_head_dim mamba_d_state ssm_state_size state_size linear_key_head_dim linear_value_head_dim
16: moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size q_lora_rank
16: moe_shared_expert_intermediate_size kv_lora_rank mamba_d_head mamba_head_dim
32: hidden_size d_model n_embd dim word_embed_proj_dim embedding_size emb_dim hidden_dim
32: attention_hidden_size lru_width
48: intermediate_size ffn_dim n_inner d_ff d_inner dff ffn_hidden_size decoder_ffn_dim
48: encoder_ffn_dim feed_forward_size
64: max_position_embeddings n_positions n_ctx max_seq_len seq_length max_sequence_length
64: vocab_size mamba_d_ssm
0: pad_token_id
"""
SMALL = MappingProxyType(
    {
        name: int(size)
        for size, _, names in (line.partition(":") for line in SIZES.strip().splitlines())
        for name in names.split()
    }
)
# Attention with latent keys has as many heads of them as of queries.
LATENT = "axk1 axk2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa minicpm3 youtu"
OWN = MappingProxyType(
    {
        **{kind: {"num_key_value_heads": 4, "head_dim": 8} for kind in LATENT.split()},
        **{kind: {"head_dim": 8} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
        **{kind: {"layer_types": ["mamba", "hybrid"]} for kind in ("zamba", "zamba2")},
        "zaya": {"num_experts_per_tok": 1},
        "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
        "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
        "mamba2": {"num_heads": 4, "head_dim": 16, "chunk_size": 4},
    }
)

# Of transformers 5.23. All other families are refused; three have no config that is so small.
NAMES = """
afmoe arcee aria_text axk1 axk2 bamba beam bert bert-generation biogpt bitnet bloom camembert
codegen cohere cohere2 cohere2_moe ctrl cwm data2vec-text deepseek_v3 deepseek_v32 deepseek_v4
diffllama doge electra emu3 ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1
falcon_mamba flex_olmo flint fuyu gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite
gpt-sw3 gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa
helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax inkling_text internlm3 iquestcoder
jais2 jamba kolibri1 laguna lfm2 lfm3 llama llama4 llama4_text mamba mamba2 megatron-bert mellum
mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral
mixtral mllama modernbert-decoder moshi mpt nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid
olmoe opt persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text
qwen3_5_text qwen3_moe qwen3_next recurrent_gemma rembert roberta roberta-prelayernorm roc_bert
roformer rwkv seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma xglm xlm-roberta
xlm-roberta-xl xlstm youtu
"""
TRAINED = frozenset(NAMES.split())
UNTRIED = frozenset(["dots3_note", "dots3_note_text", "gemma4_assistant"])


def small(config: Any) -> dict[str, Any]:
    """Return the arguments of a small config of the same class, without dropout."""
    found: dict[str, Any] = {}
    for name, value in config.to_dict().items():
        if isinstance(value, dict) and name.endswith("_config") and name != "per_layer_config":
            found[name] = small(getattr(config, name))
        elif isinstance(value, list) and name.endswith("layer_types"):
            found[name] = [*dict.fromkeys(value), *value][:2]
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            found[name] = 0.0
        elif name in SMALL and value is not None and not isinstance(value, list | dict):
            found[name] = SMALL[name]
    return found


def config_of(kind: str, **own: Any) -> Any:
    """Return a small config of a family; `TypeError` or the like if it cannot be so small."""
    made_by = pytest.importorskip("transformers").CONFIG_MAPPING[kind]
    return made_by(**(small(made_by()) | OWN.get(kind, {}) | own))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    library = pytest.importorskip("transformers", reason="transformers is not installed")
    before = library.logging.get_verbosity()
    library.logging.set_verbosity_error()
    yield
    library.logging.set_verbosity(before)


def tokens(length: int = 12) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (4, length), generator=torch.Generator().manual_seed(1))


Named = dict[str, torch.Tensor]


def piped(layers: Any, ids: torch.Tensor, **options: Any) -> tuple[float, Named, Named]:
    """Return loss, start and gradients of one step on two stages, by transformers' names."""

    def body(world: Any) -> tuple[float, Named, Named]:
        own = {"stages": 2, "microbatches": 2, "partition": "uniform", **options}
        pipe = Pipeline(layers, causal_lm, world=world, **own)
        named = {name.split(".", 2)[2]: p for name, p in pipe.named_parameters()}
        start = {name: p.detach().clone() for name, p in named.items()}
        loss = pipe.step(ids, ids).loss
        return loss, start, {name: p.grad for name, p in named.items()}

    ranks = run_on_threads(2, body)
    start, gradients = ({n: t for each in ranks for n, t in each[at].items()} for at in (1, 2))
    return ranks[0][0], start, gradients


def plain_step(config: Any, start: Named, ids: torch.Tensor, dtype: str) -> tuple[float, Named]:
    """Return loss and gradients of transformers' own model, without anything of gpipe_hpc.

    Divided last, as a pipeline does: some models compute their logits in float32.
    """
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    options = {"dtype": getattr(torch, dtype), "experts_implementation": "batched_mm"}
    model = auto.from_config(config, **options).train()
    model.load_state_dict(start, strict=False)
    loss, weight = 0.0, (ids.shape[1] - 1) * len(ids)
    for own in ids.chunk(2):
        logits = model(input_ids=own, use_cache=False).logits[:, :-1].flatten(0, 1)
        targets = own[:, 1:].flatten()
        each = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        each.backward()
        loss += each.item()
    named = model.named_parameters(remove_duplicate=False)
    return loss / weight, {n: None if p.grad is None else p.grad / weight for n, p in named}


def assert_trains_as_the_plain_model(config: Any, dtype: str = "float64", **options: Any) -> None:
    ids = tokens()
    loss, start, gradients = piped(huggingface_layers(config, dtype=dtype), ids, **options)
    expected, plain = plain_step(config, start, ids, dtype)
    assert loss == pytest.approx(expected, rel=TOLERANCE if dtype == "float64" else 1e-6)
    assert gradients.keys() <= plain.keys()  # a tied parameter has one of its names
    untrained = {name for name, gradient in plain.items() if gradient is None}
    assert {name for name, gradient in gradients.items() if gradient is None} <= untrained
    for name, gradient in gradients.items():
        if gradient is not None:
            near = (1e-10 if dtype == "float64" else 1e-6) * max(
                1.0, plain[name].abs().max().item()
            )
            torch.testing.assert_close(gradient, plain[name], rtol=0.0, atol=near, msg=name)


TIED_BIAS = ("bert", "roberta", "electra", "roformer", "bert-generation", "data2vec-text")


@pytest.mark.parametrize("kind", TIED_BIAS)
def test_a_head_that_ties_its_bias_within_itself_trains(kind: str):
    """Each name of the bias became a parameter of its own; the pipeline blamed the factory."""
    assert_trains_as_the_plain_model(config_of(kind, is_decoder=True))


LONGROPE = MappingProxyType(
    {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
        "original_max_position_embeddings": 8,
    }
)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_rotary_embeddings_that_look_at_positions_train(recompute: str):
    """What they kept of the run without values made the first step fail."""
    long = config_of("phi3", original_max_position_embeddings=8, rope_parameters=dict(LONGROPE))
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    for config in (long, config_of("llama", rope_parameters=dynamic)):
        assert_trains_as_the_plain_model(config, recompute=recompute)


def test_sequences_that_would_stretch_angles_for_good_are_refused():
    """Beyond max_position_embeddings what is trained would depend on the longest so far."""
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    layers = huggingface_layers(
        config_of("llama", rope_parameters=dynamic, max_position_embeddings=10), dtype="float64"
    )
    assert piped(layers, tokens(10))[0] > 0
    with pytest.raises(
        Exception, match=r"at most 10 positions \(max_position_embeddings\), got 12"
    ):
        piped(layers, tokens(12))


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_experts_train(kind: str):
    """In float64 transformers' first choice for experts has no kernel: the first step failed."""
    assert_trains_as_the_plain_model(config_of(kind))


def test_a_start_that_nobody_sets_is_refused_before_anything_is_built():
    """Its activations have parameters that transformers sets only where it makes them."""
    with pytest.raises(
        ModelError, match=r"leaves some values of .*alpha_p of a ApertusForCausalLM"
    ):
        huggingface_layers(config_of("apertus"))


@pytest.mark.parametrize("kind", ["mamba2", "falcon_h1", "bamba"])
def test_infinite_numbers_of_a_config_are_read_as_they_are_written(kind: str, tmp_path: Path):
    """transformers writes them as {"__float__": "Infinity"}, which its own classes refuse."""
    config_of(kind).save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    assert '"__float__": "Infinity"' in text
    for source in (tmp_path / "config.json", json.loads(text)):
        layers = huggingface_layers(source)
        assert layers[0].build().blueprint.model.config.time_step_limit[1] == float("inf")
        written = layers[0].build().companion_files(torch.float32)["config.json"]
        assert json.loads(written)["time_step_limit"][1] == {"__float__": "Infinity"}


@pytest.mark.product
@pytest.mark.parametrize("letter", "abcdefghijklmnopqrstuvwxyz")
def test_every_family_trains_as_transformers_or_is_refused(letter: str):
    """In float64; XGLM in float32, as it computes with a number that transformers has for that."""
    library = pytest.importorskip("transformers")
    is_known = library.__version__.startswith("5.23.")
    names = library.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    for kind in sorted(name for name in names if name.startswith(letter)):
        try:
            config = config_of(kind)
        except Exception:
            assert kind in UNTRIED or not is_known, kind
            continue
        dtype = "float32" if kind == "xglm" else "float64"
        try:
            huggingface_layers(config, dtype=dtype)
        except ModelError:
            assert kind not in TRAINED or not is_known, kind
            continue
        assert kind in TRAINED or not is_known, kind
        assert_trains_as_the_plain_model(config, dtype)


# Plans.

DATA = ("data=synthetic", "data.seq_len=8", f"data.vocab_size={VOCABULARY}")
IMAGES = ("data=synthetic_images", "data.height=8", "data.width=8", "data.num_classes=10")
PLANNED = ("gpt2", "llama", "gemma3_text", "bert", "mixtral", "phi3", "falcon_mamba", "vit")
SEARCH = ("plan.ranks=2", "plan.flops_per_s=1e9", "train.batch_size=8")


@pytest.fixture
def planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a function that runs `python -m gpipe_hpc.plan` on a family; what it prints."""

    def run(kind: str, *words: str) -> str:
        own = {"image_size": 8, "patch_size": 4, "num_labels": 10} if kind == "vit" else {}
        file = tmp_path / f"{kind}.json"
        file.write_text(json.dumps(config_of(kind, **own).to_dict()))
        data = IMAGES if kind == "vit" else DATA
        model = ("model=huggingface", f"model.path={file}")
        monkeypatch.setattr(sys, "argv", ["plan", *model, *data, *words])
        with pytest.raises(SystemExit) as ended:
            plan.main()
        told = capsys.readouterr()
        assert ended.value.code == 0, told
        return told.out

    return run


def optimizer_kb(text: str) -> list[float]:
    """Return what each rank of a plan keeps of the optimizer's state, in kB."""
    table = text.partition("Ranks, at peak memory:\n")[2].split("\n\n")[0].splitlines()
    assert table[0].split()[5] == "optimizer"
    columns = [re.findall(r"([\d.]+) (k?B)", row) for row in table[1:]]
    return [float(row[2][0]) / (1 if row[2][1] == "kB" else 1000) for row in columns]


def assert_shards_are_planned(
    kind: str, planned: Callable[..., str], schedule: str = "gpipe"
) -> None:
    """A copy of two keeps all of a state, or half; whole tensors divide less evenly."""
    layout = ("pipeline.stages=2", "pipeline.replicas=2", f"pipeline.schedule={schedule}")
    whole, flat, oss = (
        optimizer_kb(planned(kind, *layout, f"outer.shard={shard}", "pipeline.microbatches=4"))
        for shard in ("none", "flat", "oss")
    )
    copies = 4 if schedule == "chimera" else 2
    for rank, kept in enumerate(whole):
        # What is tied over stages is in no bucket, and whole on each.
        assert kept / copies * 0.98 < flat[rank] < kept
        assert kept / copies * 0.98 < oss[rank] < kept


@pytest.mark.parametrize("kind", ["llama", "bert", "mixtral"])
def test_sharded_states_are_planned(kind: str, planned: Callable[..., str]):
    """Blocks that cost the same had the parameter names of the first: a KeyError."""
    assert_shards_are_planned(kind, planned)


def test_layouts_are_searched(planned: Callable[..., str]):
    text = planned("llama", *SEARCH, "plan.search=true")
    assert "outer.shard=flat" in text


@pytest.mark.product
@pytest.mark.parametrize("kind", PLANNED)
def test_every_family_is_planned_in_every_way(kind: str, planned: Callable[..., str]):
    for schedule in ("gpipe", "chimera"):
        assert_shards_are_planned(kind, planned, schedule)
    for way in ("plan.search=true", "pipeline.layout=auto"):
        assert "pipeline.stages=" in planned(kind, *SEARCH, way)
