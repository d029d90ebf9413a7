"""Runs of `jetrl bench` on a CPU, with a tiny model."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from typer.testing import CliRunner

from jetrl_compile import cli
from jetrl_compile.bench.results import Row

CPU = torch.device("cpu")
CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 128,
}
WHOLE_BLOCKS = {"num_key_value_heads": 2, "intermediate_size": 256}
# Inductor takes half a minute on a CPU.
QUICK = ["--way", "jetrl:lowering=aot", "--way", "compile:backend=aot_eager"]
ON_CPU = ["--device", "cpu", "--rounds", "2"]


def write_config(folder: Path) -> str:
    """Write a tiny config; return its folder."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def run(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(cli.app, ["bench", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def cells(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    return {(row.case, row.way): row for row in rows}
