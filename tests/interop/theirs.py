"""Hugging Face transformers at the far end of a pipe (`lm/bench/peers/serve.py`): makes models and loads what we wrote.

`setup` makes a random model of each case in `folder/NAME`, with what it answers in `answer.npz`; `run` loads each
`folder/NAME-again` and answers in the same way.
"""

from pathlib import Path

import numpy as np
import torch
import transformers


def setup(spec: dict):
    """`cases`: NAME -> {"type", "fields", "shard"}; for all of them `prompts`, `answer_tokens`, `text` to tokenise."""
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    folder = Path(spec["folder"])
    for name, case in spec["cases"].items():
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(case["type"], **case["fields"])
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            # Far from the nearly uniform model of an initialisation, biases and scales too.
            parameter.add_(0.3 * torch.randn(parameter.shape))
        model.save_pretrained(folder / name, max_shard_size=case["shard"])
        np.savez(folder / name / "answer.npz", **_answers(model, spec))

    def run(_: int) -> None:
        for name in spec["cases"]:
            again = folder / f"{name}-again"
            model = transformers.AutoModelForCausalLM.from_pretrained(again).eval()
            ids = transformers.AutoTokenizer.from_pretrained(again)(spec["text"])["input_ids"]
            np.savez(again / "answer.npz", text=ids, **_answers(model, spec))

    return {"transformers": transformers.__version__}, run


def _answers(model, spec: dict) -> dict:
    tokens_BT = torch.tensor(spec["prompts"])
    whole_BT = model.generate(
        tokens_BT,
        attention_mask=torch.ones_like(tokens_BT),
        max_new_tokens=spec["answer_tokens"],
        do_sample=False,
        eos_token_id=-1,
        pad_token_id=0,
    )
    return {"logits": model(tokens_BT).logits.numpy(), "tokens": whole_BT[:, tokens_BT.shape[1] :].numpy()}
