"""Level 3 on a live vLLM model: the bytes that the trainer's weights give."""

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from jetrl_compile.bytes_check import Pair, compare_pair
from jetrl_compile.containment import Difference, LevelResult
from jetrl_compile.errors import ModelError
from jetrl_compile.integrations.vllm.live_model import (
    has_experts,
    parts_of,
    plain_parameters,
    tied_parameters,
    vocabulary_rows,
)
from jetrl_compile.integrations.vllm.storage import (
    LAYOUT,
    quantize_part,
    quantized_layers,
    scale_name,
    scales_of,
)


def check_live_bytes(
    model: nn.Module, masters: Mapping[str, Tensor]
) -> tuple[LevelResult, list[Difference]]:
    """Compare every weight of a loaded model with the trainer's, bit for bit.

    Args:
        model: A model that was loaded with `quantization="jetrl"`.
        masters: The trainer's parameters by Hugging Face's names, BF16 or FP32.

    Returns:
        The result of level 3, and a difference for each tensor that is not what the
        trainer's weights give: rounded to BF16, then quantized by the layer's flow.

    Raises:
        ModelError: The trainer lacks a parameter that the engine stores.

    A name that the engine ties to another is compared if the trainer has it: there it
    may be a weight of its own. Fused experts are counted, and not compared.
    """
    differences = []
    count = 0
    for pair in _pairs(model, masters):
        count += 1
        found, _ = compare_pair(pair, "the engine")
        if found is not None:
            differences.append(found)
    status = "failed" if differences else "passed"
    counts = {"tensors": count}
    experts = sum(map(has_experts, model.modules()))
    if experts:
        counts["fused experts, not compared"] = experts
    return LevelResult(3, status, counts=counts), differences


def _pairs(model: nn.Module, masters: Mapping[str, Tensor]) -> Iterable[Pair]:
    for name, (layer, part) in parts_of(model).items():
        layout = getattr(layer, LAYOUT)
        weight = layer.weight
        assert isinstance(weight, Tensor)
        shard = _master(masters, f"{name}.weight")[part.source].to(weight.device)
        codes, scales = quantize_part(shard, layout.flow)
        gemm = f"{name}:fprop"
        stored = weight.detach()[part.low : part.low + part.rows]
        yield Pair(f"{name}.weight", gemm, "w", stored, codes)
        high = part.scale_low + part.scale_rows
        own = scales_of(layer).detach()[part.scale_low : high]
        yield Pair(f"{name}.{scale_name(layout.flow)}", gemm, "w", own, scales)
    layers = quantized_layers(model)
    modules = dict(model.named_modules())
    names = {name: [name] for name in plain_parameters(model)}
    for tied, name in tied_parameters(model).items():
        if tied in masters and name in names:
            names[name].append(tied)
    for name, parameter in plain_parameters(model).items():
        path, _, leaf = name.rpartition(".")
        if path in layers:
            for part in getattr(layers[path], LAYOUT).parts:
                stored = parameter.detach()[part.low : part.low + part.rows]
                yield _plain(f"{part.name}.{leaf}", stored, masters, part.source[0])
        elif not has_experts(modules.get(path)):
            rows = vocabulary_rows(modules.get(path)) or slice(None)
            for each in names[name]:
                yield _plain(each, parameter.detach(), masters, rows)


def _plain(
    name: str, stored: Tensor, masters: Mapping[str, Tensor], rows: slice
) -> Pair:
    wanted = _master(masters, name)[rows].to(stored.device, stored.dtype)
    if stored.dim() == 2:  # the engine pads a vocabulary
        stored = stored[: wanted.shape[0]]
    return Pair(name, name, "", stored, wanted)


def _master(masters: Mapping[str, Tensor], name: str) -> Tensor:
    if name not in masters:
        raise ModelError(
            f"the trainer has no parameter {name}, which the engine stores; check the "
            "model whose weights were pushed"
        )
    return masters[name].detach()
