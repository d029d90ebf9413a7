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
    as_strided lift_fresh_copy repeat_interleave narrow ravel view_as view_copy
    _to_dense sym_size tensor_split repeat swapdims view_as_complex view_as_real
    _reshape_alias roll flip real imag reshape_as permute_copy data
    """)
TRANSPOSES = _words("permute t transpose transpose_int mT T swapaxes swapdims")
RESHAPES = _words("""
    view reshape _unsafe_view unsafe_view contiguous clone alias flatten detach ravel
    unsqueeze squeeze view_as reshape_as data
    """)
SAME_MATRIX = TRANSPOSES | RESHAPES  # the same elements in another order
SPLITS = _words("split split_with_sizes unsafe_split chunk slice narrow tensor_split")
PARTIAL_VIEWS = SPLITS | _words("getitem select unbind")
CASTS = _words("""
    convert_element_type _to_copy to float bfloat16 half double type type_as
    convert_dtype long int
    """)
MATMULS = _words("mm addmm bmm baddbmm matmul linear")
GROUPED_GEMMS = _words("""
    _grouped_mm grouped_mm transformers.grouped_mm_fallback vllm.fused_experts
    vllm.inplace_fused_experts vllm.outplace_fused_experts vllm.moe_forward
    vllm.moe_forward_shared
    """)
VLLM_CACHE_UPDATE = "vllm.unified_kv_cache_update"
ATTENTION = _words("""
    scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
    _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
    _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable
    _scaled_dot_product_attention_math flex_attention _flash_attention_forward
    vllm.unified_attention vllm.unified_attention_with_output vllm.unified_mla_attention
    vllm.unified_mla_attention_with_output jetrl_examples.reference_attention
    jetrl.attention
    """)
SOFTMAXES = _words("softmax _softmax _safe_softmax log_softmax _log_softmax")
NORMS = _words("""
    rms_norm layer_norm native_layer_norm _fused_rms_norm group_norm native_group_norm
    vllm_ir.rms_norm _C.rms_norm jetrl.rms_norm
    """)
ADD_NORMS = _words("vllm_ir.fused_add_rms_norm _C.fused_add_rms_norm")
ROPES = _words("""
    _C.rotary_embedding vllm.rotary_embedding vllm.flashinfer_rotary_embedding
    """)
ROTATIONS = _words("jetrl.rope")  # of one tensor, by tables of its width
GATED_ACTIVATIONS = {
    "jetrl.silu_mul": "silu",
    "_C.silu_and_mul": "silu",
    "_C.mul_and_silu": "silu",
    "_C.gelu_and_mul": "gelu",
    "_C.gelu_tanh_and_mul": "gelu_tanh",
}
ACTIVATIONS = _words("silu gelu relu tanh sigmoid erf exp leaky_relu elu softplus mish")
EMBEDDINGS = _words("embedding vllm.vocab_parallel_embedding transformers.embedding")
LOOKUPS = _words("index_select index embedding gather")
TOPKS = _words("topk sort kthvalue vllm.topk_softmax")
ADDS = _words("add")
SUBTRACTIONS = _words("sub rsub")
MULS = _words("mul")
JOINS = _words("cat stack concat")
# Writes of new keys and values into a cache: destination first.
CACHE_WRITES = {
    "index_copy": 3,
    "index_put": 2,
    "_index_put": 2,
    "slice_scatter": 1,
    "scatter": 3,
    "select_scatter": 1,
    "setitem": 2,
    "copy": 1,
}
UNINITIALIZED = _words("empty empty_like new_empty empty_strided")
CONSTANTS = UNINITIALIZED | _words("""
    full full_like zeros zeros_like ones ones_like scalar_tensor arange iota new_zeros
    new_ones new_full lift_fresh_copy tensor
    """)
POINTWISE = _words("""
    add sub mul div neg pow rsqrt sqrt exp log sin cos tanh sigmoid reciprocal where
    maximum minimum clamp clamp_min clamp_max abs rsub square silu gelu relu masked_fill
    erf softplus sum mean amax log1p expm1 floor ceil round sign max min
    """)
LOWERED_QUANTIZE = "jetrl.quantize"
LOWERED_REQUANTIZE = "jetrl.requantize"
LOWERED_DEQUANTIZE = "jetrl.dequantize"
LOWERED_GEMM = "jetrl.gemm"
BF16_GEMM = "jetrl.bf16_gemm"  # of x and w, (N, K)
EXACT_ATTENTION = "jetrl.attention"
