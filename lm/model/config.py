"""The shape of a model, as one frozen value.

Glossary of the letters that end array names everywhere (`x_BTD`, `q_BTHC`, `scores_BHTS`, `logits_BTV`):

  B batch            H query heads        F feed-forward width
  T query positions  K key-value heads    V vocabulary
  S key positions    C head width         E experts
  D model width      G query heads per key-value head (H / K)
  L layers           J gates of a recurrent layer
"""

import dataclasses
import enum
import itertools

from lm.base.config import LATER
from lm.base.errors import UsageError
from lm.model.parts import Encoder, Experts, RopeScaling, WidthScaling


class Norm(enum.StrEnum):
    """What normalises the residual stream before a sublayer."""

    LAYERNORM = "layernorm"
    RMSNORM = "rmsnorm"


class NormPlacement(enum.StrEnum):
    """Where a layer normalises, f being its attention or its feed-forward, x the residual stream.

    PRE: x + f(norm(x)). POST: norm(x + f(x)), and no norm before the head (Vaswani et al. 2017). OUTPUT: x + norm(f(x))
    (OLMo 2, arXiv:2501.00656). SANDWICH: x + norm(f(norm(x))) (Gemma 2, arXiv:2408.00118).
    """

    PRE = "pre"
    POST = "post"
    OUTPUT = "output"
    SANDWICH = "sandwich"

    @property
    def on_input(self) -> bool:
        """Whether a sublayer reads normalised numbers."""
        return self in (NormPlacement.PRE, NormPlacement.SANDWICH)

    @property
    def on_output(self) -> bool:
        """Whether what a sublayer writes is normalised."""
        return self in (NormPlacement.OUTPUT, NormPlacement.SANDWICH)


class Mixer(enum.StrEnum):
    """The sublayer in which a position learns of earlier ones: attention, or a state handed from each to the next.

    LSTM: Hochreiter & Schmidhuber 1997, doi 10.1162/neco.1997.9.8.1735, with the forget gate of Gers et al. 2000. GRU:
    Cho et al. 2014, arXiv:1406.1078, in the form of cuDNN, whose reset gate acts on the product with the state.
    """

    ATTENTION = "attention"
    LSTM = "lstm"
    GRU = "gru"

    @property
    def recurrent(self) -> bool:
        """Whether a state goes from position to position."""
        return self is not Mixer.ATTENTION

    @property
    def gates(self) -> int:
        """J, how many widths of D a recurrent layer computes from its input, and as many from its state."""
        return {Mixer.ATTENTION: 0, Mixer.LSTM: 4, Mixer.GRU: 3}[self]

    @property
    def states(self) -> int:
        """How many widths of D go from position to position."""
        return {Mixer.ATTENTION: 0, Mixer.LSTM: 2, Mixer.GRU: 1}[self]


class FeedForward(enum.StrEnum):
    """The position-wise sublayer: two matrices around a function, three with a gate (Shazeer 2020), or no sublayer.

    Gates: arXiv:2002.05202. GELU is its tanh form, as in GPT-2 and Gemma; the exact one, by the error function, says
    so. RELU2 is the square of the ReLU (So et al. 2021, arXiv:2109.08668).
    """

    NONE = "none"
    RELU = "relu"
    RELU2 = "relu2"
    GELU = "gelu"
    GELU_EXACT = "gelu_exact"
    SWIGLU = "swiglu"
    GEGLU = "geglu"
    GEGLU_EXACT = "geglu_exact"

    @property
    def gated(self) -> bool:
        """Whether two matrices make what lies between."""
        return self in (FeedForward.SWIGLU, FeedForward.GEGLU, FeedForward.GEGLU_EXACT)

    @property
    def matrices(self) -> int:
        """How many there are in all."""
        return 0 if self is FeedForward.NONE else 3 if self.gated else 2


class Positions(enum.StrEnum):
    """How order reaches attention: a learned or a fixed vector a position, rotated queries and keys, or causality only.

    SINUSOIDAL: Vaswani et al. 2017, arXiv:1706.03762, section 3.5. NONE: Kazemnejad et al. 2023, arXiv:2305.19466.
    """

    LEARNED = "learned"
    SINUSOIDAL = "sinusoidal"
    ROPE = "rope"
    NONE = "none"


class QkNorm(enum.StrEnum):
    """What one RMSNorm of queries, and one of keys, goes over: each head (Qwen 3), or all heads together (OLMo 2)."""

    HEAD = "head"
    HEADS = "heads"


class Remat(enum.StrEnum):
    """What the backward pass recomputes: nothing, all but the products' outputs, or whole blocks."""

    NONE = "none"
    DOTS = "dots"
    FULL = "full"


