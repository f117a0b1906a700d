"""The shape of a model, as one frozen value.

Glossary of the letters that end array names everywhere (`x_BTD`, `q_BTHC`, `scores_BHTS`, `logits_BTV`):

  B batch            H query heads        F feed-forward width
  T query positions  K key-value heads    V vocabulary
  S key positions    C head width         E experts
  D model width      G query heads per key-value head (H / K)
  L layers
"""

import dataclasses
import enum

from lm.base.errors import UsageError


class Norm(enum.StrEnum):
    """What normalises the residual stream before a sublayer."""

    LAYERNORM = "layernorm"
    RMSNORM = "rmsnorm"


class FeedForward(enum.StrEnum):
    """The position-wise sublayer: two matrices around a GELU, or three with a SiLU gate."""

    GELU = "gelu"
    SWIGLU = "swiglu"


class Positions(enum.StrEnum):
    """How order reaches attention: a learned vector a position, or rotated queries and keys."""

    LEARNED = "learned"
    ROPE = "rope"


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


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder-only transformer.

    Raises:
      UsageError: a number out of its range, or widths and heads that do not fit together.
    """

    vocab_size: int
    context_length: int
    n_layer: int
    d_model: int
    n_head: int
    d_ff: int
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

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context_length", "n_layer", "d_model", "n_head", "d_ff"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be positive", where="config.model")
        for name in ("n_kv_head", "d_head", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"{name} is {value}; it must be positive", where="config.model")
        for name in ("norm_eps", "rope_base", "init_std"):
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

    @property
    def kv_heads(self) -> int:
        """K, the number of key-value heads."""
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def init_scale(self) -> float:
        """The standard deviation of initial matrices and tables."""
        return self.d_model**-0.5 if self.init_std is None else self.init_std

    @property
    def head_width(self) -> int:
        """C, the width of one head."""
        return self.d_model // self.n_head if self.d_head is None else self.d_head
