"""`lm generate`: prompts from the command line or a file, answers to the terminal or a file."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lm.base import progress
from lm.base.errors import UsageError
from lm.base.files import atomic, refuse_target
from lm.decode.ask import full_of, parts
from lm.decode.clock import Clock
from lm.decode.constrain import Constraint
from lm.decode.counting import CountingDecoder, counted_of
from lm.decode.generate import Decoder, stream
from lm.decode.methods import Answer, Method, Sampling, method_of
from lm.decode.request import MAX_TOKENS, Full, Request
from lm.decode.settings import Settings
from lm.decode.strategy import as_json
from lm.decode.text import Printer
from lm.model.config import CacheDtype
from lm.run.record import environment
from lm.run.restore import LoadedCounts, LoadedModel, load

TOKENS_SHOWN_AT_ONCE = 4  # each look at the answer costs a turn of the host


def generate(args: argparse.Namespace) -> None:
    """Answers the prompts of the arguments that `lm generate` declares.

    Raises:
      UsageError: a number outside its range, no prompt or a file without any, or more tokens than the context holds.
      RunError: no usable checkpoint, or logits that are not numbers.
    """
    prompts = args.prompt or read_prompts(args.prompts)
    settings = settings_of(args)
    if args.ignore_end and args.end_id:
        raise UsageError("--ignore-end and --end-id say opposite things", do="Pass one of the two.")
    if args.json and args.out:
        raise UsageError("--json prints the lines that --out writes", do="Pass one of the two.")
    if args.out:
        refuse_target(args.out)
    loaded = load(args.checkpoint)
    decoder: Decoder | CountingDecoder
    if isinstance(loaded, LoadedCounts):
        decoder = CountingDecoder(loaded.params, loaded.tokenizer)
    else:
        decoder = Decoder(loaded.model, loaded.params, loaded.tokenizer, cache_dtype=CacheDtype(args.cache))
    request = Request(
        max_tokens=MAX_TOKENS if args.max_tokens is None else args.max_tokens,
        steps=settings.steps(loaded.model.vocab_size),
        seed=args.seed,
        end_ids=() if args.ignore_end else tuple(args.end_id) or (loaded.tokenizer.eos_id,),
        stops=tuple(_bytes(text) for text in args.stop),
        full=full_of(args.full and Full(args.full), args.max_tokens),
        samples=args.n if args.best_of is None else args.best_of,
        constraint=constraint_of(args),
    )
    method: Method
    if isinstance(decoder, CountingDecoder):
        method = counted_of(args, decoder, request)
    else:
        method = method_of(args, settings, decoder, request)
    effective = {**effective_settings(args.checkpoint, loaded, decoder, request), **method.settings()}
    print(f"settings: {json.dumps(effective, allow_nan=False)}", file=sys.stderr)
    found = samples(method, decoder, prompts, request, args.batch_size)
    if args.out:
        with atomic(args.out) as file:
            file.write(json.dumps({"settings": {**effective, "versions": environment()}}) + "\n")
            for sample in found:
                file.write(json.dumps(sample, allow_nan=False) + "\n")
    elif args.json:
        for sample in found:
            _show(json.dumps(sample, allow_nan=False) + "\n")
    elif isinstance(method, Sampling) and len(prompts) * request.samples == 1:
        _show_as_it_comes(method.decoder, prompts[0], request, method.clock)
    else:
        for sample in found:
            score = f", score {sample['score']:.4f}" if "score" in sample else ""
            head = f"== prompt {sample['prompt_index']}, sample {sample['sample']}: {sample['finish']}{score}"
            _show(f"{head}\n{sample['text']}\n")
    print(method.report(), file=sys.stderr)


def settings_of(args: argparse.Namespace) -> Settings:
    """How tokens are chosen, from the arguments."""
    numbers = {
        name: getattr(args, name)
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
                     "frequency_penalty")
    }  # fmt: skip
    order = {"order": args.order.split(",")} if args.order else {}
    return Settings(**numbers, logit_bias=dict(_bias(text) for text in args.logit_bias), **order)


def constraint_of(args: argparse.Namespace) -> Constraint | None:
    """What answers are held to, from the arguments."""
    if args.schema:
        return Constraint.of_schema_file(args.schema)
    return None if args.regex is None else Constraint(args.regex)


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: the "prompt" of each line of a .jsonl, else each line; blank lines are skipped.

    Raises:
      UsageError: no such file, not UTF-8, no prompt in it, or a line of a .jsonl without one.
    """
    if not path.is_file():
        raise UsageError("there is no such file of prompts", where=str(path))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"is not UTF-8 ({error.reason} at byte {error.start})", where=str(path)) from error
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not numbered:
        raise UsageError("holds no prompt", where=str(path))
    if path.suffix != ".jsonl":
        return [line for _, line in numbered]
    return [_prompt_of(line, f"{path}:{number}") for number, line in numbered]


