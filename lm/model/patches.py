"""Rows of numbers in place of tokens: patches of an image, frames of a sound, and text in one sequence.

An adapter at the embedding and nothing else: a place whose token id is `PATCH` gets a linear map of its numbers where
other places get the vector of their token. What follows does not know the difference.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from lm.base.errors import UsageError
from lm.model.config import ModelConfig
from lm.model.layers import normal

PATCH = -1  # in place of a token id; it is an input only, and predicts what follows it like a token


class Patches(nn.Module):
    """The vectors of patches, P = `config.patch_width` numbers each, among those of tokens.

    Numbers of mean square 1 give vectors of the scale that token vectors begin with.
    """

    config: ModelConfig

    @nn.compact
    def __call__(self, x_BTD: jax.Array, tokens_BT: jax.Array, patches_BTP: jax.Array | None) -> jax.Array:
        """`x_BTD` with the patches' vectors at places of `PATCH`; as it is without patches.

        Raises:
          UsageError: patches for a model that has no `patch_width`, or of another one.
        """
        config, width = self.config, self.config.patch_width
        if patches_BTP is not None and patches_BTP.shape[-1] != width:
            raise UsageError(f"patches of {patches_BTP.shape[-1]} numbers, and patch_width is {width}",
                             where="config.model", do="Change one of them.")  # fmt: skip
        if width is None:
            return x_BTD
        std = config.init_scale * width**-0.5
        kernel_PD = self.param("kernel", normal(std, ("patch", "embed")), (width, config.d_model), jnp.float32)
        if patches_BTP is None:
            return x_BTD
        patch_BTD = jnp.einsum("BTP,PD->BTD", patches_BTP.astype(x_BTD.dtype), kernel_PD.astype(x_BTD.dtype))
        return jnp.where((tokens_BT == PATCH)[..., None], patch_BTD, x_BTD)
