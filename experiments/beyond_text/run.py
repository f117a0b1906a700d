"""The model of text on images: pixels as tokens, and patches beside text in one sequence; `lm` does all of the work."""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.linear_model import LogisticRegression

from experiments.beyond_text import digits
from experiments.beyond_text.digits import QUESTIONS, Digits
from experiments.beyond_text.figure import draw
from lm.base.config import build
from lm.base.files import write_json
from lm.cli import main as lm
from lm.model.config import ModelConfig
from lm.model.score import token_log_probs
from lm.model.transformer import Transformer
from lm.parallel.mesh import make_mesh
from lm.parallel.rules import put_batch
from lm.run.record import environment
from lm.train.config import RunConfig
from lm.train.optimizer import learning_rate
from lm.train.step import fresh_state, make_train_step

HERE = Path(__file__).parent
SEEDS = (0, 1, 2)
SHAPE = {"n_layer": 2, "d_model": 64, "n_head": 4, "d_ff": 256, "positions": "learned", "init_std": None}
OPTIMIZER = {"peak_lr": 3e-3, "warmup_steps": 50, "final_lr_fraction": 0.0}
PIXELS = {
    "optimizer": OPTIMIZER, "batch_size": 16, "eval_tokens": 10**6, "log_every": 100, "checkpoint_every": 10**4
}  # fmt: skip
IMAGE = digits.SIDE**2 + 1  # tokens of an image and the end in front: a window is one image
ORDERS = {"uniform": 0, "unigram": 1, "bigram": 2, "5-gram": 5}
SAMPLES = 20


