"""The tokenizer of a published model: which of its tokens end and begin a document, and the files that say so."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from lm.base.errors import RunError, UsageError
from lm.base.files import write_json
from lm.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer

TOKENIZER = "tokenizer.json"


def spec_of(folder: Path, given: str | None, values: Mapping[str, Any]) -> str:
    """What `lm.data.tokenizer.load_tokenizer` is to be asked for: `given`, or the folder's own tokenizer.json.

    A document ends with the first `eos_token_id` of config.json. It begins with the token that the tokenizer itself
    puts in front, else with `bos_token_id`, else with what ends it.

    Raises:
      UsageError: no tokenizer.json, or it lacks a token that config.json names.
    """
    if given is not None:
        return given
    path = folder / TOKENIZER
    if not path.is_file():
        raise UsageError(
            f"{TOKENIZER} is missing",
            where=str(folder),
            do="Save it with transformers (AutoTokenizer, save_pretrained), or pass --tokenizer.",
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise UsageError(f"not a {TOKENIZER}: {error}", where=str(path)) from error

    def named(field: str, i: Any) -> str:
        if i is None:
            return ""
        token = tokenizer.id_to_token(i) if isinstance(i, int) and i >= 0 else None
        if token is None:
            raise UsageError(f"{field} is {i!r}, which {TOKENIZER} does not have", where=str(folder))
        return token

    end = values.get("eos_token_id")
    end = end[0] if isinstance(end, list) and end else end
    front = tokenizer.encode("").ids
    begin = front[0] if front and front[0] != end else values.get("bos_token_id")
    return "#".join([str(path), named("eos_token_id", end), named("bos_token_id", begin)]).rstrip("#")


def write_tokenizer(tokenizer: Tokenizer, folder: Path, context_length: int) -> dict[str, int]:
    """Writes what `AutoTokenizer` reads; returns the fields of config.json that go with it.

    Raises:
      RunError: ids that stand for no text.
    """
    if isinstance(tokenizer, HuggingFaceTokenizer):
        shutil.copyfile(tokenizer.path, folder / TOKENIZER)
    elif isinstance(tokenizer, ByteTokenizer):
        (folder / TOKENIZER).write_text(tokenizer.to_json())
    else:
        raise RunError(f"the tokenizer {tokenizer.spec} has no {TOKENIZER}")
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    names = tokenizers.Tokenizer.from_file(str(folder / TOKENIZER))
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{field.removesuffix("_id"): names.id_to_token(i) for field, i in ids.items()},
            "model_max_length": context_length,
            "clean_up_tokenization_spaces": False,
        },
    )
    return ids
