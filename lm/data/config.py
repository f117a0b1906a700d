"""What a run reads, as one frozen value."""

import dataclasses
import math
from collections import Counter

from lm.base.config import LATER
from lm.base.errors import UsageError

VALIDATION = "validation"
"""The name of the scores that stand for a run: of what is held out of its text, of a mixture by the parts' shares."""


@dataclasses.dataclass(frozen=True)
class Component:
    """One corpus of a mixture. Its weight over the sum of all weights is its share of the training windows.

    Raises:
      UsageError: a weight that is not positive.
    """

    name: str  # of its scores, and in the run table
    corpus: str  # as `DataConfig.corpus`
    weight: float

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise UsageError(f"the weight of '{self.name}' is {self.weight}; it must be above 0",
                             where="config.data.mixture", do="Leave out what is not to be read.")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text or token files, and how documents become training windows.

    Raises:
      UsageError: a name that is empty, reserved or given twice, or a corpus beside a mixture.
    """

    corpus: str = "stdlib"  # 'stdlib', a folder written by `lm tokenize`, or text: a file, folder or glob
    tokenizer: str = "bytes"  # 'bytes' or a Hugging Face tokenizer.json
    validation_fraction: float = 0.05  # share of documents held out, by hash of their text
    separator: str | None = None  # splits each .txt file into documents; None: a file is a document
    extra_validation: dict[str, str] = dataclasses.field(default_factory=dict)  # name -> text file, folder or glob
    segment_mask: bool = False  # True: attention and positions do not cross documents
    seed: int = 0  # order of the training windows
    mixture: tuple[Component, ...] = dataclasses.field(default=(), metadata=LATER)  # several corpora, not `corpus`

    def __post_init__(self) -> None:
        if self.mixture and self.corpus != DataConfig.corpus:
            raise UsageError(f"corpus '{self.corpus}' and a mixture both say what is trained on", where="config.data",
                             do="Make the corpus a part of the mixture.")  # fmt: skip
        names = Counter([*(component.name for component in self.mixture), *self.extra_validation])
        names[VALIDATION] += self.validation_fraction > 0
        for name, times in names.items():
            if times > 1 or not name:
                raise UsageError(f"'{name}' names {times} texts" if name else "a text has no name", where="config.data",
                                 do=f"Give each its own; '{VALIDATION}' is what is held out.")  # fmt: skip

    @property
    def components(self) -> tuple[Component, ...]:
        """What is trained on: the mixture, or the corpus alone."""
        return self.mixture or (Component(VALIDATION, self.corpus, 1.0),)
