"""A finished sweep's folder with planted truth: law, noise, curves and every file that a real sweep leaves."""

import json
from pathlib import Path

import numpy as np
import pandas as pd

from lm.scaling.fit import fit_table
from lm.scaling.planning.predict import predict
from lm.scaling.table import NAMES

TRUTH = {"E": 1.05, "A": 18.3, "B": 29.5, "alpha": 0.34, "beta": 0.28}
NOISE = 0.006  # nats/token, standard deviation of a cell's final loss
BUDGETS = (1.2e11, 2.4e11, 4.8e11, 9.6e11)
WIDTHS = ((24, 32, 40, 48, 64), (24, 32, 40, 48, 64), (32, 40, 48, 64, 80), (40, 48, 64, 80, 96))
HELD_OUT = {"width": 96, "budget": 2.4e12}
LAYERS, CONTEXT, VOCABULARY, TOKENS_PER_STEP = 2, 64, 256, 256
RATES = (1.5e-3, 3e-3, 6e-3, 1.2e-2)


def planted_loss(n, d):
    """The planted law in nats/token."""
    return TRUTH["E"] + TRUTH["A"] * n ** -TRUTH["alpha"] + TRUTH["B"] * d ** -TRUTH["beta"]


def _row(rng: np.random.Generator, role: str, budget: float, width: int, seed: int = 0, rate: float | None = None):
    matrices, embedding, norms = 12 * LAYERS * width**2, VOCABULARY * width, (2 * LAYERS + 1) * width
    n = matrices + embedding + norms
    per_token = 6 * (matrices + embedding) + 6 * LAYERS * CONTEXT * width
    steps = round(budget / per_token / TOKENS_PER_STEP)
    tokens = steps * TOKENS_PER_STEP
    best_rate = 6e-3 * (n / 3e4) ** -0.3
    rate = best_rate if rate is None else rate
    loss = planted_loss(n, tokens) + 0.06 * np.log(rate / best_rate) ** 2 + rng.normal(0, NOISE)
    row = dict.fromkeys(NAMES, np.nan) | {
        "cell": f"{role}{width:03d}{seed}{budget:.1e}{rate:.1e}".replace(".", "").replace("+", "").replace("-", "m"),
        "sweep": "synthetic", "role": role, "budget": budget, "seed": seed, "data_seed": seed, "commit": "unknown",
        "versions": "python 3.11, jax 0.10.2", "corpus": "c" * 64, "tokenizer": "t" * 64, "evaluation": "e" * 64,
        "context_length": CONTEXT, "n_layer": LAYERS, "d_model": width, "vocab_size": VOCABULARY,
        "params_embedding": embedding, "params_matrices": matrices, "params_norms": norms, "params_total": n,
        "params_active": n, "params_nonembedding": matrices + norms, "tokens": tokens, "tokens_unique": tokens,
        "tokens_per_step": TOKENS_PER_STEP, "steps": steps, "peak_lr": rate, "flops_6nd": 6 * n * tokens,
        "flops_kaplan": 6 * (matrices + norms) * tokens, "flops_matmul": per_token * tokens,
        "flops_matmul_full": 1.1 * per_token * tokens, "loss": loss, "loss_se": 0.004, "train_loss": loss - 0.02,
        "bits_per_byte": loss / np.log(2), "lr_fraction": 0.1, "decayed": 1, "wall_seconds": tokens / 2e4,
    }  # fmt: skip
    return row


def run_table(seed: int = 0) -> pd.DataFrame:
    """The cells of the sweep, in the order in which a ladder runs them: tune, fit, repeat, holdout."""
    rng = np.random.default_rng(seed)
    rows = [_row(rng, "tune", BUDGETS[0], width, rate=rate) for width in (24, 40, 64) for rate in RATES]
    rows += [_row(rng, "fit", budget, w) for budget, widths in zip(BUDGETS, WIDTHS, strict=True) for w in widths]
    rows += [_row(rng, "repeat", BUDGETS[1], 40, seed=s) for s in (1, 2, 3)]
    rows += [_row(rng, "holdout", HELD_OUT["budget"], int(HELD_OUT["width"]))]
    return pd.DataFrame(rows)


def _write_cell(folder: Path, row: pd.Series, rng: np.random.Generator) -> None:
    folder.mkdir()
    lines = []
    steps = int(row["steps"])
    for step in range(50, steps + 1, 50):
        tokens = step * TOKENS_PER_STEP
        start = (np.log(VOCABULARY) - row["loss"]) * np.exp(-step / 150)
        undecayed = 0.08 * (1 - step / steps)
        loss = planted_loss(row["params_total"], tokens) + start + undecayed + rng.normal(0, 0.03)
        rate = row["peak_lr"] * (0.1 + 0.45 * (1 + np.cos(np.pi * step / steps)))
        lines.append({"kind": "train", "step": step, "tokens": tokens, "loss": loss, "lr": rate})
    lines.append({"kind": "eval", "step": steps, "tokens": row["tokens"], "set": "validation", "loss": row["loss"]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "result.json").write_text(json.dumps({k: v for k, v in row.items() if v == v}))


def tune_record(table: pd.DataFrame) -> dict:
    """`tune.json`: the measured rates and the rule that carries up."""
    rows = table[table["role"] == "tune"]
    return {
        "rows": [{"n": r["params_total"], "peak_lr": r["peak_lr"], "loss": r["loss"]} for r in rows.to_dict("records")],
        "rule": {
            "text": "peak_lr = coefficient * n ** exponent, through the parabola's minimum of each size",
            "coefficient": 6e-3 * 3e4**0.3,
            "exponent": -0.3,
        },
    }


def write_sweep(folder: Path, seed: int = 0) -> Path:
    """Writes the whole folder and returns it."""
    rng = np.random.default_rng(seed + 1)
    table = run_table(seed)
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "table.csv", index=False)
    for _, row in table.iterrows():
        _write_cell(folder / row["cell"], row, rng)
    fit = fit_table(table, where="role == 'fit' or role == 'repeat'", bootstrap=60, others=["kaplan_c"],
                    compare=True)  # fmt: skip
    fit.save(folder / "fit.json")
    held_out = table[table["role"] == "holdout"].iloc[0]
    n, d, measured = (float(held_out[c]) for c in ("params_total", "tokens", "loss"))
    predicted = predict(fit, n, d)
    low, high = predicted.prediction_interval
    record = {
        "n": n, "d": d, "c": float(held_out["flops_matmul"]), "predicted": predicted.mean,
        "mean_interval": predicted.mean_interval, "prediction_interval": [low, high], "measured": measured,
        "error_percent": 100 * (measured / predicted.mean - 1), "inside": low <= measured <= high,
    }  # fmt: skip
    for name, value in (
        ("holdout", record),
        ("tune", tune_record(table)),
        ("ladder", {"name": "synthetic", "budgets": BUDGETS}),
    ):
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder
