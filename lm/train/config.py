"""A whole run, as one frozen value: what `configs/*.py` resolve to and `config.json` holds."""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from lm.base.config import build
from lm.base.errors import UsageError
from lm.data.config import DataConfig
from lm.model.config import ModelConfig
from lm.model.counting import Counting, describes_counting
from lm.parallel.mesh import MeshConfig


class Schedule(enum.StrEnum):
    """The learning rate after warm-up: half a cosine, or constant and then a linear cooldown."""

    COSINE = "cosine"
    WSD = "wsd"


class OnNan(enum.StrEnum):
    """What a loss or gradient norm that is not finite does: end the run, or leave that update out."""

    STOP = "stop"
    SKIP = "skip"


class OnSpike(enum.StrEnum):
    """What a loss or gradient norm far above the run's own does: nothing, end the run, or leave that update out."""

    IGNORE = "ignore"
    STOP = "stop"
    SKIP = "skip"


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
    checkpoints_kept: int = 2  # the newest ones
    checkpoints_kept_every: int = 0  # and those at multiples of so many steps, for good; 0: none
    on_nan: OnNan = OnNan.STOP
    on_spike: OnSpike = OnSpike.IGNORE
    spike_deviations: float = 6.0  # a spike lies so many running standard deviations above the running mean
    spike_window: int = 128  # steps that the running mean and deviation forget over
    skips_in_row: int = 10  # more updates left out one after the other end the run
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
            "spike_window",
            "skips_in_row",
        ):
            _at_least(self, name, 1, "config")
        for name in ("z_loss", "eval_every", "seed", "checkpoints_kept_every", "spike_deviations"):
            _at_least(self, name, 0, "config")
        if self.checkpoints_kept_every % self.checkpoint_every:
            raise UsageError(
                f"checkpoints_kept_every {self.checkpoints_kept_every} is no multiple of checkpoint_every "
                f"{self.checkpoint_every}: none is saved there",
                where="config",
            )
        if self.seed >= 2**32:
            raise UsageError(f"seed is {self.seed}; it must be below 2**32", where="config")
        if self.batch_size % self.accumulate:
            raise UsageError(
                f"accumulate {self.accumulate} does not divide batch_size {self.batch_size}", where="config"
            )

    @property
    def guarded(self) -> bool:
        """Whether the step judges its own loss and gradient norm: nothing of that is computed otherwise."""
        return self.on_nan is OnNan.SKIP or self.on_spike is not OnSpike.IGNORE

    @property
    def tokens_per_step(self) -> int:
        """Tokens predicted in one optimizer step."""
        return self.batch_size * self.model.predicted_length


@dataclasses.dataclass(frozen=True)
class CountingRun:
    """One counting run: the batches that a training run of the same fields takes its steps on, counted in one pass.

    Raises:
      UsageError: counts that are not positive.
    """

    model: Counting
    steps: int
    batch_size: int  # windows a step
    data: DataConfig = DataConfig()
    eval_tokens: int = 65_536  # tokens scored of each validation set, rounded down to whole windows

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "eval_tokens"):
            _at_least(self, name, 1, "config")

    @property
    def tokens_per_step(self) -> int:
        """Tokens predicted in one step."""
        return self.batch_size * self.model.context_length


AnyRun = RunConfig | CountingRun


def build_run(values: Mapping[str, Any], where: str = "config") -> AnyRun:
    """The run that plain values describe: a counting one where its model is.

    Raises:
      UsageError: as `lm.base.config.build`.
    """
    if describes_counting(values.get("model")):
        return build(CountingRun, values, where)
    return build(RunConfig, values, where)


def _at_least(config: OptimizerConfig | AnyRun, name: str, least: int, where: str) -> None:
    if getattr(config, name) < least:
        raise UsageError(f"{name} is {getattr(config, name)}; it must be at least {least}", where=where)
