"""config.json read and written: every field says something, and what our model has no place for is refused by name."""

import json

import pytest

from lm.base.errors import UsageError
from lm.interop.families import LAYOUTS, layout_called, layout_for
from lm.model.config import (
    Dtype,
    FeedForward,
    Mixer,
    Norm,
    NormPlacement,
    Positions,
    QkNorm,
)
from lm.model.parts import Experts, RopeScaling, Slowdown
from tests.interop.runs import GPT2, LLAMA
from tests.model.variants import recurrent, replace

WHERE = "config.json"
LONGER = RopeScaling(Slowdown.LLAMA3, 8.0, original_context=8192, low_freq_factor=1.0, high_freq_factor=4.0)
LAST = {"window": 3, "window_layers": (False, True)}
GEMMA = replace(
    LLAMA, feed_forward=FeedForward.GEGLU, norm_placement=NormPlacement.SANDWICH, tied_embedding=True,
    embedding_scale=4.0, attention_scale=24**-0.5, attention_softcap=50.0, logit_softcap=30.0, window=3,
    window_layers=(True, False),
)  # fmt: skip
EXPRESSIBLE = {
    "gpt2": (GPT2, replace(GPT2, tied_embedding=False, norm_eps=1e-6, rope_base=7.0)),
    "llama": (
        LLAMA,
        replace(LLAMA, bias=True, rope_base=5e5, dtype=Dtype.BFLOAT16, init_std=0.1, rope_scaling=LONGER),
        replace(LLAMA, qkv_bias=False, rope_scaling=RopeScaling(Slowdown.LINEAR, 2.0)),
    ),
    "mistral": (replace(LLAMA, window=3), replace(LLAMA, n_head=5, n_kv_head=5)),
    "qwen2": (replace(LLAMA, qkv_bias=True), replace(LLAMA, qkv_bias=True, **LAST)),
    "qwen3": tuple(replace(LLAMA, qk_norm=True, **window) for window in ({}, {"window": 3}, LAST)),
    "gemma2": (GEMMA, replace(GEMMA, attention_softcap=None, attention_scale=None, window=None, window_layers=(True,))),
    "olmo2": (replace(LLAMA, norm_placement=NormPlacement.OUTPUT, qk_norm=True, qk_norm_over=QkNorm.HEADS),),
    "mixtral": (replace(LLAMA, experts=Experts(4, 2)), replace(LLAMA, experts=Experts(4, 2, balance_loss=0), window=3)),
    "qwen3_moe": (
        replace(LLAMA, qk_norm=True, experts=Experts(4, 2)),
        replace(LLAMA, qk_norm=True, experts=Experts(4, 2, normalised=False)),
    ),
}  # fmt: skip


def read(values):
    return layout_called(values["model_type"], WHERE).read(values, WHERE)


def written(name, **changes):
    """What is written for a model of this family, through JSON."""
    model = EXPRESSIBLE[name][0]
    return {**json.loads(json.dumps(layout_for(model).write(model))), **changes}


@pytest.mark.parametrize("name", EXPRESSIBLE)
def test_a_model_is_written_in_the_first_layout_that_gives_it_back(name):
    for model in EXPRESSIBLE[name]:
        layout = layout_for(model)
        assert layout.model_type == name
        again = layout.read(json.loads(json.dumps(layout.write(model))), WHERE)
        # Said otherwise by the same model, or of its training.
        kept = ["n_kv_head", "d_head", "dtype", "init_std", "qkv_bias", "attention_scale", "experts"]
        kept += ["rope_base"] if name == "gpt2" else []
        assert replace(again, **{field: getattr(model, field) for field in kept}) == model
        assert (again.kv_heads, again.head_width, again.windows) == (model.kv_heads, model.head_width, model.windows)
        assert layout.lost(again) == []


def test_every_layout_is_tested():
    assert {layout.model_type for layout in LAYOUTS} == EXPRESSIBLE.keys()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"norm": Norm.LAYERNORM}, "model.norm: 'layernorm' -> 'rmsnorm'"),
        ({"feed_forward": FeedForward.GELU}, "model.feed_forward: 'gelu' -> 'swiglu'"),
        ({"positions": Positions.LEARNED}, "model.positions: 'learned' -> 'rope'"),
        ({"embedding_scale": 2.0}, "model.embedding_scale: 2.0 -> None"),
        ({"experts": Experts(4, 2, shared=1)}, "model.experts.shared: 1 -> 0"),
        ({"window": 3, "window_layers": (True, False)}, "model.window: (3, None) -> "),
        ({"parallel_block": True}, "model.parallel_block: True -> False"),
    ],
)
def test_a_model_that_no_layout_holds_is_told_what_would_change(changes, told):
    with pytest.raises(UsageError) as raised:
        layout_for(replace(LLAMA, **changes))
    assert told in str(raised.value)
    assert "gpt2, llama, " in str(raised.value)


