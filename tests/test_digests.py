"""Digests of tensors, by which level 3 compares what trainer and rollout store."""

import torch

from jetrl_compile.digests import digest
from jetrl_compile.kernels import ops


def test_digest_sees_values_order_shape_and_dtype() -> None:
    tensor = torch.randn(37, 5, generator=torch.Generator().manual_seed(0))
    others = [
        tensor.t(),
        tensor.flip(0),
        tensor[:-1],
        tensor.reshape(5, 37),
        tensor.bfloat16(),
        -tensor,
        tensor.roll(2),
    ]
    found = {digest(each) for each in (tensor, *others)}
    assert len(found) == 1 + len(others)
    assert digest(tensor.t().contiguous().t()) == digest(tensor)
    codes, _ = ops.quantize(tensor.bfloat16(), 1, 128, False, "fp32", 1e-10, None)
    assert digest(codes[3:]) == digest(codes[3:].clone()), "any offset in memory"
