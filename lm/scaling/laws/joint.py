"""Laws of N and D that are no plain sum of powers: the gamma form, Kaplan's joint law, and the over-training law."""

import dataclasses
import itertools
import math
from collections.abc import Mapping

import numpy as np

from lm.scaling.laws.base import Array, Law, Logs, Relative, log_sum
from lm.scaling.laws.power import HOFFMANN, START_SPLITS, TIED

START_GAMMAS = (0.6, 1.0, 1.6)
EVERY = 5  # of Hoffmann's starts; shares no factor with the sides of their grid
START_KAPLAN_EXPONENTS = (0.05, 0.1, 0.2, 0.4)
KAPLAN_REACH = 200.0  # e-folds that N_c and D_c may lie from the data: log(loss) / alpha with alpha from .01 on
FLOPS_PER_ND = 6.0


@dataclasses.dataclass(frozen=True)
class Gamma(Law):
    """E + (A / N^alpha + B / D^beta)^gamma; gamma = 1 is Hoffmann's law."""

    parameters = ("E", "A", "B", "alpha", "beta", "gamma")
    variables = ("n", "d")

    @property
    def logged(self) -> Mapping[str, Relative]:
        return HOFFMANN.logged

    def log_loss(self, theta: Array, logs: Logs) -> Array:
        e, log_a, log_b, alpha, beta, gamma = np.moveaxis(theta[..., None], -2, 0)
        return np.log(e + np.exp(gamma * log_sum(log_a - alpha * logs["n"], log_b - beta * logs["d"])))

    def log_loss_and_jacobian(self, theta: Array, logs: Logs) -> tuple[Array, Array]:
        e, log_a, log_b, alpha, beta, gamma = np.moveaxis(theta[..., None], -2, 0)
        of_n, of_d = log_a - alpha * logs["n"], log_b - beta * logs["d"]
        total = log_sum(of_n, of_d)
        loss = e + np.exp(gamma * total)
        share = 1 - e / loss
        by_n, by_d = (share * gamma * np.exp(term - total) for term in (of_n, of_d))
        slopes = [1 / loss, by_n, by_d, -by_n * logs["n"], -by_d * logs["d"], share * total]
        return np.log(loss), np.stack(slopes, axis=1)

    def starts(self, logs: Logs, loss: Array) -> Array:
        """Some of Hoffmann's starts with the same sum of terms at the centre and the same slopes, for each gamma."""
        found = []
        for gamma in START_GAMMAS:
            theta = HOFFMANN.starts(logs, loss)[::EVERY]
            total = log_sum(theta[:, 1], theta[:, 2])
            theta[:, 1:3] += ((1 / gamma - 1) * total)[:, None]
            theta[:, 3:5] = theta[:, 3:5] / gamma
            found.append(np.column_stack([theta, np.full(len(theta), gamma)]))
        return np.concatenate(found)

    def balanced(self, parameters: Array) -> tuple[Array, Array, Array, Array]:
        _, a, b, alpha, beta, _ = np.moveaxis(parameters, -1, 0)
        return np.log(a), alpha, np.log(b), beta


