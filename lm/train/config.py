"""A whole run, as one frozen value: what `configs/*.py` resolve to and `config.json` holds."""

import dataclasses
import enum

from lm.base.errors import UsageError
from lm.data.config import DataConfig
from lm.model.config import ModelConfig
from lm.parallel.mesh import MeshConfig


class Schedule(enum.StrEnum):
    """The learning rate after warm-up: half a cosine, or constant and then a linear cooldown."""

    COSINE = "cosine"
    WSD = "wsd"


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay on matrices only, and global-norm clipping.

    Raises:
      UsageError: a number outside its range.
    """

    peak_lr: float
    warmup_steps: int
    schedule: Schedule = Schedule.COSINE
    final_lr_fraction: float = 0.1  # of peak_lr, reached at the last step
    cooldown_fraction: float = 0.2  # share of the steps that WSD cools down over
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0  # 0: no clipping

    def __post_init__(self) -> None:
        for name in ("peak_lr", "warmup_steps", "weight_decay", "clip_norm"):
            _at_least(self, name, 0, "config.optimizer")
        for name in ("final_lr_fraction", "cooldown_fraction", "b1", "b2"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(f"{name} is {getattr(self, name)}; it lies in 0 to 1", where="config.optimizer")
        if self.b1 == 1 or self.b2 == 1 or self.eps <= 0:
            raise UsageError("b1 and b2 must be below 1 and eps above 0", where="config.optimizer")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """One training run.

    Raises:
      UsageError: counts that are not positive or do not divide.
    """

    model: ModelConfig
    optimizer: OptimizerConfig
    steps: int
    batch_size: int  # sequences a step, over all devices and microbatches
    data: DataConfig = DataConfig()
    mesh: MeshConfig = MeshConfig()
    accumulate: int = 1  # microbatches a step, weighted by their tokens
    z_loss: float = 0.0  # weight of mean(logsumexp(logits)^2)
    seed: int = 0  # of the initial parameters
    log_every: int = 50  # steps between rows of metrics.jsonl
    eval_every: int = 0  # steps between evaluations; 0: only after the last step
    eval_tokens: int = 65_536  # tokens scored of each validation set, rounded down to whole windows
    checkpoint_every: int = 500
    checkpoints_kept: int = 2
    init_from: str | None = None  # run folder whose final parameters this run starts from

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "batch_size",
            "accumulate",
            "log_every",
            "eval_tokens",
            "checkpoint_every",
            "checkpoints_kept",
        ):
            _at_least(self, name, 1, "config")
        for name in ("z_loss", "eval_every", "seed"):
            _at_least(self, name, 0, "config")
        if self.seed >= 2**32:
            raise UsageError(f"seed is {self.seed}; it must be below 2**32", where="config")
        if self.batch_size % self.accumulate:
            raise UsageError(
                f"accumulate {self.accumulate} does not divide batch_size {self.batch_size}", where="config"
            )

    @property
    def tokens_per_step(self) -> int:
        """Tokens predicted in one optimizer step."""
        return self.batch_size * self.model.context_length


def _at_least(config: OptimizerConfig | RunConfig, name: str, least: int, where: str) -> None:
    if getattr(config, name) < least:
        raise UsageError(f"{name} is {getattr(config, name)}; it must be at least {least}", where=where)
