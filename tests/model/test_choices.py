"""Contradictory choices are refused, both by name, and a config from before a choice keeps its name."""

import pytest

from lm.base.config import build, content_hash, override, to_dict
from lm.base.errors import UsageError
from lm.model.config import ModelConfig
from lm.model.parts import Slowdown
from tests.model.variants import tiny

LLAMA3 = ("rope_scaling.kind=llama3", "rope_scaling.factor=8", "rope_scaling.original_context=8",
          "rope_scaling.low_freq_factor=1", "rope_scaling.high_freq_factor=4")  # fmt: skip
EXPERTS = ("experts.count=4", "experts.chosen=2")
ENCODER = ("encoder.n_layer=1", "encoder.source_length=4")
BEFORE = {
    *(
        "vocab_size",
        "context_length",
        "n_layer",
        "d_model",
        "n_head",
        "d_ff",
        "n_kv_head",
        "d_head",
        "norm",
        "norm_eps",
    ),
    *("feed_forward", "positions", "rope_base", "window", "bias", "qk_norm", "tied_embedding", "init_std"),
    *("unroll_layers", "remat", "dtype"),
}


def chosen(*assignments: str) -> ModelConfig:
    return override(tiny(), assignments, "config.model")


@pytest.mark.parametrize(
    ("assignments", "told"),
    [
        ([*LLAMA3, "positions=learned"], "rope_scaling is given, and positions is learned"),
        (["positions=sinusoidal", "d_model=15", "d_head=4"], "positions is sinusoidal, and d_model 15 is odd"),
        (LLAMA3[:2], "kind llama3 needs original_context, low_freq_factor, high_freq_factor"),
        ([*LLAMA3, "rope_scaling.kind=linear"], "original_context and low_freq_factor and .* mean nothing"),
        ([*LLAMA3, "rope_scaling.low_freq_factor=4"], "low_freq_factor 4.0 is not below high_freq_factor 4.0"),
        (["rope_scaling.kind=linear", "rope_scaling.factor=0"], "factor is 0.0"),
        (["rope_scaling.kind=yarn", "rope_scaling.factor=2"], "'yarn' is not one of them"),
        (["parallel_block=true", "norm_placement=post"], "parallel_block is on, and norm_placement is post"),
        (["qk_norm_over=heads"], "qk_norm_over is heads, and qk_norm is off"),
        (["window_layers=true,false"], "window_layers is given, and window is none"),
        (["window=3", "window_layers=false"], "window is 3, and window_layers gives it to no layer"),
        (["window=3", "window_layers=false,true,true"], "window_layers is of 3, and n_layer is 2"),
        (["attention_scale=0"], "attention_scale is 0.0"),
        (["attention_softcap=-1"], "attention_softcap is -1.0"),
        (["logit_softcap=0"], "logit_softcap is 0.0"),
        (["embedding_scale=0"], "embedding_scale is 0.0"),
        ([*EXPERTS, "bias=true"], "experts are given, which have no biases, and bias is on"),
        ([*EXPERTS, "experts.chosen=5"], "chosen is 5, and count is 4"),
        ([*EXPERTS, "experts.shared=-1"], "shared is -1"),
        ([*EXPERTS, "experts.balance_loss=-1"], "balance_loss is -1"),
        (["width_scaling.base_width=0"], "base_width is 0"),
        ([*ENCODER, "encoder.source_length=8"], "source_length is 8, and context_length 8 leaves nothing"),
        ([*ENCODER, "window=3"], "encoder is given, and window is 3"),
        ([*ENCODER, "patch_width=4"], "encoder is given, and patch_width is 4"),
        ([*ENCODER, "mixer=gru", "positions=none", "n_head=1"], "mixer is gru, and encoder is not none"),
        ([*ENCODER, "encoder.n_layer=0"], "n_layer is 0"),
        (["width_scaling.base_width=8", "init_std=none"], "width_scaling is given, and init_std is none"),
        (
            ["width_scaling.base_width=8", "width_scaling.base_head=4", "attention_scale=1"],
            "width_scaling.base_head is given, and attention_scale is",
        ),
    ],
)  # fmt: skip
def test_what_contradicts_is_refused_by_both_names(assignments, told):
    with pytest.raises(UsageError, match=told):
        chosen(*assignments)


def test_choices_are_read_from_a_command_line_and_written_as_json():
    config = chosen(*LLAMA3, *EXPERTS, "window=3", "window_layers=true,false", "qkv_bias=true", "bias=false")
    assert config.rope_scaling.kind is Slowdown.LLAMA3
    assert config.windows == (3, None)
    assert config.reach is None
    assert build(ModelConfig, to_dict(config)) == config


def test_a_config_keeps_its_name_until_it_makes_a_newer_choice():
    plain = to_dict(tiny(), whole=False)
    assert set(plain) == BEFORE
    assert content_hash(tiny()) == content_hash(plain)
    for choice in ("positions=none", "qkv_bias=false", "norm_placement=post", "logit_softcap=30"):
        assert content_hash(chosen(choice)) != content_hash(tiny())
