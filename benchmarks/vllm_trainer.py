"""A trainer's model with seeded random weights, and an optimizer step."""

from typing import Any


def fill(model: Any, seed: int) -> Any:
    """Give a model seeded random weights, norms about 1."""
    import torch

    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.uniform_(0.5, 1.5, generator=generator)
            else:
                p.normal_(std=0.02, generator=generator)
    return model


def make_trainer(config: Any, seed: int) -> Any:
    """Return the trainer's model on the GPU, in BF16."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("cuda"):
        made: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return fill(made, seed)


def load_exact(folder: Any, **settings: Any) -> Any:
    """Return a checkpoint's model on the GPU, in BF16, with exact mode's attention.

    Loaded as users load: some buffers are made otherwise from a config.

    Args:
        folder: With weights.
        **settings: More arguments of `from_pretrained`.
    """
    from transformers import AutoModelForCausalLM

    from jetrl_compile.exact_attention import use_exact_attention

    load: Any = AutoModelForCausalLM.from_pretrained
    trainer = load(folder, dtype="bfloat16", **settings).to("cuda").eval()
    use_exact_attention(trainer)
    return trainer


def take_step(trainer: Any, length: int) -> float:
    """Take an AdamW step on one random sequence; return the loss before it."""
    import torch

    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
    ids = torch.randint(trainer.config.vocab_size, (1, length), device="cuda")
    trainer.train()
    loss = trainer(ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    trainer.eval()
    return float(loss.detach())
