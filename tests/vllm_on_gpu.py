"""A run of vLLM with the plug-in; prints what it found as JSON, last.

    python tests/vllm_on_gpu.py FOLDER MODE

MODE is "default" (vLLM's own compilation), "whole" (mode 2) or "eager".
"""

import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
if sys.argv[2:] == ["whole"]:
    os.environ.setdefault("VLLM_USE_AOT_COMPILE", "0")

import torch
import transformers as tf

PROMPTS = [[5, 6, 7, 8], [9] * 17, list(range(10, 60))]
MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "whole": {"mode": 2, "backend": "jetrl", "cudagraph_mode": "FULL_DECODE_ONLY"},
}


def make(folder: Path) -> Any:
    """Write a small model's folder, and return the trainer's model."""
    config = tf.Qwen3Config(
        vocab_size=1024,
        hidden_size=576,  # not a multiple of 128
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
    )
    config.dtype = torch.bfloat16
    torch.manual_seed(0)
    model: Any = tf.Qwen3ForCausalLM(config)
    model = model.to(torch.bfloat16)
    model.save_pretrained(folder)
    return model.to("cuda")


def refusal(act: Callable[[], Any]) -> str:
    """Return what a RefitError says, or "" where none is raised."""
    from jetrl_compile.errors import RefitError

    try:
        act()
    except RefitError as error:
        return str(error)
    return ""


def main(folder: Path, mode: str) -> dict[str, Any]:
    """Load, check, push, check; return what was found."""
    from vllm import LLM

    from jetrl_compile.integrations.vllm.engine import (
        check_engine,
        engine_graph,
        refit,
    )
    from jetrl_compile.integrations.vllm.log_probs import (
        gap_metrics,
        sample,
        trainer_log_probs,
    )
    from jetrl_compile.layers import compile_layers

    trainer = make(folder)
    settings: dict[str, Any] = {"enforce_eager": True}
    if mode != "eager":
        config = {**MODES[mode], "cudagraph_capture_sizes": [1, 4]}
        settings = {"compilation_config": config}
    llm = LLM(
        str(folder),
        quantization="jetrl",
        skip_tokenizer_init=True,
        max_model_len=512,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=1 << 28,
        enable_sleep_mode=True,
        enable_prefix_caching=True,  # vLLM's default
        **settings,
    )
    found: dict[str, Any] = {"at load": check_engine(llm, trainer).verdict()}
    found["attention"] = engine_graph(llm).meta.get("decode_attention")
    with torch.no_grad():
        for parameter in trainer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.01)
    found["stale"] = check_engine(llm, trainer).verdict()
    weights = {name: p.detach() for name, p in trainer.named_parameters()}
    found["pushed"] = refit(llm, weights)
    found["after push"] = check_engine(llm, trainer).verdict()
    before = sample(llm, PROMPTS, 16, temperature=0.0).tokens
    for key, name in (
        ("nan", "model.layers.1.mlp.up_proj.weight"),
        ("nan in a norm", "model.norm.weight"),
        ("nan in the embedding", "model.embed_tokens.weight"),
    ):
        bad = dict(weights)
        bad[name] = bad[name].clone()
        bad[name].view(-1)[-1] = float("nan")
        found[key] = refusal(partial(refit, llm, bad))
        found[f"refused, {key}"] = refusal(partial(sample, llm, PROMPTS, 2))
        refit(llm, weights)
    llm.sleep(1)
    llm.wake_up()
    llm.sleep(2)
    llm.wake_up()
    refit(llm, weights)
    found["same tokens"] = sample(llm, PROMPTS, 16, temperature=0.0).tokens == before
    sampled = sample(llm, PROMPTS, 128)
    plain = gap_metrics(sampled, trainer_log_probs(trainer, sampled))
    compile_layers(trainer)
    own = gap_metrics(sampled, trainer_log_probs(trainer, sampled))
    found["k3 bf16"], found["k3"] = (m["rollout_corr/k3_kl"] for m in (plain, own))
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2])))
