"""Parameters and a prompt to text: `from lm.decode import generate`."""

from lm.decode.ask import generate, load_decoder
from lm.decode.constrain import Constraint
from lm.decode.generate import Decoder
from lm.decode.loop import Finish
from lm.decode.request import Completion

__all__ = ["Completion", "Constraint", "Decoder", "Finish", "generate", "load_decoder"]
