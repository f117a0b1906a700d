"""Parts that a model may have, each with numbers of its own: they are fields of `lm.model.config.ModelConfig`."""

import dataclasses
import enum

from lm.base.errors import UsageError


class Slowdown(enum.StrEnum):
    """Which rotary frequencies are divided: all, or the more the fewer turns they make in the original context.

    LINEAR: Chen et al. 2023, arXiv:2306.15595. LLAMA3: the released code of Llama 3.1.
    """

    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Rotary frequencies slowed down by up to `factor`, for contexts longer than those trained on.

    LLAMA3: frequencies of fewer than `low_freq_factor` turns in `original_context` tokens wholly, of more than
    `high_freq_factor` turns not at all, linearly in between.

    Raises:
      UsageError: a number out of its range, missing for LLAMA3, or given for LINEAR.
    """

    kind: Slowdown
    factor: float
    original_context: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None

    def __post_init__(self) -> None:
        where, names = "config.model.rope_scaling", ("original_context", "low_freq_factor", "high_freq_factor")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        for name, value in {"factor": self.factor, **given}.items():
            if value <= 0:
                raise UsageError(f"{name} is {value}; it must be above 0", where=where)
        if self.kind is Slowdown.LINEAR and given:
            raise UsageError(f"{' and '.join(given)} mean nothing to kind linear", where=where, do="Leave them out.")
        if self.kind is Slowdown.LLAMA3:
            if len(given) < len(names):
                raise UsageError(f"kind llama3 needs {', '.join(n for n in names if n not in given)}", where=where)
            if given["low_freq_factor"] >= given["high_freq_factor"]:
                raise UsageError(
                    f"low_freq_factor {self.low_freq_factor} is not below high_freq_factor {self.high_freq_factor}",
                    where=where,
                )


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of each feed-forward, all of width d_ff, without biases (Shazeer et al. 2017).

    Weights of the chosen are the softmax over their logits alone, which is the one over all, normalised over them
    (Mixtral); not `normalised`, they are what they have of the softmax over all (Qwen3-MoE can do either).

    Raises:
      UsageError: a number out of its range.
    """

    count: int  # E, of which a token visits
    chosen: int
    shared: int = 0  # more of them, which all tokens visit, as one sublayer of so many widths
    normalised: bool = True
    balance_loss: float = 0.01  # weights of what training adds to its loss, evaluation does not: see
    router_z_loss: float = 0.001  # `lm.model.experts.router_losses`

    def __post_init__(self) -> None:
        where = "config.model.experts"
        for name, least in {"count": 1, "chosen": 1, "shared": 0, "balance_loss": 0, "router_z_loss": 0}.items():
            if getattr(self, name) < least:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be at least {least}", where=where)
        if self.chosen > self.count:
            raise UsageError(f"chosen is {self.chosen}, and count is {self.count}", where=where, do="Change one.")


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Layers that read the first `source_length` tokens of a window, each seeing all of them, in front of a decoder.

    The decoder begins with the last of them, predicts what follows, and attends to what the encoder made (Vaswani et
    al. 2017, arXiv:1706.03762). Both count positions from 0 and share the tables of tokens and positions.

    Raises:
      UsageError: a number that is not positive.
    """

    n_layer: int
    source_length: int

    def __post_init__(self) -> None:
        for name in ("n_layer", "source_length"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it must be positive", where="config.model.encoder")


@dataclasses.dataclass(frozen=True)
class WidthScaling:
    """The maximal-update parameterisation: a learning rate that is best at `base_width` is so at every width.

    muP, Yang et al. 2022, arXiv:2203.03466, table 8, for Adam. With m = d_model / base_width, matrices of layers begin
    with init_std m^-1/2 and learn at 1 / m of the rate, logits are divided by m, and the scale of attention falls as
    1 / d_head, from base_head^-1/2 at `base_head`; tables, a head of its own, biases and scales stay as they are.
    Weight decay is that of the whole rate at every width. Nothing changes at m = 1.

    Raises:
      UsageError: a number that is not positive.
    """

    base_width: int
    base_head: int | None = None  # d_head at base_width; None: heads are as wide at every width

    def __post_init__(self) -> None:
        for name in ("base_width", "base_head"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise UsageError(
                    f"{name} is {getattr(self, name)}; it must be positive", where="config.model.width_scaling"
                )
