"""The fields of a config.json: each is taken once, and what nobody has taken is refused by name."""

from collections.abc import Mapping, Sequence
from typing import Any

from lm.base.errors import UsageError

REQUIRED = object()

# They say how a model is trained, run or shown, not what it computes.
IDLE = frozenset(
    {
        *("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "initializer_range"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "attention_dropout", "pretraining_tp"),
        *("output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id", "problem_type"),
        *("_attn_implementation", "_attn_implementation_autoset", "chunk_size_feed_forward", "task_specific_params"),
    }
)


class Fields:
    """What is left of a config.json; `where` is its path."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self._left, self.where = dict(values), where

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """The value of a field, or `default` where it is left out.

        Raises:
          UsageError: it is left out and has no default.
        """
        if name not in self._left and default is REQUIRED:
            raise UsageError(f"the field '{name}' is missing", where=self.where)
        return self._left.pop(name, default)

    def number(self, name: str, default: Any = REQUIRED) -> Any:
        """A number, true, false or null.

        Raises:
          UsageError: something else, or left out without a default.
        """
        value = self.take(name, default)
        if isinstance(value, int | float | None):
            return value
        raise UsageError(f"{name} is {value!r}, which is no number", where=self.where)

    def one_of(self, name: str, supported: Sequence[Any]) -> None:
        """Sees that a field has one of the values that are supported; left out, it has the first.

        Raises:
          UsageError: it has another.
        """
        value = self.take(name, supported[0])
        if value not in supported:
            raise self.refusal(name, value, " or ".join(repr(known) for known in supported))

    def refusal(self, name: str, value: Any, supported: str) -> UsageError:
        """The one message for a value that our model has no place for."""
        return UsageError(f"{name} is {value!r}", where=self.where, do=f"Supported: {supported}.")

    def end(self, idle: frozenset[str] = IDLE) -> None:
        """Sees that nothing is left but what changes nothing.

        Raises:
          UsageError: a field is.
        """
        for name, value in self._left.items():
            if name not in idle:
                raise UsageError(
                    f"{name} is {value!r}: nothing is known of such a field here",
                    where=self.where,
                    do="Take it out of config.json if it changes nothing that the model computes.",
                )
