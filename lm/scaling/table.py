"""The run table: every column, its unit and its convention, declared once.

`run/record.py` writes these names, everything in this room reads them; a stranger's CSV is mapped onto them by flags.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Column:
    """One column of the run table."""

    name: str
    unit: str
    meaning: str


def _columns(unit: str, **meanings: str) -> tuple[Column, ...]:
    return tuple(Column(name, unit, meaning) for name, meaning in meanings.items())


COLUMNS: tuple[Column, ...] = (
    *_columns(
        "",
        cell="content hash of configuration and fingerprints: the run's folder name",
        sweep="name of the ladder, empty outside one",
        role="what the cell is for: tune, fit, holdout, repeat or baseline; empty outside a ladder",
        seed="seed of the initial parameters",
        data_seed="seed of the window order",
        commit="git commit of the code, 'unknown' outside a checkout",
        versions="python, jax, flax, numpy and optax versions, machine kind, devices and threads",
        corpus="fingerprint (sha256) of the training text",
        mixture="of a mixture, as JSON: each corpus with its share, the tokens read of it and its epochs; else empty",
        tokenizer="fingerprint (sha256) of the tokenizer",
        evaluation="fingerprint (sha256) of the validation text that `loss` is measured on",
    ),
    *_columns("tokens", context_length="T, positions a window"),
    *_columns(
        "parameters",
        params_embedding="input embedding table (V x D)",
        params_position="learned position table (0 for rotary)",
        params_head="output matrix when untied, else 0",
        params_matrices="all other matrices: attention, feed-forward and router; of a counting model its stored counts",
        params_norms="normalisation scales and all biases",
        params_total="the sum of the groups: every trained number once",
        params_active="parameters used for a token (equals total without experts; of counts one an order)",
        params_nonembedding="params_matrices + params_norms: Kaplan's N",
    ),
    *_columns("", n_layer="L", d_model="D", n_head="H", n_kv_head="K", d_ff="F", vocab_size="V"),
    *_columns(
        "tokens",
        tokens="predicted in training, repeats counted",
        tokens_unique="distinct training tokens among them",
        tokens_per_step="in one optimizer step",
        tokens_processed="positions that layers read in training: more than `tokens` where an encoder reads some",
    ),
    *_columns(
        "",
        steps="optimizer steps",
        accumulate="microbatches a step as run: more than configured where device memory ran out",
        skipped="steps whose update was left out (on_nan, on_spike)",
        peak_lr="peak learning rate",
        warmup_steps="steps of linear warm-up",
    ),
    *_columns(
        "FLOP",
        flops_6nd="6 * params_active * tokens (Hoffmann's C = 6ND, embeddings in N)",
        flops_kaplan="6 * params_nonembedding * tokens (Kaplan's C), of experts what a token uses",
        flops_matmul="every product of forward and backward, head included, attention counted causally",
        flops_matmul_full="the same with the whole T x T of attention",
        budget="asked for by the ladder, 0 outside one; the columns above say what was spent",
    ),
    *_columns(
        "nats/token",
        loss="validation cross-entropy after the last step, mean over scored tokens",
        loss_se="its standard error, clustered by document",
        train_loss="mean training cross-entropy over the logging intervals that end in the last tenth of the steps",
    ),
    *_columns("bits/byte", bits_per_byte="loss of the same tokens in bits over the bytes of their text"),
    *_columns("", lr_fraction="learning rate at that point over peak", decayed="1 when the schedule has ended"),
    *_columns("s", wall_seconds="from start to result, resumed parts added"),
    *_columns("tokens/s", tokens_per_second="median over logging intervals, compilation left out"),
    *_columns("", mfu="flops_matmul rate over `peak_flops`"),
    *_columns(
        "FLOP/s", peak_flops="what mfu is measured against: the chip's published rate, or a measured matmul rate"
    ),
)

NAMES: tuple[str, ...] = tuple(column.name for column in COLUMNS)

LATER: dict[str, str] = {"mixture": ""}
"""Columns that came after rows had been written, with what those rows would say."""
