"""What a run says while it trains: rows, clocks, warnings, and the word that stops it when the loss is not a number."""

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from lm.base.errors import RunError
from lm.model.score import Score
from lm.model.transformer import expected_first_loss
from lm.run.record import MetricsLog, RowLog
from lm.run.writers import Writer
from lm.train.config import OnSpike, RunConfig
from lm.train.guard import JUDGED
from lm.train.optimizer import learning_rate

logger = logging.getLogger("lm.train")

_JUDGEMENTS = ("spike", "skipped_in_row")  # of the step alone: no row is made of them
FIRST_LOSS_TOLERANCE = 0.25  # nats/token beyond what the customary initial scales give


def evaluation_row(step: int, tokens: int, name: str, score: Score) -> dict[str, Any]:
    """The row of `metrics.jsonl` of one evaluation set after so many steps and tokens."""
    row = {"loss": score.nats_per_token, "loss_se": score.standard_error, "bits_per_byte": score.bits_per_byte}
    return {"kind": "eval", "step": step, "tokens": tokens, "set": name, **row, "scored": score.tokens}


class Recorder:
    """Turns the device metrics of each step into rows of `metrics.jsonl`, `timing.jsonl` and the writers.

    Device scalars are kept until a row is due and fetched only after a later step has been dispatched, so that logging
    never stalls the device. A row is the mean over the steps since the last one whose update was made, and, for a
    guarded run, the number of those whose update was not. `interval` holds what has been fetched since the last row; a
    checkpoint keeps it.
    """

    def __init__(
        self,
        config: RunConfig,
        metrics: MetricsLog,
        timing: RowLog,
        writers: Sequence[Writer],
        step: int,
        interval: Sequence[dict[str, float]],
    ):
        self._config, self._metrics, self._timing, self._writers = config, metrics, timing, writers
        self._pending: list[tuple[int, dict[str, jax.Array]]] = []
        self.interval = list(interval)
        self.numbers = ""
        self._clock: float | None = (
            None  # when `_clock_step` had ended; unknown before the first row, so that compilation is left out
        )
        self._clock_step = step

    def dispatched(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the device metrics of `step` (counted from 1), and writes the row of the step before when it is due."""
        due = step - 1
        if self._pending and self._is_due(due):
            self.drain()
        self._pending.append((step, metrics))

    def drain(self) -> None:
        """Fetches everything pending and writes the rows that are due.

        Raises:
          RunError: a loss or gradient norm is not finite or a spike, and the run does not skip it, or too many
            updates in a row were skipped; the row has been written.
        """
        for step, device in self._pending:
            values = {name: float(value) for name, value in jax.device_get(device).items()}
            wrong = self._wrong(values)
            self.interval.append({name: value for name, value in values.items() if name not in _JUDGEMENTS})
            if self._is_due(step) or wrong:
                self._write(step)
            if wrong:
                raise RunError(
                    f"{wrong} at step {step}",
                    where=str(self._metrics.path),
                    do="Lower peak_lr, raise warmup_steps or set clip_norm; checkpoints hold earlier steps.",
                )
            if values.get("skipped"):
                numbers = ", ".join(f"{name} {values[name]:.4g}" for name in JUDGED)
                logger.warning("step %d: the update was skipped (%s)", step, numbers)
            if step == 1:
                self._check_first_loss(values["loss"])
        self._pending.clear()

    def evaluation(self, step: int, name: str, score: Score) -> None:
        """Writes the row of one evaluation set."""
        row = evaluation_row(step, step * self._config.tokens_per_step, name, score)
        self._metrics.append(row)
        for writer in self._writers:
            writer.write(step, {f"{name}/{key}": row[key] for key in ("loss", "loss_se", "bits_per_byte")})
        self._clock, self._clock_step = time.monotonic(), step  # the evaluation's own time is not the steps'

    def _is_due(self, step: int) -> bool:
        return step == 1 or step % self._config.log_every == 0 or step == self._config.steps

    def _wrong(self, values: dict[str, float]) -> str:
        """Why the run cannot go on after a step with these values; empty when it can."""
        if values.get("skipped"):
            in_row = int(values["skipped_in_row"])
            return f"{in_row} updates in a row were skipped, the last" if in_row > self._config.skips_in_row else ""
        if values.get("spike") and self._config.on_spike is OnSpike.STOP:
            return f"a spike ({', '.join(f'{name} is {values[name]:.4g}' for name in JUDGED)})"
        return ", ".join(f"{name} is {value}" for name, value in values.items() if not math.isfinite(value))

    def _write(self, step: int) -> None:
        config = self._config
        kept = [values for values in self.interval if not values.get("skipped")] or self.interval
        row = {name: statistics.fmean(values[name] for values in kept) for name in self.interval[0]}
        if "skipped" in row:
            row["skipped"] = sum(values["skipped"] for values in self.interval)
        row["lr"] = learning_rate(config.optimizer, config.steps, step - 1)
        self._metrics.append({"kind": "train", "step": step, "tokens": step * config.tokens_per_step, **row})
        self.interval.clear()
        for writer in self._writers:
            writer.write(step, row)
        self.numbers = f"loss {row['loss']:.4f}"
        self._time(step)

    def _time(self, step: int) -> None:
        now = time.monotonic()
        if self._clock is not None:
            seconds, steps = now - self._clock, step - self._clock_step
            rate = steps * self._config.tokens_per_step / seconds
            self._timing.append({"step": step, "steps": steps, "seconds": seconds, "tokens_per_second": rate})
            self.numbers += f"  {rate:,.0f} tokens/s"
        self._clock, self._clock_step = now, step

    def _check_first_loss(self, loss: float) -> None:
        model = self._config.model
        low = math.log(model.vocab_size)
        plain = dataclasses.replace(model, width_scaling=None)
        high = max(expected_first_loss(dataclasses.replace(plain, init_std=std)) for std in (0.02, None))
        inside = low - FIRST_LOSS_TOLERANCE <= loss <= high + FIRST_LOSS_TOLERANCE
        if self._config.init_from is None and not inside:
            logger.warning(
                "the first loss is %.3f nats/token where random parameters give %.3f (ln %d) to %.3f: "
                "look at the initialisation or the targets",
                loss,
                low,
                model.vocab_size,
                high,
            )
