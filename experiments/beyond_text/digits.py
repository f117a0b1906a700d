"""Scikit-learn's 1,797 digits (8 x 8 pixels of 0 to 16) as a stream of tokens, and as patches among text."""

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tokenizers
from sklearn.datasets import load_digits

from lm.base.files import write_text
from lm.data.tokenizer import END_OF_TEXT
from lm.model.patches import PATCH

LEVELS = "ABCDEFGHIJKLMNOPQ"  # an intensity is a character, and so a token
SIDE, PATCH_SIDE = 8, 2
END = 256  # of an answer, in bytes
# What is asked in text before the patches, and the answers that there are.
QUESTIONS = {
    "name:": ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"),
    "even?": ("yes", "no"),
}
HELD_OUT = 360


class Digits(NamedTuple):
    """Images [n, 8, 8] of 0 to 16, and what they show."""

    images: np.ndarray
    shown: np.ndarray

    def answers(self, question: str) -> np.ndarray:
        """The place of the right answer to a question, for each image."""
        return self.shown % len(QUESTIONS[question])

    @property
    def patches(self) -> np.ndarray:
        """Patches of 2 x 2 in raster order [n, 16, 4], shifted and scaled to a mean square of 1 about a mean of 0."""
        squares = self.images.reshape(-1, SIDE // PATCH_SIDE, PATCH_SIDE, SIDE // PATCH_SIDE, PATCH_SIDE)
        rows = squares.swapaxes(2, 3).reshape(len(self.images), -1, PATCH_SIDE**2)
        return ((rows - 4.9) / 6.0).astype(np.float32)  # the mean and deviation of all pixels


def load() -> tuple[Digits, Digits]:
    """The digits to learn from, and `HELD_OUT` others, always the same."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    images, shown = data.images[order].astype(np.int64), data.target[order]
    return Digits(images[HELD_OUT:], shown[HELD_OUT:]), Digits(images[:HELD_OUT], shown[:HELD_OUT])


def write_stream(folder: Path) -> dict[str, str]:
    """Writes every image as a document of 64 characters, and their tokenizer; returns the run's `data`."""
    written = {level: number for number, level in enumerate(LEVELS)} | {END_OF_TEXT: len(LEVELS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(written, []))
    tokenizer.add_special_tokens([END_OF_TEXT])
    tokenizer.decoder = tokenizers.decoders.Fuse()
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / "tokenizer.json", tokenizer.to_str())
    lines = [json.dumps({"text": "".join(LEVELS[pixel] for pixel in image.ravel())}) for image in
             load_digits().images.astype(np.int64)]  # fmt: skip
    write_text(folder / "digits.jsonl", "\n".join(lines) + "\n")
    return {"corpus": str(folder / "digits.jsonl"), "tokenizer": str(folder / "tokenizer.json")}


def image_of(text: str) -> np.ndarray | None:
    """The image that a sampled text spells; None where it has not 64 pixels."""
    return np.array([LEVELS.index(level) for level in text]).reshape(SIDE, SIDE) if len(text) == SIDE**2 else None


def rows(question: str, patches: np.ndarray, answers: np.ndarray) -> dict[str, np.ndarray]:
    """A row an image: the question in bytes, its patches, the answer in bytes; only the answer is to be learnt."""
    longest = max(len(answer) for known in QUESTIONS.values() for answer in known)
    count, places = patches.shape[:2]
    before = len(question) + places
    tokens = np.zeros((count, before + longest + 1), np.int32)
    weights = np.zeros_like(tokens, np.float32)
    numbers = np.zeros((*tokens.shape, patches.shape[-1]), np.float32)
    tokens[:, : len(question)] = list(question.encode())
    tokens[:, len(question) : before] = PATCH
    numbers[:, len(question) : before] = patches
    for number, answer in enumerate(QUESTIONS[question]):
        of = answers == number
        ids = [*answer.encode(), END]
        tokens[of, before : before + len(ids)] = ids
        weights[of, before : before + len(ids)] = 1.0
    targets = np.maximum(tokens[:, 1:], 0)  # a patch is never a target that counts
    return {"inputs": tokens[:, :-1], "targets": targets, "weights": weights[:, 1:], "patches": numbers[:, :-1]}
