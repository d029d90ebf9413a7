"""Stand-ins for the parts of vLLM that the plug-in subclasses and calls."""

import contextlib
import enum
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn


class CompilationMode(enum.IntEnum):
    NONE = 0
    STOCK_TORCH_COMPILE = 1
    DYNAMO_TRACE_ONCE = 2
    VLLM_COMPILE = 3


class QuantizationConfig:
    def __init__(self) -> None:
        self.packed_modules_mapping: dict[str, list[str]] = {}


class QuantizeMethodBase:
    pass


class LinearMethodBase(QuantizeMethodBase):
    pass


class UnquantizedLinearMethod(LinearMethodBase):
    pass


class UnquantizedEmbeddingMethod(QuantizeMethodBase):
    def apply(self, layer: Any, x: torch.Tensor, bias: Any = None) -> torch.Tensor:
        return nn.functional.linear(x, layer.weight, bias)


class LinearBase(nn.Module):
    def __init__(self, output_size: int = 256) -> None:
        super().__init__()
        self.tp_rank, self.tp_size, self.num_kv_head_replicas = 0, 1, 1
        self.output_size = output_size

    def weight_loader(self, param: Any, weight: torch.Tensor, key: Any = None) -> None:
        param.data.copy_(weight)


class ColumnParallelLinear(LinearBase):
    pass


class QKVParallelLinear(ColumnParallelLinear):
    output_sizes = (128, 64, 64)


class ReplicatedLinear(LinearBase):
    pass


class VocabParallelEmbedding(nn.Module):
    pass


class ModelWeightParameter(nn.Parameter):
    def __new__(cls, data: torch.Tensor, **_: Any) -> "ModelWeightParameter":
        return super().__new__(cls, data, False)

    def __init__(self, data: torch.Tensor, weight_loader: Any, **_: Any) -> None:
        self.weight_loader = weight_loader


class IrOp:
    def __init__(self) -> None:
        self.impls: dict[str, Any] = {"native": None}
        self.priority = ["native"]

    def register_impl(self, name: str, supports_args: Any) -> Any:
        def add(kernel: Any) -> Any:
            self.impls[name] = SimpleNamespace(run=kernel, fits=supports_args)
            return kernel

        return add

    def get_priority(self) -> list[str]:
        return self.priority

    def set_default(self, names: list[str]) -> None:
        self.priority = names


class Engine:
    """vLLM's config of one engine."""

    def __init__(self, mode: int, backend: str = "inductor", **more: Any) -> None:
        self.compilation_config = SimpleNamespace(
            mode=CompilationMode(mode),
            backend=backend,
            inductor_compile_config={},
            custom_ops=["all"],
        )
        self.load_config = SimpleNamespace(load_format="auto")
        self.additional_config: Any = {}
        self.model_config = SimpleNamespace(hf_config=SimpleNamespace(num_experts=8))
        self.__dict__.update(more)


@contextlib.contextmanager
def installed(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Iterator[Any]:
    """Put the stand-ins where vLLM would be; yield what records calls."""
    calls = SimpleNamespace(online=[], registered={}, wrap=[])
    norms = SimpleNamespace(rms_norm=IrOp(), fused_add_rms_norm=IrOp())

    def register(name: str) -> Any:
        return lambda cls: calls.registered.setdefault(name, cls)

    layers = "vllm.model_executor.layers."
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.ir": {"ops": norms, "set_default_torch_wrap": calls.wrap.append},
        "vllm.config": {
            "VllmConfig": Engine,
            "CompilationMode": CompilationMode,
            "get_current_vllm_config": lambda: engine,
        },
        f"{layers}linear": {
            "LinearBase": LinearBase,
            "LinearMethodBase": LinearMethodBase,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        f"{layers}quantization": {"register_quantization_config": register},
        f"{layers}quantization.base_config": {
            "QuantizationConfig": QuantizationConfig,
            "QuantizeMethodBase": QuantizeMethodBase,
        },
        f"{layers}vocab_parallel_embedding": {
            "UnquantizedEmbeddingMethod": UnquantizedEmbeddingMethod,
            "VocabParallelEmbedding": VocabParallelEmbedding,
        },
        "vllm.model_executor.model_loader.reload.layerwise": {
            "initialize_online_processing": calls.online.append
        },
        "vllm.model_executor.parameter": {"ModelWeightParameter": ModelWeightParameter},
    }
    with monkeypatch.context() as patched:
        for name, values in contents.items():
            module = ModuleType(name)
            vars(module).update(values)
            patched.setitem(sys.modules, name, module)
        vars(sys.modules["vllm"])["ir"] = sys.modules["vllm.ir"]
        for leaf in ("compilation", "config", "linear", "norms", "plugin"):
            name = f"jetrl_compile.integrations.vllm.{leaf}"
            patched.delitem(sys.modules, name, raising=False)
        calls.norms = norms
        yield calls
        for leaf in ("compilation", "config", "linear", "norms", "plugin"):
            sys.modules.pop(f"jetrl_compile.integrations.vllm.{leaf}", None)
