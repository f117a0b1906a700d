"""The families that are read and written, as tables. A model of ours is written in the first that can say it."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lm.base.config import nearest
from lm.base.errors import UsageError
from lm.interop.layout import Layout, Part, Trait
from lm.interop.traits import (
    Biases,
    InnerWidth,
    Mixture,
    Rope,
    ScaledLikeGemma,
    SwitchedWindow,
    WholeHeads,
    Window,
    WindowByLayer,
)
from lm.model.config import FeedForward, ModelConfig, Norm, NormPlacement, Positions, QkNorm

GPT2 = Layout(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    base="GPT2Model",
    names={
        "vocab_size": "vocab_size",
        "context_length": "n_positions",
        "d_model": "n_embd",
        "n_layer": "n_layer",
        "n_head": "n_head",
        "norm_eps": "layer_norm_epsilon",
        "tied_embedding": "tie_word_embeddings",
    },
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    ours={
        "norm": Norm.LAYERNORM,
        "feed_forward": FeedForward.GELU,
        "positions": Positions.LEARNED,
        "bias": True,
    },
    fixed={
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "reorder_and_upcast_attn": (False,),
        "add_cross_attention": (False,),
    },
    traits=(InnerWidth(),),
    idle=frozenset(
        {
            *("n_ctx", "resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_type", "summary_use_proj"),
            *("summary_activation", "summary_proj_to_labels", "summary_first_dropout"),
        }
    ),
    prefix="transformer.",
    layers="h.{}.",
    modules={
        "embedding": "wte",
        "position": "wpe",
        "head": "lm_head",
        "final_norm": "ln_f",
        "layers/attention_norm": "ln_1",
        "layers/attention/query": Part("attn.c_attn", 0, 3),
        "layers/attention/key": Part("attn.c_attn", 1, 3),
        "layers/attention/value": Part("attn.c_attn", 2, 3),
        "layers/attention/out": "attn.c_proj",
        "layers/feed_forward_norm": "ln_2",
        "layers/feed_forward/up": "mlp.c_fc",
        "layers/feed_forward/down": "mlp.c_proj",
    },
    buffers=r"h\.\d+\.attn\.(bias|masked_bias)",
    transposed=False,
)

_NAMES = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "d_head": "head_dim",
    "d_ff": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tied_embedding": "tie_word_embeddings",
}
_MODULES = {
    "embedding": "embed_tokens",
    "head": "lm_head",
    "final_norm": "norm",
    "layers/attention_norm": "input_layernorm",
    "layers/attention/query": "self_attn.q_proj",
    "layers/attention/key": "self_attn.k_proj",
    "layers/attention/value": "self_attn.v_proj",
    "layers/attention/query_norm": "self_attn.q_norm",
    "layers/attention/key_norm": "self_attn.k_norm",
    "layers/attention/out": "self_attn.o_proj",
    "layers/feed_forward_norm": "post_attention_layernorm",
    "layers/feed_forward/gate": "mlp.gate_proj",
    "layers/feed_forward/up": "mlp.up_proj",
    "layers/feed_forward/down": "mlp.down_proj",
}
_SILU = {"hidden_act": ("silu", "swish")}
_NOTHING: Mapping[str, Any] = MappingProxyType({})


def _like_llama(
    model_type: str,
    architecture: str,
    *traits: Trait,
    ours: Mapping[str, Any] = _NOTHING,
    names: Mapping[str, str] = _NOTHING,
    defaults: Mapping[str, Any] = _NOTHING,
    fixed: Mapping[str, tuple[Any, ...]] = _SILU,
    idle: frozenset[str] = frozenset(),
    modules: Mapping[str, str] = _NOTHING,
    scale_offset: float = 0.0,
) -> Layout:
    """Llama's names and choices with what differs."""
    return Layout(
        model_type=model_type,
        architecture=f"{architecture}ForCausalLM",
        base=f"{architecture}Model",
        names={**_NAMES, **names},
        defaults={"head_dim": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, **defaults},
        ours={
            "norm": Norm.RMSNORM,
            "feed_forward": FeedForward.SWIGLU,
            "positions": Positions.ROPE,
            "bias": False,
            **ours,
        },
        fixed=fixed,
        traits=traits,
        idle=idle,
        prefix="model.",
        layers="layers.{}.",
        modules={**_MODULES, **modules},
        scale_offset=scale_offset,
    )


_NO_BIAS = {**_SILU, "attention_bias": (False,)}
_ROUTERS = frozenset({"router_aux_loss_coef", "router_jitter_noise", "output_router_logits"})  # of training

