"""vLLM as the rollout engine: load, generate, check, take a step, refit, check.

    python -m jetrl_compile.examples.vllm_rollout MODEL_DIR

MODEL_DIR is a Hugging Face folder with BF16 weights. It needs a Hopper GPU and
`pip install 'jetrl-compile[vllm,hopper]'`. Trainer and engine share the GPU.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from jetrl_compile.engines import load_engine
from jetrl_compile.layers import compile_layers
from jetrl_compile.model_loading import load_causal_model

vllm: Any = load_engine("vllm")  # its functions, from jetrl_compile.integrations.vllm
PROMPT = 16  # tokens


def start(folder: Path, memory: float, length: int) -> Any:
    """Return vLLM's LLM of a folder; `quantization="jetrl"` is all that is special."""
    # In this process, so that weights are pushed from GPU memory to GPU memory.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    return LLM(
        str(folder),
        quantization="jetrl",
        skip_tokenizer_init=True,
        max_model_len=PROMPT + length,
        gpu_memory_utilization=memory,
    )


def show_gap(llm: Any, trainer: Any, when: str, length: int) -> None:
    """Sample, score with the trainer, and print how far the two are apart."""
    vocabulary = int(trainer.get_input_embeddings().weight.shape[0])
    prompts = torch.randint(vocabulary, (8, PROMPT)).tolist()
    sampled = vllm.sample(llm, prompts, length)
    found = vllm.gap_metrics(sampled, vllm.trainer_log_probs(trainer, sampled))
    k3 = found["rollout_corr/k3_kl"]
    mean = found["training/rollout_probs_diff_mean"]
    print(f"{when}: k3_kl {k3:.3g}, mean difference of probabilities {mean:.3g}")


def take_step(trainer: Any, rate: float) -> None:
    """Take an optimizer step on random tokens, as a stand-in for a policy gradient."""
    optimizer = torch.optim.SGD(trainer.parameters(), lr=rate)
    vocabulary = int(trainer.get_input_embeddings().weight.shape[0])
    device = next(trainer.parameters()).device
    ids = torch.randint(vocabulary, (2, 64), device=device)
    trainer.train()
    trainer(ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    trainer.eval()


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="MODEL_DIR")
    parser.add_argument(
        "--memory", type=float, default=0.4, help="of the GPU, for vLLM"
    )
    parser.add_argument("--length", type=int, default=256, help="tokens an answer")
    given = parser.parse_args()
    torch.manual_seed(0)
    llm = start(given.folder, given.memory, given.length)
    trainer: Any = load_causal_model(given.folder).to("cuda", torch.bfloat16)
    print("at load:", vllm.check_engine(llm, trainer).verdict())
    compile_layers(trainer)
    show_gap(llm, trainer, "at load", given.length)
    take_step(trainer, rate=1e-2)
    print("after a step:", vllm.check_engine(llm, trainer).verdict())
    print("pushed", vllm.refit(llm, trainer.named_parameters()), "tensors")
    print("after the refit:", vllm.check_engine(llm, trainer).verdict())
    show_gap(llm, trainer, "after the refit", given.length)


if __name__ == "__main__":
    main()
