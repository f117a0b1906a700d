"""The figure: sampled digits above real ones."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

COLUMNS = 10


def draw(path: Path, sampled: Sequence[np.ndarray], real: Sequence[np.ndarray]) -> None:
    """Writes a row of sampled images and one of held-out ones, as many of each as there are and fit."""
    figure, axes = plt.subplots(2, COLUMNS, figsize=(COLUMNS * 0.7, 1.8))
    for row, (name, images) in enumerate((("sampled", sampled), ("held out", real))):
        for column, axis in enumerate(axes[row]):
            axis.set(xticks=[], yticks=[])
            axis.set_visible(column < len(images))
            if column < len(images):
                axis.imshow(images[column], cmap="gray_r", vmin=0, vmax=16)
        axes[row, 0].set_ylabel(name, fontsize=8)
    figure.tight_layout(pad=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
