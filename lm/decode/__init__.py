"""Parameters and a prompt to text: `from lm.decode import generate`."""

from lm.decode.generate import Completion, Decoder, generate

__all__ = ["Completion", "Decoder", "generate"]
