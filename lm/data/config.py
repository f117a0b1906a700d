"""What a run reads, as one frozen value."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Text or token files, and how documents become training windows."""

    corpus: str = "stdlib"  # 'stdlib', a folder written by `lm tokenize`, or text: a file, folder or glob
    tokenizer: str = "bytes"  # 'bytes' or a Hugging Face tokenizer.json
    validation_fraction: float = 0.05  # share of documents held out, by hash of their text
    separator: str | None = None  # splits each .txt file into documents; None: a file is a document
    extra_validation: dict[str, str] = dataclasses.field(default_factory=dict)  # name -> text file, folder or glob
    segment_mask: bool = False  # True: attention and positions do not cross documents
    seed: int = 0  # order of the training windows
