"""The steps of a strategy in NumPy and float64, with sorting: slow and plain. One row at a time, -inf: forbidden."""

import numpy as np


def repetition(x_V, counts_V, penalty):
    changed_V = np.where(x_V > 0, x_V / penalty, x_V * penalty)
    return np.where(counts_V > 0, changed_V, x_V)


def presence(x_V, counts_V, presence, frequency=0.0):
    return x_V - presence * (counts_V > 0) - frequency * counts_V


def temperature(x_V, counts_V, value):
    if value == 0:
        return only(x_V, [np.argmax(x_V)])
    return x_V / value


def top_k(x_V, counts_V, k):
    return x_V if k == 0 else only(x_V, by_likelihood(x_V)[:k])


def top_p(x_V, counts_V, p):
    order_V = by_likelihood(x_V)
    before_V = np.concatenate([[0.0], np.cumsum(softmax(x_V)[order_V])[:-1]])
    # A crossing token nearer to p than float32 can tell is no test of anything.
    assert p in (0, 1) or np.abs(before_V[1:] - p).min() > 3e-7
    return x_V if p >= 1 else only(x_V, order_V[: max(1, int(np.sum(before_V < p)))])


def min_p(x_V, counts_V, p):
    share_V = softmax(x_V)
    return np.where(share_V >= p * share_V.max() * (1 - 1e-6), x_V, -np.inf)


def by_likelihood(x_V):
    """Ids by falling logit, of equal ones the lower id first."""
    return np.argsort(-x_V, kind="stable")


def softmax(x_V):
    weight_V = np.exp(x_V - x_V.max())
    return weight_V / weight_V.sum()


def only(x_V, ids):
    kept_V = np.full(x_V.shape, -np.inf)
    kept_V[ids] = x_V[ids]
    return kept_V


STEPS = {
    "RepetitionPenalty": repetition,
    "PresencePenalty": presence,
    "LogitBias": lambda x_V, counts_V, bias_V: x_V + np.asarray(bias_V, np.float64),
    "Temperature": temperature,
    "TopK": top_k,
    "TopP": top_p,
    "MinP": min_p,
}


def apply(steps, logits_BV, counts_BV):
    """As `lm.decode.strategy.apply`; each number of a step is one for all rows or one a row."""
    B = len(logits_BV)
    rows = []
    for row, (x_V, counts_V) in enumerate(zip(np.asarray(logits_BV, np.float64), np.asarray(counts_BV), strict=True)):
        for step in steps:
            name = type(step).__name__
            numbers = [np.asarray(value) for value in vars(step).values()]
            if name != "LogitBias":
                numbers = [np.broadcast_to(value, B)[row].astype(np.float64) for value in numbers]
                numbers = [int(value) if name == "TopK" else value for value in numbers]
            x_V = STEPS[name](x_V, counts_V, *numbers)
        rows.append(x_V)
    return np.stack(rows)
