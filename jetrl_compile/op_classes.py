"""What an operator of a captured graph does, by its name.

Names are those of `capture.op_name`: an aten, prims or torch function without its
namespace and overload ("mm", "convert_element_type"), any other one with its namespace
("vllm.unified_attention", "jetrl.gemm"). A name that is in no table is an operator of
its own: nothing is dropped.
"""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


VIEWS = _words("""
    view reshape _unsafe_view unsafe_view permute t transpose transpose_int swapaxes
    expand expand_as unsqueeze squeeze alias clone contiguous detach slice select split
    split_with_sizes unsafe_split chunk unbind getitem flatten unflatten movedim mT T
    as_strided lift_fresh_copy repeat_interleave narrow copy ravel view_as view_copy
    _to_dense sym_size
    """)
TRANSPOSES = _words("permute t transpose transpose_int mT T swapaxes")
RESHAPES = _words(
    "view reshape _unsafe_view unsafe_view contiguous clone alias flatten"
)
SPLITS = _words("split split_with_sizes unsafe_split chunk slice narrow")
CASTS = _words("""
    convert_element_type _to_copy to float bfloat16 half double type type_as
    convert_dtype
    """)
MATMULS = _words("mm addmm bmm baddbmm matmul linear")
GROUPED_GEMMS = _words("""
    _grouped_mm grouped_mm transformers.grouped_mm_fallback vllm.fused_experts
    vllm.inplace_fused_experts vllm.outplace_fused_experts vllm.moe_forward
    vllm.moe_forward_shared
    """)
ATTENTION = _words("""
    scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_attention_math flex_attention _flash_attention_forward
    vllm.unified_attention vllm.unified_attention_with_output
    vllm.unified_mla_attention_with_output jetrl_examples.reference_attention
    """)
SOFTMAXES = _words("softmax _softmax _safe_softmax log_softmax _log_softmax")
NORMS = _words("""
    rms_norm layer_norm native_layer_norm _fused_rms_norm group_norm native_group_norm
    vllm_ir.rms_norm _C.rms_norm
    """)
ADD_NORMS = _words("vllm_ir.fused_add_rms_norm _C.fused_add_rms_norm")
ROPES = _words("_C.rotary_embedding vllm.rotary_embedding vllm_ir.rotary")
GATED_ACTIVATIONS = {
    "_C.silu_and_mul": "silu",
    "vllm_ir.silu_and_mul": "silu",
    "_C.gelu_and_mul": "gelu",
    "_C.gelu_tanh_and_mul": "gelu_tanh",
}
ACTIVATIONS = _words("silu gelu relu tanh sigmoid erf exp leaky_relu elu softplus mish")
EMBEDDINGS = _words("embedding vllm.vocab_parallel_embedding transformers.embedding")
TOPKS = _words("topk sort kthvalue vllm.topk_softmax")
ADDS = _words("add iadd")
MULS = _words("mul imul")
CONSTANTS = _words("""
    full full_like zeros zeros_like ones ones_like empty empty_like scalar_tensor arange
    iota new_zeros new_ones new_full new_empty lift_fresh_copy tensor
    """)
POINTWISE = _words("""
    add sub mul div neg pow rsqrt sqrt exp log sin cos tanh sigmoid reciprocal where
    maximum minimum clamp clamp_min clamp_max abs rsub square silu gelu relu iadd imul
    masked_fill erf softplus sum mean amax
    """)
LOWERED_QUANTIZE = "jetrl.quantize"
LOWERED_REQUANTIZE = "jetrl.requantize"
LOWERED_DEQUANTIZE = "jetrl.dequantize"
LOWERED_GEMM = "jetrl.gemm"