def effective_settings(
    run: Path, loaded: LoadedModel | LoadedCounts, decoder: Decoder | CountingDecoder, request: Request
) -> dict[str, Any]:
    """All that an answer depends on beside its prompt, as it is saved with samples."""
    return {
        "checkpoint": str(run),
        "step": loaded.step,
        "strategy": as_json(request.steps),
        "seed": request.seed,
        "samples": request.samples,
        "max_tokens": request.max_tokens,
        "end_ids": list(request.end_ids or ()),
        "stops": [text.decode(errors="replace") for text in request.stops],
        "full": request.full,
        "constraint": request.constraint and request.constraint.pattern,
        "cache": decoder.cache_dtype,
    }


def samples(
    method: Method, decoder: Decoder | CountingDecoder, prompts: list[str], request: Request, batch_size: int
) -> Iterator[dict[str, Any]]:
    """One answer after the other, as it is saved.

    Raises:
      UsageError: as `Decoder.start`, before the first answer where a prompt is to blame.
    """
    ids = decoder.encode(prompts)
    decoder.check(ids, request)
    with progress.bar("generate", len(prompts)) as bar:
        for first, part, filled in parts(ids, request.samples, batch_size):
            # What a part is filled up with is dropped.
            for number, group in enumerate(method.answers(filled, first)[: len(part)], first):
                for sample, answer in enumerate(group):
                    yield {"prompt_index": number, "prompt": prompts[number], "sample": sample, **_as_dict(answer)}
            bar.update(first + len(part), method.report())


def _as_dict(answer: Answer) -> dict[str, Any]:
    completion = answer.completion
    return {
        "text": completion.text.decode(errors="replace"),
        "finish": completion.finish.name.lower(),
        **answer.numbers,
        "tokens": completion.tokens.tolist(),
        "log_probs": completion.log_probs.tolist(),
        "strategy_log_probs": completion.strategy_log_probs.tolist(),
    }


def _show_as_it_comes(decoder: Decoder, prompt: str, request: Request, clock: Clock) -> None:
    printer = Printer(request.stops)
    for session in clock.follow(stream(decoder, [prompt], request, TOKENS_SHOWN_AT_ONCE)):
        [answer] = decoder.completions(session)
        _show(printer.show(answer.text, final=False))
    _show(printer.show(answer.text, final=True) + "\n")
    print(f"finish: {answer.finish.name.lower()}", file=sys.stderr)


def _show(text: str) -> None:
    # A terminal may not know every character that a model comes up with.
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise UsageError(f"'{text}' is not ID=BIAS", where="--logit-bias", do="E.g. 17=2.5, or 17=-inf.") from error


def _bytes(text: str) -> bytes:
    # An argument that is not UTF-8 is the bytes that were typed.
    return text.replace("\\n", "\n").replace("\\t", "\t").encode(errors="surrogateescape")


def _prompt_of(line: str, where: str) -> str:
    try:
        prompt = json.loads(line)["prompt"]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError('is not a JSON object with "prompt"', where=where) from error
    if not isinstance(prompt, str):
        raise UsageError(f"the prompt is {type(prompt).__name__} and not text", where=where)
    return prompt
