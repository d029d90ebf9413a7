"""vLLM 0.24: its rollout model through the same passes as the trainer.

    LLM(model, quantization="jetrl")

vLLM finds the plug-in by its entry point. Weights are stored in FP8, shard by shard
(`storage`); the linear layers run the flow of the recipe (`linear`); a pass inside
vLLM's compilation spells norms as the trainer does and fuses the quantizers
(`compile_pass`); `engine` exports the graph of a live model, refits and checks it.
"""
