"""Where the gradients of an FP8 step part from BF16's: SmolLM2-135M with its weights.

    python benchmarks/gradient_sources.py [--tokens 512]

Every linear layer but the head is written out with FP8 operands in forward, in
backward, in both or in neither. Printed: gradient SQNR in dB over all parameters, the
smallest and the median, and how many are below 12.
"""

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jetrl_compile.examples.smollm2 import load_model
from jetrl_compile.kernels import ops

TEXT = Path(__file__).parent.parent / "LICENSE"
Gradients = dict[str, Tensor]


def rounded(x: Tensor, rows: int, transpose: bool = False) -> Tensor:
    """Return a matrix as FP8 in rows x 128 regions holds it, in FP32."""
    codes, scales = ops.quantize(x, rows, 128, transpose, "fp32", 1e-10, None)
    back: Tensor = ops.dequantize(codes, scales, rows, 128, torch.float32)
    return back.t() if transpose else back


class Linear(torch.autograd.Function):
    """y = x w^T, with FP8 operands where asked for."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w: Tensor, forward: bool, backward: bool
    ) -> Tensor:
        """Return y."""
        ctx.save_for_backward(x, w)
        ctx.fp8 = backward
        flat = x.reshape(-1, x.shape[-1])
        y = rounded(flat, 1) @ rounded(w, 128).t() if forward else flat @ w.t()
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        """Return dx and dw."""
        x, w = ctx.saved_tensors
        flat_x, flat = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        if ctx.fp8:
            dx = rounded(flat, 1) @ rounded(w, 128)
            dw = rounded(flat, 1, True).t() @ rounded(flat_x, 128, True)
        else:
            dx, dw = flat @ w, flat.t() @ flat_x
        return dx.to(x.dtype).view(x.shape), dw.to(w.dtype), None, None


def gradients(model: Any, ids: Tensor, forward: bool, backward: bool) -> Gradients:
    """Return the gradients of one step."""
    apply: Any = Linear.apply
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.forward = lambda x, w=module.weight: apply(x, w, forward, backward)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
    loss = nn.functional.cross_entropy(logits.float(), ids[:, 1:].flatten())
    loss.backward()
    found = {name: p.grad.double() for name, p in model.named_parameters()}
    model.zero_grad()
    print(f"(loss {loss.item():.4f})")
    return found


def compare(title: str, wanted: Gradients, got: Gradients) -> None:
    """Print a row."""
    noise = {n: (wanted[n] - got[n]).square().sum().item() for n in wanted}
    found = sorted(
        10 * math.log10(wanted[n].square().sum().item() / noise[n])
        for n in wanted
        if noise[n]
    )
    below = sum(value < 12 for value in found)
    print(f"{title:48} {found[0]:6.1f} / {found[len(found) // 2]:5.1f}  {below:4}")


def main() -> int:
    """Measure and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=512)
    count = parser.parse_args().tokens
    model, tokenizer = load_model()
    ids = torch.tensor(tokenizer(TEXT.read_text())["input_ids"][:count]).view(2, -1)
    plain = gradients(model, ids, False, False)
    both = gradients(model, ids, True, True)
    compare("FP8 forward and backward, against BF16", plain, both)
    fp8_forward = gradients(model, ids, True, False)
    compare("FP8 forward, BF16 backward, against BF16", plain, fp8_forward)
    compare(
        "BF16 forward, FP8 backward, against BF16",
        plain,
        gradients(model, ids, False, True),
    )
    compare("both, against FP8 forward, BF16 backward", fp8_forward, both)
    exact = gradients(model.float(), ids, False, False)
    compare("BF16, against FP32", exact, plain)
    return 0


if __name__ == "__main__":
    sys.exit(main())