def main() -> None:
    """Writes `results.json` and `digits.png` (none with `--quick`) and prints both tables."""
    parser = argparse.ArgumentParser(prog="python -m experiments.beyond_text", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed and few steps: does it run, and nothing more")
    args = parser.parse_args()
    began = time.process_time()
    seeds, steps = (SEEDS[:1], 40) if args.quick else (SEEDS, 500)
    learnt, held_out = digits.load()
    with tempfile.TemporaryDirectory() as folder:
        stream, images = pixels(Path(folder), seeds, steps)
    mixed = patches(learnt, held_out, seeds, steps)
    found = {"stream": stream, "patches": mixed, "cpu_seconds": time.process_time() - began}
    print(as_text(found))
    if not args.quick:
        write_json(HERE / "results.json", found | {"environment": environment()})
        draw(HERE / "digits.png", images, held_out.images[: len(images)])


def pixels(folder: Path, seeds: Sequence[int], steps: int) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Bits a pixel of counting models and transformers that `lm train` makes, and images that `lm generate` samples."""
    data = digits.write_stream(folder) | {"validation_fraction": 0.2}
    base = {"vocab_size": len(digits.LEVELS) + 1, "context_length": IMAGE}
    found: dict[str, Any] = {}
    for name, order in ORDERS.items():
        counted = {"model": base | {"order": order}, "batch_size": 1, "steps": 1500, "eval_tokens": 10**6}
        found[name] = [trained(folder, name, counted | {"data": data})["bits_per_byte"]]
    found["transformer"] = [
        trained(folder, f"seed-{seed}", {
            "model": base | SHAPE, "data": data | {"seed": seed}, "seed": seed, "steps": steps, **PIXELS,
        })["bits_per_byte"]
        for seed in seeds
    ]  # fmt: skip
    answers = folder / "answers.jsonl"
    asked = ["--checkpoint", str(folder / f"seed-{seeds[0]}"), "--prompt", "", "--n", str(SAMPLES)]
    run_lm("generate", *asked, "--max-tokens", str(IMAGE), "--out", str(answers))
    texts = [json.loads(line)["text"] for line in answers.read_text().splitlines()[1:]]
    images = [image for text in texts if (image := digits.image_of(text)) is not None]
    return {"bits_per_pixel": found, "whole_images": len(images) / SAMPLES}, images


def trained(folder: Path, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """The row of the run that `lm train` makes of a configuration."""
    write_json(folder / f"{name}.json", config)
    run_lm(
        "train",
        "--config",
        str(folder / f"{name}.json"),
        "--workdir",
        str(folder / name),
        "--cache",
        str(folder / "cache"),
    )
    return json.loads((folder / name / "result.json").read_bytes())


def run_lm(*arguments: str) -> None:
    """A command of `lm`."""
    code = lm(arguments)
    assert code == 0, (arguments, code)


def patches(learnt: Digits, held_out: Digits, seeds: Sequence[int], steps: int) -> dict[str, Any]:
    """Shares of right answers to each question on held-out images: of each seed, and of a linear model of pixels."""
    found: dict[str, Any] = {}
    for question in QUESTIONS:
        linear = LogisticRegression(max_iter=10_000).fit(flat(learnt), learnt.answers(question))
        found[question] = {"linear": float(linear.score(flat(held_out), held_out.answers(question))), "ours": []}
    for seed in seeds:
        config = run_config(seed, steps)
        params = learn(config, learnt)
        for question in QUESTIONS:
            right = answer(config.model, params, held_out, question) == held_out.answers(question)
            found[question]["ours"].append(float(right.mean()))
    return found


def flat(of: Digits) -> np.ndarray:
    """Pixels as a linear model takes them, 0 to 1."""
    return of.images.reshape(len(of.images), -1) / (len(digits.LEVELS) - 1)


def run_config(seed: int, steps: int) -> RunConfig:
    """The run of one seed: a byte-level model that also takes patches."""
    longest = digits.rows("name:", np.zeros((1, 16, 4)), np.zeros(1))["inputs"].shape[1]
    model = {"vocab_size": digits.END + 1, "context_length": longest, "patch_width": digits.PATCH_SIDE**2, **SHAPE}
    return build(RunConfig, {"model": model, "optimizer": OPTIMIZER, "steps": steps, "batch_size": 32, "seed": seed})


def learn(config: RunConfig, learnt: Digits) -> Any:
    """The parameters after `config.steps` steps, each on images and questions drawn by the seed."""
    mesh, rng = make_mesh(config.mesh), np.random.default_rng(config.seed)
    known = [digits.rows(question, learnt.patches, learnt.answers(question)) for question in QUESTIONS]
    data = {name: np.concatenate([part[name] for part in known]) for name in known[0]}
    state, step = fresh_state(config, mesh), make_train_step(config, mesh)
    for number in range(config.steps):
        chosen = rng.integers(len(data["inputs"]), size=config.batch_size)
        batch = put_batch({name: of[chosen] for name, of in data.items()}, mesh, config.mesh.rules)
        state, _ = step(state, batch, np.float32(learning_rate(config.optimizer, config.steps, number)))
    return state["params"]


def answer(model: ModelConfig, params: Any, asked: Digits, question: str) -> np.ndarray:
    """The likeliest of all answers, spelled out behind the question and the patches of each image."""

    @jax.jit
    def score(batch: dict[str, jax.Array]) -> jax.Array:
        logits_BTV = Transformer(model).apply({"params": params}, batch["inputs"], None, batch["patches"])
        return jnp.sum(token_log_probs(jnp.asarray(logits_BTV), batch["targets"]) * batch["weights"], axis=1)

    count = len(asked.images)
    of = (digits.rows(question, asked.patches, np.full(count, number)) for number in range(len(QUESTIONS[question])))
    return np.argmax([score(batch) for batch in of], axis=0)


def as_text(found: dict[str, Any]) -> str:
    """Both tables in Markdown: means over seeds, and their spread where there are several."""
    lines = ["| model | bits/pixel |", "|---|---|"]
    lines += [f"| {name} | {_told(values, 3)} |" for name, values in found["stream"]["bits_per_pixel"].items()]
    lines += ["", "| question | right, ours | right, linear |", "|---|---|---|"]
    lines += [f"| {name} | {_told(of['ours'], 3)} | {of['linear']:.3f} |" for name, of in found["patches"].items()]
    whole = found["stream"]["whole_images"]
    return "\n".join([*lines, "", f"{whole:.0%} of samples are whole images; {found['cpu_seconds']:.0f} CPU-seconds"])


def _told(values: Sequence[float], digits: int) -> str:
    spread = f" ± {np.std(values, ddof=1):.{digits}f} (sd of {len(values)})" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{spread}"
