"""What Triton kernels do so that one gets ready, or memory works, while another runs.

`triton_device.overlaps` says where kernels are launched before the one before them is
over.
"""

from jetrl_compile.kernels.triton_common import INTERPRETED, jit, tl


@jit
def after_the_last_kernel() -> None:
    """Wait for what kernels before this one wrote, and let the one behind get ready.

    The first thing that a kernel does which is launched with `overlapped`: nothing may
    be read or written before. Where kernels do not overlap it does nothing.
    """
    if not INTERPRETED and tl.target_info.cuda_capability_geq(9, 0):
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@jit
def prefetch(at: tl.tensor) -> None:
    """Bring the lines of 128 bytes at some addresses from memory into the L2 cache.

    A program that does this for the tile of a program that will start when it ends
    shortens the wait of that one, and needs no register for it.

    Args:
        at: Addresses inside of tensors, one for each line.
    """
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [at],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
