"""Where each of our parameters lies among their tensors, and the turning of one into the other.

Ours are stacked over layers, matrices multiply from the right and heads are an axis of their own; theirs are a tensor a
layer, flat.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import flax.linen as nn
import numpy as np
from flax import traverse_util

from lm.interop.layout import Layout, Part
from lm.model.config import ModelConfig
from lm.model.transformer import abstract_variables

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Place:
    """One layer (or expert) of one of our leaves, and the tensor (or the part of its last axis) that holds it.

    Attributes:
      leaf: a path of our parameters, `layers/attention/query/kernel`.
      index: of the layer (and the expert) in the stacked leaf; () where it is not stacked.
      shape: of ours.
      tensor: their name; `of` is the shape of the whole tensor.
      part: which of `parts` equal parts of its last axis.
      matrix: (inputs, outputs) of a matrix; None for what is stored as it is, vectors flat.
      transposed: whether theirs is [outputs, inputs].
      offset: what ours has more than theirs.
    """

    leaf: str
    index: tuple[int, ...]
    shape: Shape
    tensor: str
    part: int
    parts: int
    matrix: Shape | None
    transposed: bool
    offset: float

    @property
    def stored(self) -> Shape:
        """The shape of the part."""
        if self.matrix is not None:
            return self.matrix[::-1] if self.transposed else self.matrix
        return self.shape if self.leaf.endswith("embedding") else (math.prod(self.shape),)

    @property
    def of(self) -> Shape:
        """The shape of the whole tensor."""
        return (*self.stored[:-1], self.stored[-1] * self.parts)

    def ours(self, tensor: np.ndarray) -> np.ndarray:
        """Our array, float32 or a view of the tensor in its own type."""
        width = self.stored[-1]
        found = tensor[..., self.part * width : (self.part + 1) * width]
        if self.matrix is not None and self.transposed:
            found = found.T
        found = found.reshape(self.shape)
        return found.astype(np.float32) + np.float32(self.offset) if self.offset else found

    def theirs(self, leaf: np.ndarray) -> np.ndarray:
        """Their part, float32, of our whole leaf."""
        found = leaf[self.index].reshape(self.matrix or self.stored)
        if self.matrix is not None and self.transposed:
            found = found.T
        return found - np.float32(self.offset) if self.offset else found


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """The shapes of our parameters by path, `layers/attention/query/kernel`."""
    params = nn.unbox(abstract_variables(model))["params"]
    return {path: leaf.shape for path, leaf in traverse_util.flatten_dict(params, sep="/").items()}


def places(layout: Layout, shapes: Mapping[str, Shape]) -> dict[str, list[Place]]:
    """Where all parameters lie, by leaf."""
    return {path: _of_leaf(layout, path, shape) for path, shape in shapes.items()}


def by_tensor(found: Mapping[str, Sequence[Place]]) -> dict[str, list[Place]]:
    """The places in each tensor, in the order of its parts."""
    tensors: dict[str, list[Place]] = {}
    for place in itertools.chain.from_iterable(found.values()):
        tensors.setdefault(place.tensor, []).append(place)
    return {name: sorted(held, key=lambda place: place.part) for name, held in tensors.items()}


def _of_leaf(layout: Layout, path: str, shape: Shape) -> list[Place]:
    module, _, kind = path.rpartition("/")
    if path in layout.modules:  # a leaf that is a module there
        module, kind = path, path
    there = layout.modules[module]
    part = there if isinstance(there, Part) else Part(there, 0, 1)
    prefix = "" if kind == "head" else layout.prefix + (layout.layers if module.startswith("layers/") else "")
    name = prefix + part.module + (".bias" if kind == "bias" else ".weight")
    stacked = name.count("{")  # leading axes of ours that are many tensors there
    own = shape[stacked:]
    matrix = None
    if kind in ("kernel", "head"):
        inputs = 2 if module.endswith("attention/out") else 1  # heads and their width
        matrix = (math.prod(own[:inputs]), math.prod(own[inputs:]))
    return [
        Place(
            leaf=path,
            index=index,
            shape=own,
            tensor=name.format(*index),
            part=part.index,
            parts=part.count,
            matrix=matrix,
            transposed=layout.transposed or kind == "head",
            offset=layout.scale_offset if kind == "scale" else 0.0,
        )
        for index in np.ndindex(shape[:stacked])
    ]