@dataclasses.dataclass(frozen=True)
class KaplanJoint(Law):
    """[(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D: (N_c / N)^alpha_N without end of data, and the other way."""

    parameters = ("N_c", "D_c", "alpha_N", "alpha_D")
    variables = ("n", "d")

    @property
    def logged(self) -> Mapping[str, Relative]:
        return {"N_c": (("n", None),), "D_c": (("d", None),)}

    def log_loss(self, theta: Array, logs: Logs) -> Array:
        log_n, log_d, alpha_n, alpha_d = np.moveaxis(theta[..., None], -2, 0)
        return alpha_d * log_sum(alpha_n / alpha_d * (log_n - logs["n"]), log_d - logs["d"])

    def log_loss_and_jacobian(self, theta: Array, logs: Logs) -> tuple[Array, Array]:
        log_n, log_d, alpha_n, alpha_d = np.moveaxis(theta[..., None], -2, 0)
        far_n, of_d = log_n - logs["n"], log_d - logs["d"]
        of_n = alpha_n / alpha_d * far_n
        total = log_sum(of_n, of_d)
        by_n, by_d = np.exp(of_n - total), np.exp(of_d - total)
        return alpha_d * total, np.stack([alpha_n * by_n, alpha_d * by_d, by_n * far_n, total - by_n * of_n], axis=1)

    def starts(self, logs: Logs, loss: Array) -> Array:
        """Both exponents small to large, the median loss split over the two terms."""
        middle = np.log(np.median(loss))
        grid = itertools.product(START_SPLITS, START_KAPLAN_EXPONENTS, START_KAPLAN_EXPONENTS)
        split, alpha_n, alpha_d = np.array(list(grid)).T
        log_n = alpha_d / alpha_n * (np.log(split) + middle / alpha_d)
        return np.stack([log_n, np.log(1 - split) + middle / alpha_d, alpha_n, alpha_d], axis=1)

    def bounds(self, logs: Logs, loss: Array) -> tuple[Array, Array]:
        low, high = super().bounds(logs, loss)
        low[:2], high[:2] = low[:2] - KAPLAN_REACH, high[:2] + KAPLAN_REACH
        return low, high

    def balanced(self, parameters: Array) -> tuple[Array, Array, Array, Array]:
        n, d, alpha_n, alpha_d = np.moveaxis(parameters, -1, 0)
        ratio = alpha_n / alpha_d
        return ratio * np.log(n), ratio, np.log(d), np.ones_like(ratio)


@dataclasses.dataclass(frozen=True)
class Overtraining(Law):
    """E + (A M^eta + B M^-eta) C^-eta with M = D / N tokens per parameter and C = 6 N D FLOP.

    The tied law of `power` in other coordinates, alpha = 2 eta: A M^eta C^-eta = A 6^-eta N^-2eta. The paper calls the
    coefficients a and b.
    """

    parameters = ("E", "A", "B", "eta")
    variables = ("n", "d")

    @property
    def logged(self) -> Mapping[str, Relative]:
        return {"A": (("n", "eta"), ("n", "eta")), "B": (("d", "eta"), ("d", "eta"))}

    def log_loss(self, theta: Array, logs: Logs) -> Array:
        return TIED.log_loss(_tied(theta), logs)

    def log_loss_and_jacobian(self, theta: Array, logs: Logs) -> tuple[Array, Array]:
        value, slopes = TIED.log_loss_and_jacobian(_tied(theta), logs)
        slopes[:, 3] = 2 * slopes[:, 3] - math.log(FLOPS_PER_ND) * (slopes[:, 1] + slopes[:, 2])
        return value, slopes

    def starts(self, logs: Logs, loss: Array) -> Array:
        """The tied law's."""
        theta = TIED.starts(logs, loss)
        theta[:, 3] /= 2
        theta[:, 1:3] += theta[:, 3:] * math.log(FLOPS_PER_ND)
        return theta

    def balanced(self, parameters: Array) -> tuple[Array, Array, Array, Array]:
        _, log_a, log_b, alpha = np.moveaxis(_tied(self.to_inner(parameters, {})), -1, 0)
        return log_a, alpha, log_b, alpha


def _tied(theta: Array) -> Array:
    """The tied law's inner parameters [..., P] of the over-training law's, at the same centre."""
    e, log_a, log_b, eta = np.moveaxis(theta, -1, 0)
    shift = eta * math.log(FLOPS_PER_ND)
    return np.stack([e, log_a - shift, log_b - shift, 2 * eta], axis=-1)


GAMMA = Gamma("gamma", "E + (A / N^alpha + B / D^beta)^gamma", "Busbridge et al. 2025 (arXiv:2502.08606)")
KAPLAN_JOINT = KaplanJoint(
    "kaplan_joint", "[(N_c / N)^(alpha_N / alpha_D) + D_c / D]^alpha_D", "Kaplan et al. 2020, eq. 1.5"
)
OVERTRAINING = Overtraining(
    "overtraining", "E + (A M^eta + B M^-eta) C^-eta, M = D / N, C = 6 N D", "Gadre et al. 2024, eq. 4"
)
LAWS: tuple[Law, ...] = (GAMMA, KAPLAN_JOINT, OVERTRAINING)
