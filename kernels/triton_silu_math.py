"""The arithmetic of SiLU*mul and its backward in Triton kernels, in words.

The rounding points are those of `reference_fused`.
"""

from jetrl_compile.kernels.triton_common import INTERPRETED, jit, tl
from jetrl_compile.kernels.triton_words import high, low, multiply, pack


@jit
def sigmoid(gate: tl.tensor) -> tl.tensor:
    """1 / (1 + exp(-gate)) in FP32; on a GPU 0 below gate = -87."""
    if INTERPRETED:
        return 1.0 / (tl.exp(-gate) + 1.0)
    return tl.inline_asm_elementwise(
        """
        {
        .reg .f32 power;
        mul.f32 power, $1, 0fBFB8AA3B;  // -log2(e)
        ex2.approx.ftz.f32 power, power;
        add.f32 power, power, 0f3F800000;
        rcp.approx.ftz.f32 $0, power;
        }
        """,
        "=f,f",
        [gate],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@jit
def silu_mul(gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """Return silu(gate) * up of words, rounded to BF16 after each step."""
    g0, g1 = low(gate), high(gate)
    return multiply(pack(g0 * sigmoid(g0), g1 * sigmoid(g1)), up)


@jit
def silu_mul_backward(dy: tl.tensor, gate: tl.tensor, up: tl.tensor) -> tl.tensor:
    """Return what `silu_mul` returns, and the gradients for gate and up, in words."""
    g0, g1 = low(gate), high(gate)
    s0, s1 = sigmoid(g0), sigmoid(g1)
    silu, outer = pack(g0 * s0, g1 * s1), multiply(dy, up)
    dgate = pack(
        low(outer) * s0 * (g0 * (1.0 - s0) + 1.0),
        high(outer) * s1 * (g1 * (1.0 - s1) + 1.0),
    )
    return multiply(silu, up), dgate, multiply(dy, silu)
