"""Decoding by Hugging Face transformers: `generate` with its growing cache, or a bare greedy loop over a static one.

The loop is the most that PyTorch gives: one step with its argmax compiled as a whole (`fullgraph`), a static cache of
exactly the tokens there are, no Python but the loop itself. Both start from the parameters that they are given and
leave their first answer, and the logits that it began with, in a file. Sizes and arrays: see `lm.bench.decode`.
"""

import time

import numpy as np
import torch
import transformers


def setup(spec: dict):
    """Builds the model, gives one answer, leaves tokens [B, G] and logits [B, V] in `answer`, returns the answerer."""
    if spec["device"] == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("this PyTorch sees no GPU, and ours runs on one")
    torch.set_num_threads(spec["threads"])
    torch.set_grad_enabled(False)
    arrays = dict(np.load(spec["arrays"]))
    model = _model(spec["config"])
    _copy(model, spec["config"], arrays)
    model.to(spec["device"], getattr(torch, spec["config"]["dtype"])).eval()
    prompts_BT = torch.from_numpy(arrays["prompts"].astype(np.int64)).to(spec["device"])
    answer = (_loop if spec["compile"] else _generate)(model, prompts_BT, spec["answer_tokens"])

    begun = time.perf_counter()
    tokens_BG = answer(spec["answer_tokens"]).cpu()
    first = time.perf_counter() - begun
    answer(1).cpu()
    begun = time.perf_counter()
    answer(1).cpu()
    prefill = time.perf_counter() - begun
    logits_BV = model(prompts_BT, logits_to_keep=1).logits[:, 0].float().cpu()
    np.savez(spec["answer"], tokens=tokens_BG.numpy(), logits=logits_BV.numpy())

    def run(count: int) -> None:
        for _ in range(count):
            answer(spec["answer_tokens"]).cpu()

    facts = {"first_call_seconds": first, "prefill_and_first_token_seconds_at_set_up": prefill,
             "torch": torch.__version__, "transformers": transformers.__version__,
             "attention": model.config._attn_implementation, "threads": torch.get_num_threads()}  # fmt: skip
    return facts, run


def _generate(model, prompts_BT: torch.Tensor, _: int):
    everything_BT = torch.ones_like(prompts_BT)

    def answer(tokens: int) -> torch.Tensor:
        whole_BT = model.generate(prompts_BT, attention_mask=everything_BT, max_new_tokens=tokens, do_sample=False)
        return whole_BT[:, prompts_BT.shape[1] :]

    return answer


def _loop(model, prompts_BT: torch.Tensor, most: int):
    length = prompts_BT.shape[1]
    cache = transformers.StaticCache(model.config, max_cache_len=length + most)
    # Allocated before anything is compiled: a prefill into a cache that is not there yet would be another program.
    config = model.config.get_text_config()
    kv_heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    head_width = config.hidden_size // config.num_attention_heads
    cache.early_initialization(len(prompts_BT), kv_heads, head_width, model.dtype, model.device)

    def forward(tokens_BT: torch.Tensor, position_1T: torch.Tensor) -> torch.Tensor:
        logits_BTV = model(tokens_BT, cache=cache, position_ids=position_1T, logits_to_keep=1).logits
        return logits_BTV[:, -1:].argmax(-1)

    step = torch.compile(forward, fullgraph=True, dynamic=False)
    position_1S = torch.arange(length + most, device=prompts_BT.device)[None]

    def answer(tokens: int) -> torch.Tensor:
        cache.reset()
        token_B1 = step(prompts_BT, position_1S[:, :length])
        chosen = [token_B1]
        for at in range(length, length + tokens - 1):
            token_B1 = step(token_B1, position_1S[:, at : at + 1])
            chosen.append(token_B1)
        return torch.cat(chosen, dim=1)

    return answer


def _model(config: dict):
    """The same function as ours; nothing ends an answer."""
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
    common = {"vocab_size": config["vocab_size"], "tie_word_embeddings": True, **ids}
    if config["positions"] == "learned":
        made = transformers.GPT2Config(
            n_positions=config["context_length"], n_embd=config["d_model"], n_layer=config["n_layer"],
            n_head=config["n_head"], n_inner=config["d_ff"], activation_function="gelu_new",
            layer_norm_epsilon=config["norm_eps"], **common,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(made)
    made = transformers.LlamaConfig(
        hidden_size=config["d_model"], intermediate_size=config["d_ff"], num_hidden_layers=config["n_layer"],
        num_attention_heads=config["n_head"], num_key_value_heads=config["n_kv_head"], rms_norm_eps=config["norm_eps"],
        max_position_embeddings=config["context_length"],
        rope_parameters={"rope_type": "default", "rope_theta": config["rope_base"]}, **common,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(made)


def _copy(model, config: dict, arrays: dict) -> None:
    """Takes over the given parameters; ours are stacked over layers and multiply from the right."""

    def take(target: torch.Tensor, source: np.ndarray) -> None:
        target.copy_(torch.from_numpy(np.ascontiguousarray(source)).reshape(target.shape))

    def matrix(name: str, i: int) -> np.ndarray:
        """[inputs, outputs]."""
        kernel = arrays[f"params/layers/{name}/kernel"][i]
        return kernel.reshape(-1, kernel.shape[-1]) if name.endswith("out") else kernel.reshape(kernel.shape[0], -1)

    def vector(name: str, i: int) -> np.ndarray:
        return arrays[f"params/layers/{name}"][i].reshape(-1)

    parts = [f"attention/{part}" for part in ("query", "key", "value")]
    if config["positions"] == "learned":
        inner = model.transformer
        take(inner.wte.weight, arrays["params/embedding"])
        take(inner.wpe.weight, arrays["params/position/embedding"])
        take(inner.ln_f.weight, arrays["params/final_norm/scale"])
        take(inner.ln_f.bias, arrays["params/final_norm/bias"])
        for i, block in enumerate(inner.h):
            take(block.attn.c_attn.weight, np.concatenate([matrix(part, i) for part in parts], axis=1))
            take(block.attn.c_attn.bias, np.concatenate([vector(f"{part}/bias", i) for part in parts]))
            for target, name in ((block.attn.c_proj, "attention/out"), (block.mlp.c_fc, "feed_forward/up"),
                                 (block.mlp.c_proj, "feed_forward/down")):  # fmt: skip
                take(target.weight, matrix(name, i))
                take(target.bias, vector(f"{name}/bias", i))
            for target, name in ((block.ln_1, "attention_norm"), (block.ln_2, "feed_forward_norm")):
                take(target.weight, vector(f"{name}/scale", i))
                take(target.bias, vector(f"{name}/bias", i))
        return
    inner = model.model
    take(inner.embed_tokens.weight, arrays["params/embedding"])
    take(inner.norm.weight, arrays["params/final_norm/scale"])
    for i, block in enumerate(inner.layers):
        attention, mlp = block.self_attn, block.mlp
        targets = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        for target, name in zip(targets, [*parts, "attention/out"], strict=True):
            take(target.weight, matrix(name, i).T)
        for target, name in ((mlp.gate_proj, "gate"), (mlp.up_proj, "up"), (mlp.down_proj, "down")):
            take(target.weight, matrix(f"feed_forward/{name}", i).T)
        take(block.input_layernorm.weight, vector("attention_norm/scale", i))
        take(block.post_attention_layernorm.weight, vector("feed_forward_norm/scale", i))
