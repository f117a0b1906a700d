"""Where a budget is spent best: one batched minimiser of a law's loss along a curve of equal cost.

Numeric for every law of n and d, since inference and repeated data leave no closed form; all vectors of parameters
(the estimate and its resamples) are minimised at once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np

from lm.scaling.laws.base import Array, Law

SERVING = 2.0  # FLOP a parameter and token of inference: one forward pass (Kaplan et al. 2020, table 1)
MOST = 1e40  # FLOP or tokens beyond which a loss counts as out of reach
GRID, ROUNDS = 33, 9  # each round narrows the bracket 16-fold: 92 e-folds to 1e-9
HALVINGS = 60


@dataclasses.dataclass(frozen=True)
class Surface:
    """The losses of a law under R vectors of natural `parameters` [R, P], and what a run costs.

    A run of n parameters on d tokens costs `flops_per_nd` n d FLOP to train and 2 n `inference_tokens` to serve
    (Sardana et al. 2024, eq. 2); of its tokens at most `unique_tokens` are distinct.
    """

    law: Law
    parameters: Array
    flops_per_nd: float
    inference_tokens: float = 0.0
    unique_tokens: float = math.inf

    @functools.cached_property
    def _theta(self) -> Array:
        return self.law.to_inner(self.parameters, {})

    def log_loss(self, log_n: Array, log_d: Array) -> Array:
        """log of the loss [R, G] at log parameters and log tokens (each [R, G])."""
        at = {
            "n": log_n,
            "d": log_d,
            "c": np.log(self.flops_per_nd) + log_n + log_d,
            "u": np.minimum(log_d, np.log(self.unique_tokens)),
        }
        # At one parameter or token a power law may pass the largest float: an infinite loss is never the least.
        with np.errstate(over="ignore"):
            return self.law.log_loss(self._theta, {name: at[name] for name in self.law.variables})

    def log_tokens(self, log_n: Array, budget: Array | float) -> Array:
        """log of the tokens, one at least, that a model may be trained on where all of it costs `budget` FLOP."""
        training = budget / np.exp(log_n) - SERVING * self.inference_tokens
        return np.log(np.maximum(training / self.flops_per_nd, 1.0))

    def flops(self, log_n: Array, log_d: Array) -> Array:
        """FLOP of training and serving."""
        return np.exp(log_n) * (self.flops_per_nd * np.exp(log_d) + SERVING * self.inference_tokens)

    def largest(self, budget: Array | float) -> Array:
        """log of the parameters at which `budget` pays for one token of training."""
        return np.log(budget) - np.log(self.flops_per_nd + SERVING * self.inference_tokens)


@dataclasses.dataclass(frozen=True)
class Optimum:
    """The least loss at a budget: logarithms of parameters, tokens and loss, each [R]; `budget` [R] in FLOP."""

    log_n: Array
    log_d: Array
    log_loss: Array
    budget: Array


def best(surface: Surface, budget: Array | float) -> Optimum:
    """The least loss that `budget` FLOP (one, or [R]) buy, serving included."""
    budget = np.broadcast_to(np.asarray(budget, np.float64), len(surface.parameters))[:, None]
    low, high = np.zeros_like(budget), surface.largest(budget)
    row = np.arange(len(budget))
    for _ in range(ROUNDS):
        log_n = low + (high - low) * np.linspace(0, 1, GRID)
        log_d = surface.log_tokens(log_n, budget)
        losses = surface.log_loss(log_n, log_d)
        at = np.argmin(losses, axis=1)
        low, high = (log_n[row, end][:, None] for end in (np.maximum(at - 1, 0), np.minimum(at + 1, GRID - 1)))
    return Optimum(log_n[row, at], log_d[row, at], losses[row, at], budget[:, 0])


def cheapest(surface: Surface, loss: float) -> Optimum:
    """The model of at most `loss` nats/token that costs least, serving included; an infinite budget where none is.

    The least loss falls with the budget: the cheapest model is the best one at the budget where the two meet.
    """
    start = -surface.largest(1.0) + np.zeros(len(surface.parameters))
    log_budget = _crossing(lambda at: best(surface, np.exp(at)).log_loss - np.log(loss), start, np.log(MOST))
    found = best(surface, np.exp(log_budget))
    beyond = np.where(log_budget > np.log(MOST) - 1e-9, np.inf, 0.0)
    return Optimum(found.log_n + beyond, found.log_d + beyond, found.log_loss, found.budget + beyond)


def log_tokens_for(surface: Surface, log_n: Array, log_loss: Array) -> Array:
    """log of the tokens on which models of `log_n` [R, G] reach `log_loss` [R, G]; infinite where they never do."""
    found = _crossing(lambda at: surface.log_loss(log_n, at) - log_loss, np.zeros_like(log_n), np.log(MOST))
    return np.where(found > np.log(MOST) - 1e-9, np.inf, found)


def near_optimal(surface: Surface, optimum: Optimum, within: float) -> tuple[Array, Array]:
    """log of the smallest and largest n [R] whose loss at the optimum's budget is at most 1 + `within` of the least."""
    limit = optimum.log_loss + np.log1p(within)

    def above(log_n: Array) -> Array:
        at = log_n[:, None]
        return surface.log_loss(at, surface.log_tokens(at, optimum.budget[:, None]))[:, 0] - limit

    return (
        _crossing(above, np.zeros_like(optimum.log_n), optimum.log_n),
        _crossing(above, surface.largest(optimum.budget), optimum.log_n),
    )


def _crossing(above: Callable[[Array], Array], outside: Array, inside: Array | float) -> Array:
    """Where a monotone function that is positive `outside` turns negative on the way `inside`, by bisection."""
    inside = np.broadcast_to(inside, np.shape(outside))
    for _ in range(HALVINGS):
        middle = (outside + inside) / 2
        positive = above(middle) > 0
        outside, inside = np.where(positive, middle, outside), np.where(positive, inside, middle)
    return inside
