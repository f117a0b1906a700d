"""The ways of `lm generate` to answer: sampling, beam search, a draft model, and the best of several samples."""

import abc
import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lm.base.errors import UsageError
from lm.decode.beam import Beams, LengthForm, beam_search
from lm.decode.clock import Clock
from lm.decode.generate import Decoder, Prompt, stream
from lm.decode.request import Completion, Request
from lm.decode.settings import Settings
from lm.decode.speculate import speculate
from lm.decode.strategy import GREEDY
from lm.decode.vote import By, best_of, by_prompt
from lm.model.config import CacheDtype
from lm.run.restore import load_model

DRAFT_TOKENS = 4


class Answer(NamedTuple):
    """An answer, and the numbers that its method adds to it."""

    completion: Completion
    numbers: dict[str, Any]


class Method(abc.ABC):
    """A way to answer prompts."""

    @abc.abstractmethod
    def answers(self, prompts: Sequence[Prompt], first: int) -> list[list[Answer]]:
        """The answers to each prompt; `first` is as in `Decoder.start`."""

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """What the answers depend on beside the request."""

    @abc.abstractmethod
    def report(self) -> str:
        """One line about the work so far."""


@dataclasses.dataclass
class Sampling(Method):
    """One token after the other, each by the request's strategy."""

    decoder: Decoder
    request: Request
    clock: Clock = dataclasses.field(default_factory=Clock)

    def answers(self, prompts: Sequence[Prompt], first: int) -> list[list[Answer]]:
        sessions = stream(self.decoder, prompts, self.request, self.request.max_tokens, first=first)
        *_, session = self.clock.follow(sessions)
        groups = by_prompt(self.decoder.completions(session), self.request.samples)
        return [[Answer(completion, {}) for completion in group] for group in groups]

    def settings(self) -> dict[str, Any]:
        return {}

    def report(self) -> str:
        return (
            f"{self.clock.tokens_per_second:,.1f} tokens/s over {self.clock.tokens} tokens after the first ones; "
            f"prefill {self.clock.prefill:.3f} s, compiling {self.clock.compile:.2f} s"
        )


@dataclasses.dataclass
class Searching(Method):
    """Beam search."""

    decoder: Decoder
    request: Request
    beams: Beams
    clock: Clock = dataclasses.field(default_factory=Clock)

    def answers(self, prompts: Sequence[Prompt], first: int) -> list[list[Answer]]:
        with self.clock.whole():
            found = beam_search(self.decoder, prompts, self.request, self.beams)
        return [[Answer(answer.completion, {"score": answer.score}) for answer in group] for group in found]

    def settings(self) -> dict[str, Any]:
        return {"strategy": None, "seed": None, "beams": dataclasses.asdict(self.beams)}

    def report(self) -> str:
        return f"{self.beams.width} beams; {self.clock.loop:.3f} s, compiling {self.clock.compile:.2f} s"


@dataclasses.dataclass
class Drafting(Method):
    """Speculative sampling, with what it took so far."""

    decoder: Decoder
    request: Request
    draft: Decoder
    draft_run: Path
    draft_step: int
    tokens: int
    passes: int = 0
    drafted: int = 0
    accepted: int = 0
    clock: Clock = dataclasses.field(default_factory=Clock)

    def answers(self, prompts: Sequence[Prompt], first: int) -> list[list[Answer]]:
        with self.clock.whole():
            found = speculate(self.decoder, self.draft, prompts, self.request, self.tokens, first=first)
        self.passes += int(found.passes.sum())
        self.drafted += int(found.drafted.sum())
        self.accepted += int(found.accepted.sum())
        self.clock.tokens += sum(len(completion.tokens) for completion in found.completions)
        groups = by_prompt(found.completions, self.request.samples)
        return [[Answer(completion, {}) for completion in group] for group in groups]

    def settings(self) -> dict[str, Any]:
        return {"draft": {"checkpoint": str(self.draft_run), "step": self.draft_step, "tokens": self.tokens}}

    def report(self) -> str:
        return (
            f"{self.accepted / max(self.drafted, 1):.1%} of {self.drafted} drafted tokens accepted; "
            f"{self.passes / max(self.clock.tokens, 1):.3f} passes of the target a token; "
            f"{self.clock.tokens_per_second:,.1f} tokens/s with prefill, compiling {self.clock.compile:.2f} s"
        )


@dataclasses.dataclass
class BestOf(Method):
    """The answer of the highest mean log-probability among those of another method."""

    of: Method
    count: int

    def answers(self, prompts: Sequence[Prompt], first: int) -> list[list[Answer]]:
        found = []
        for group in self.of.answers(prompts, first):
            completion = best_of([answer.completion for answer in group], By.MEAN)
            found.append([Answer(completion, {"score": By.MEAN.score(completion)})])
        return found

    def settings(self) -> dict[str, Any]:
        return {**self.of.settings(), "best_of": {"samples": self.count, "by": By.MEAN}}

    def report(self) -> str:
        return self.of.report()


def method_of(args: argparse.Namespace, settings: Settings, decoder: Decoder, request: Request) -> Method:
    """The way that the arguments of `lm generate` ask for.

    Raises:
      UsageError: options that do not go together, a number outside its range, or no such draft.
    """
    for name, other in (
        ("length_alpha", "beams"),
        ("length_form", "beams"),
        ("best", "beams"),
        ("draft_tokens", "draft"),
    ):
        if getattr(args, name) is not None and getattr(args, other) is None:
            raise UsageError(f"--{name.replace('_', '-')} is about --{other}", do=f"Pass --{other} too, or neither.")
    if args.best_of is not None and args.n != 1:
        raise UsageError("--best-of and --n both say how many samples are drawn", do="Pass one of the two.")
    if args.beams is not None:
        if args.draft is not None or args.best_of is not None or settings != Settings():
            raise UsageError("--beams takes the likeliest answers: nothing is sampled, drafted or chosen by a strategy",
                             do="Pass it without the options of sampling.")  # fmt: skip
        given = {"best": args.best, "length_alpha": args.length_alpha}
        numbers = {name: value for name, value in given.items() if value is not None}
        form = LengthForm(args.length_form or LengthForm.GNMT)
        return Searching(decoder, dataclasses.replace(request, steps=GREEDY), Beams(args.beams, form=form, **numbers))
    method: Method = Sampling(decoder, request)
    if args.draft is not None:
        loaded = load_model(args.draft)
        draft = Decoder(loaded.model, loaded.params, loaded.tokenizer, cache_dtype=CacheDtype(args.cache))
        tokens = DRAFT_TOKENS if args.draft_tokens is None else args.draft_tokens
        method = Drafting(decoder, request, draft, args.draft, loaded.step, tokens)
    return method if args.best_of is None else BestOf(method, args.best_of)