class Dtype(enum.StrEnum):
    """The type that products are computed in; parameters, softmax and loss stay float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class CacheDtype(enum.StrEnum):
    """What decoding keeps keys and values in: the type of the model, or int8 with a float32 scale a head and slot."""

    MODEL = "model"
    INT8 = "int8"


# What fields must be without the sublayer that reads them.
_WITHOUT_ATTENTION = {
    **{"positions": Positions.NONE, "n_head": 1, "n_kv_head": None, "d_head": None, "window": None, "qk_norm": False},
    **{"qkv_bias": None, "attention_scale": None, "attention_softcap": None, "encoder": None},
}
_WITHOUT_FEED_FORWARD = {"d_ff": 0, "experts": None, "parallel_block": False}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A transformer, a decoder alone or behind an encoder, or recurrent layers in its place.

    Raises:
      UsageError: a number out of its range, widths and heads that do not fit together, or choices that contradict.
    """

    vocab_size: int
    context_length: int
    n_layer: int
    d_model: int
    n_head: int  # 1 where nothing attends
    d_ff: int  # 0 where feed_forward is none
    n_kv_head: int | None = None  # None: as many as n_head (multi-head attention)
    d_head: int | None = None  # None: d_model / n_head
    norm: Norm = Norm.RMSNORM
    norm_eps: float = 1e-5
    feed_forward: FeedForward = FeedForward.SWIGLU
    positions: Positions = Positions.ROPE
    rope_base: float = 10_000.0
    window: int | None = None  # a query sees so many of the newest keys, itself included; None: all
    bias: bool = False
    qk_norm: bool = False
    tied_embedding: bool = True
    init_std: float | None = 0.02  # of every matrix and table, as GPT-2; None: d_model^-0.5, which suits any width
    unroll_layers: bool = False
    remat: Remat = Remat.NONE
    dtype: Dtype = Dtype.FLOAT32
    rope_scaling: RopeScaling | None = dataclasses.field(default=None, metadata=LATER)
    norm_placement: NormPlacement = dataclasses.field(default=NormPlacement.PRE, metadata=LATER)
    parallel_block: bool = dataclasses.field(default=False, metadata=LATER)  # x + attention(norm(x)) + f(norm(x))
    window_layers: tuple[bool, ...] = dataclasses.field(default=(True,), metadata=LATER)  # who has it, over and over
    qk_norm_over: QkNorm = dataclasses.field(default=QkNorm.HEAD, metadata=LATER)
    qkv_bias: bool | None = dataclasses.field(default=None, metadata=LATER)  # None: as `bias`
    attention_scale: float | None = dataclasses.field(default=None, metadata=LATER)  # of q k; None: d_head^-0.5
    attention_softcap: float | None = dataclasses.field(default=None, metadata=LATER)  # scores become c tanh(s / c)
    logit_softcap: float | None = dataclasses.field(default=None, metadata=LATER)  # and so do logits
    embedding_scale: float | None = dataclasses.field(default=None, metadata=LATER)  # of token vectors; None: 1
    experts: Experts | None = dataclasses.field(default=None, metadata=LATER)
    width_scaling: WidthScaling | None = dataclasses.field(default=None, metadata=LATER)
    mixer: Mixer = dataclasses.field(default=Mixer.ATTENTION, metadata=LATER)
    patch_width: int | None = dataclasses.field(default=None, metadata=LATER)  # numbers that may replace a token
    encoder: Encoder | None = dataclasses.field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        wide = () if self.feed_forward is FeedForward.NONE else ("d_ff",)
        for name in ("vocab_size", "context_length", "n_layer", "d_model", "n_head", *wide):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be positive", where="config.model")
        for name in ("n_kv_head", "d_head", "window", "patch_width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; it must be positive", where="config.model")
        for name in (
            *("norm_eps", "rope_base", "init_std"),
            *("attention_scale", "attention_softcap", "logit_softcap", "embedding_scale"),
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} is {value}; it must be above 0", where="config.model")
        if self.d_head is None and self.d_model % self.n_head:
            raise UsageError(
                f"n_head {self.n_head} does not divide d_model {self.d_model}",
                where="config.model",
                do="Change one of them, or set d_head.",
            )
        if self.n_head % self.kv_heads:
            raise UsageError(
                f"n_kv_head {self.kv_heads} does not divide n_head {self.n_head}",
                where="config.model",
                do="Query heads share key-value heads in equal groups.",
            )
        if self.positions is Positions.ROPE and self.head_width % 2:
            raise UsageError(
                f"head width {self.head_width} is odd",
                where="config.model",
                do="Rotary positions turn pairs of components: choose an even head width.",
            )
        self._check_choices()

    def _check_choices(self) -> None:
        """Refuses choices that contradict one another, each by its name."""
        if self.rope_scaling is not None and self.positions is not Positions.ROPE:
            raise _contradiction("rope_scaling is given", f"positions is {self.positions}: nothing is rotated")
        if self.positions is Positions.SINUSOIDAL and self.d_model % 2:
            raise _contradiction("positions is sinusoidal", f"d_model {self.d_model} is odd: sines need their cosines")
        if self.parallel_block and self.norm_placement is not NormPlacement.PRE:
            raise _contradiction("parallel_block is on", f"norm_placement is {self.norm_placement}, not pre")
        if self.qk_norm_over is QkNorm.HEADS and not self.qk_norm:
            raise _contradiction("qk_norm_over is heads", "qk_norm is off")
        if self.window_layers != (True,) and self.window is None:
            raise _contradiction("window_layers is given", "window is none")
        if not any(self.window_layers):
            raise _contradiction(f"window is {self.window}", "window_layers gives it to no layer")
        if self.experts is not None and self.bias:
            raise _contradiction("experts are given, which have no biases", "bias is on")
        if self.width_scaling is not None and self.init_std is None:
            raise _contradiction("width_scaling is given", "init_std is none, which is a scaling of its own")
        if self.width_scaling is not None and self.width_scaling.base_head and self.attention_scale is not None:
            raise _contradiction("width_scaling.base_head is given", "attention_scale is, which it would set")
        if len(self.window_layers) > self.n_layer:
            raise _contradiction(f"window_layers is of {len(self.window_layers)}", f"n_layer is {self.n_layer}")
        if self.width_scaling is not None and self.width_scaling.base_head and self.mixer.recurrent:
            raise _contradiction("width_scaling.base_head is given", f"mixer is {self.mixer}, which has no heads")
        for without, choice, needed in (
            (self.mixer.recurrent, f"mixer is {self.mixer}", _WITHOUT_ATTENTION),
            (self.feed_forward is FeedForward.NONE, "feed_forward is none", _WITHOUT_FEED_FORWARD),
        ):
            for name, only in needed.items():
                if without and getattr(self, name) != only:
                    raise _contradiction(choice, f"{name} is not {str(only).lower()}")
        for name in ("window", "patch_width"):
            if self.encoder is not None and getattr(self, name) is not None:
                raise _contradiction("encoder is given", f"{name} is {getattr(self, name)}: it is of decoders alone")
        if self.encoder is not None and self.encoder.source_length >= self.context_length:
            raise _contradiction(
                f"encoder.source_length is {self.encoder.source_length}",
                f"context_length {self.context_length} leaves nothing to predict from it",
            )

    @property
    def kv_heads(self) -> int:
        """K, the number of key-value heads."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer."""
        pattern = itertools.islice(itertools.cycle(self.window_layers), self.n_layer)
        return tuple(self.window if here else None for here in pattern)

    @property
    def window_kinds(self) -> tuple[int | None, ...]:
        """The windows that layers differ by: all the same, or with and without."""
        return (self.window,) if all(self.window_layers) else (self.window, None)

    @property
    def reach(self) -> int | None:
        """How many of the newest keys any layer sees; None: all."""
        if self.mixer.recurrent:
            return 0
        return self.window if all(self.window_layers) else None

    @property
    def predicted_length(self) -> int:
        """Positions of a window that predict, and so bear loss: all, or those from the last of the source on."""
        return self.context_length - self.lead

    @property
    def lead(self) -> int:
        """Tokens of a window before the first position that predicts."""
        return 0 if self.encoder is None else self.encoder.source_length - 1

    @property
    def processed_length(self) -> int:
        """Positions of a window that layers read; the last token of a source is read twice."""
        return self.context_length + (self.encoder is not None)

    @property
    def position_count(self) -> int:
        """Rows of a table of positions: as many as the longer stack reads."""
        return max(self.lead + 1, self.predicted_length)

    @property
    def encoder_stack(self) -> "ModelConfig":
        """The encoder, where there is one, as a stack of layers by itself."""
        assert self.encoder is not None
        return dataclasses.replace(self, n_layer=self.encoder.n_layer, encoder=None)

    @property
    def attentions(self) -> int:
        """How often a layer mixes positions: its own, and behind an encoder those of the source too."""
        return 1 if self.encoder is None else 2

    @property
    def qkv_biased(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.bias if self.qkv_bias is None else self.qkv_bias

    @property
    def visited(self) -> int:
        """How many feed-forwards of width d_ff a token goes through in a layer."""
        return 1 if self.experts is None else self.experts.chosen + self.experts.shared

    @property
    def init_scale(self) -> float:
        """The standard deviation of initial tables, and of a head of its own."""
        return self.d_model**-0.5 if self.init_std is None else self.init_std

    @property
    def matrix_scale(self) -> float:
        """The standard deviation of initial matrices of layers."""
        return self.init_scale * self.width_ratio**-0.5

    @property
    def width_ratio(self) -> float:
        """How many times wider the model is than the base of its `width_scaling`; 1 without."""
        return 1.0 if self.width_scaling is None else self.d_model / self.width_scaling.base_width

    @property
    def score_scale(self) -> float | None:
        """What the product of a query and a key is multiplied by; None: d_head^-0.5."""
        if self.width_scaling is None or self.width_scaling.base_head is None:
            return self.attention_scale
        return self.width_scaling.base_head**0.5 / self.head_width

    @property
    def head_width(self) -> int:
        """C, the width of one head."""
        return self.d_model // self.n_head if self.d_head is None else self.d_head


def _contradiction(one: str, other: str) -> UsageError:
    return UsageError(f"{one}, and {other}", where="config.model", do="Change one of them.")
