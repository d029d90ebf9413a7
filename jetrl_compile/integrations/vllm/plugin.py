"""The entry point that vLLM calls in each of its processes."""


def register() -> None:
    """Make `quantization="jetrl"` known to vLLM; may be called several times."""
    from vllm.model_executor.layers.quantization import register_quantization_config

    from jetrl_compile.integrations.vllm.config import NAME, JetRLConfig
    from jetrl_compile.integrations.vllm.norms import register_norms

    register_norms()
    register_quantization_config(NAME)(JetRLConfig)