LLAMA = _like_llama("llama", "Llama", WholeHeads(), Biases(), Rope(), defaults={"num_key_value_heads": None})
MISTRAL = _like_llama("mistral", "Mistral", Rope(), Window(4096))
QWEN2 = _like_llama("qwen2", "Qwen2", Rope(), SwitchedWindow(), ours={"qkv_bias": True})
QWEN3 = _like_llama(
    "qwen3",
    "Qwen3",
    Rope(),
    SwitchedWindow(),
    ours={"qk_norm": True},
    defaults={"head_dim": 128},
    fixed=_NO_BIAS,
)
GEMMA2 = _like_llama(
    "gemma2",
    "Gemma2",
    WholeHeads(),
    ScaledLikeGemma(),
    Rope(),
    WindowByLayer(),
    ours={"feed_forward": FeedForward.GEGLU, "norm_placement": NormPlacement.SANDWICH},
    names={"attention_softcap": "attn_logit_softcapping", "logit_softcap": "final_logit_softcapping"},
    defaults={
        "head_dim": 256,
        "tie_word_embeddings": True,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, False),
    },
    idle=frozenset({"hidden_act", "cache_implementation", "sliding_window_size"}),
    modules={
        "layers/attention_out_norm": "post_attention_layernorm",
        "layers/feed_forward_norm": "pre_feedforward_layernorm",
        "layers/feed_forward_out_norm": "post_feedforward_layernorm",
    },
    scale_offset=1.0,
)
OLMO2 = _like_llama(
    "olmo2",
    "Olmo2",
    Rope(),
    ours={"norm_placement": NormPlacement.OUTPUT, "qk_norm": True, "qk_norm_over": QkNorm.HEADS},
    defaults={"num_key_value_heads": None, "rms_norm_eps": 1e-5},
    fixed=_NO_BIAS,
    modules={
        "layers/attention_out_norm": "post_attention_layernorm",
        "layers/feed_forward_out_norm": "post_feedforward_layernorm",
    },
)
MIXTRAL = _like_llama(
    "mixtral",
    "Mixtral",
    Rope(1e6),
    Window(None),
    Mixture("num_local_experts"),
    defaults={"rms_norm_eps": 1e-5},
    idle=_ROUTERS,
    modules={
        "layers/feed_forward/router": "block_sparse_moe.gate",
        "layers/feed_forward/gate": "block_sparse_moe.experts.{}.w1",
        "layers/feed_forward/up": "block_sparse_moe.experts.{}.w3",
        "layers/feed_forward/down": "block_sparse_moe.experts.{}.w2",
    },
)
QWEN3_MOE = _like_llama(
    "qwen3_moe",
    "Qwen3Moe",
    Rope(),
    Mixture("num_experts", "norm_topk_prob"),
    ours={"qk_norm": True},
    names={"d_ff": "moe_intermediate_size"},
    fixed={
        **_NO_BIAS,
        "use_sliding_window": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
    # Without dense layers and windows these have nothing to say.
    idle=_ROUTERS | {"intermediate_size", "sliding_window", "max_window_layers"},
    modules={
        "layers/feed_forward/router": "mlp.gate",
        "layers/feed_forward/gate": "mlp.experts.{}.gate_proj",
        "layers/feed_forward/up": "mlp.experts.{}.up_proj",
        "layers/feed_forward/down": "mlp.experts.{}.down_proj",
    },
)

LAYOUTS = (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, OLMO2, MIXTRAL, QWEN3_MOE)


def layout_called(model_type: Any, where: str) -> Layout:
    """The layout of a config.json with this model_type.

    Raises:
      UsageError: there is none.
    """
    layouts = {layout.model_type: layout for layout in LAYOUTS}
    if model_type not in layouts:
        raise UsageError(f"model_type is {model_type!r}", where=where, do=nearest(str(model_type), layouts))
    return layouts[model_type]


def layout_for(model: ModelConfig) -> Layout:
    """The first layout that can say all of `model`.

    Raises:
      UsageError: none can; the nearest is named with what it lacks.
    """
    if model.mixer.recurrent:
        raise UsageError(f"mixer is {model.mixer}, and every layout that is known here attends", where="config.model")
    lost = {layout.model_type: layout.lost(model) for layout in LAYOUTS}
    for layout in LAYOUTS:
        if not lost[layout.model_type]:
            return layout
    name = min(lost, key=lambda name: len("; ".join(lost[name])))
    raise UsageError(
        f"no layout of Hugging Face's that is known here holds this model; the nearest, {name}, would change "
        + "; ".join(lost[name]),
        where="config.model",
        do=f"Known: {', '.join(lost)}.",
    )
