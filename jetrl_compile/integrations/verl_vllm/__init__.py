"""verl's vLLM rollouts with the checks of this package.

`integrations.verl` puts these in verl's registries under the name "vllm": the replica
and its server (`server`), the adapter in a trainer's worker (`adapter`), and the
extension of vLLM's workers (`worker`). They are apart from `integrations.verl`, so that
a worker of vLLM does not import the trainer's engine.
"""