def test_a_recurrent_model_is_refused_by_its_mixer():
    with pytest.raises(UsageError, match="mixer is gru, and every layout that is known here attends"):
        layout_for(recurrent(Mixer.GRU))


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'. Supported: 'silu' or 'swish'."),
        ("llama", {"mlp_bias": True}, "attention_bias is False and mlp_bias is True. Supported: both or neither."),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'. Supported: "),
        ("llama", {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 10000.0 and 500000.0 in rope_parameters"),
        ("llama", {"rope_parameters": {"beta": 1}}, "rope_parameters: beta is 1: nothing is known"),
        ("llama", {"rope_parameters": {"rope_type": "x"}, "rope_scaling": {"rope_type": "y"}}, "differ in rope_type"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5. Supported: 1.0 or None."),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config is {'bits': 4}: nothing is known"),
        ("llama", {"sliding_window": 4}, "sliding_window is 4: nothing is known"),
        ("llama", {"num_key_value_heads": 3}, "num_key_value_heads 3 does not divide num_attention_heads 4"),
        ("llama", {"hidden_size": "16"}, "hidden_size is '16', which is no number"),
        ("llama", {"num_hidden_layers": 1.5}, "num_hidden_layers: expected int, got 1.5"),
        ("llama", {"head_dim": 7}, "head width 7 is odd"),
        ("llama", {"hidden_size": 18}, "hidden_size 18 is no multiple of num_attention_heads 4"),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, "Supported: ['LlamaForCausalLM']."),
        ("llama", {"torch_dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'. Supported: float32, bfloat16, float16."),
        ("llama", {"torch_dtype": "float32", "dtype": "bfloat16"}, "dtype is 'bfloat16' and torch_dtype is 'float32'"),
        ("llama", {"model_type": "bloom"}, "model_type is 'bloom'. Known: gpt2, llama, "),
        ("gpt2", {"activation_function": "relu"}, "activation_function is 'relu'. Supported: 'gelu_new' or"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "layer_idx is True. Supported: False"),
        ("mistral", {"sliding_window": "4"}, "sliding_window is '4'. Supported: a number of tokens, or null."),
        ("llama", {"rope_scaling": {"type": "linear"}}, "the field 'factor' is missing"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": -1}}, "factor is -1.0; it must be above 0"),
        ("gemma2", {"layer_types": ["full_attention"]}, "Supported: 2 of sliding_attention and full_attention."),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0. Supported: a number above 0."),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True. Supported: None or"),
        ("mixtral", {"num_local_experts": None}, "num_local_experts is missing"),
        ("qwen3_moe", {"num_local_experts": 8}, "num_experts is "),
        ("mixtral", {"num_experts_per_tok": 5}, "chosen is 5, and count is 4"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers is [0]. Supported: [] or None."),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window is True. Supported: False."),
        ("olmo2", {"attention_bias": True}, "attention_bias is True. Supported: False."),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 2},
            "max_window_layers it is ['full_attention', 'full_attention']",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name, changes, told):
    with pytest.raises(UsageError) as raised:
        read(written(name, **changes))
    assert told in str(raised.value)
    assert WHERE in str(raised.value)


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"])
def test_the_shape_is_never_guessed(field):
    values = written("llama")
    del values[field]
    with pytest.raises(UsageError, match=f"the field '{field}' is missing"):
        read(values)


def test_what_may_be_left_out_is_what_transformers_takes():
    values = written("llama")
    for field in ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling", "hidden_act",
                  "attention_bias", "mlp_bias", "tie_word_embeddings", "architectures"):  # fmt: skip
        del values[field]
    model = read(values)
    assert (model.kv_heads, model.head_width, model.norm_eps, model.rope_base) == (4, 4, 1e-6, 1e4)
    values = written("gpt2")
    del values["n_inner"], values["tie_word_embeddings"]
    assert (read(values).d_ff, read(values).tied_embedding) == (64, True)
    values = written("mistral")
    del values["sliding_window"]
    assert read(values).window == 4096


def test_old_and_new_fields_say_the_same():
    values = written("llama")
    assert values.pop("rope_theta") == 10_000.0
    del values["rope_scaling"]
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "dtype": "bfloat16"}
    old = {"rope_theta": 7.0, "rope_scaling": {"type": "default"}, "torch_dtype": "bfloat16"}
    assert read({**values, **new}) == read({**values, **old})
    assert read({**values, **new}).rope_base == 7.0
