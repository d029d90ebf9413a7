import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import (
    CPU,
    ON_CPU,
    cells,
    run,
    write_config,
)
from tiny_models import IGNORE_LRU_CACHE, IGNORE_SCRIPT_METHOD
from torch import Tensor, nn

from jetrl_compile.bench import gemms, kernels, runs, targets
from jetrl_compile.bench.gradients import exact_linears, kind_of, sqnr
from jetrl_compile.bench.profiling import KernelTime, group_of, profile_text
from jetrl_compile.bench.results import Results, Row, compare, environment
from jetrl_compile.bench.timing import summarize

pytestmark = [
    IGNORE_SCRIPT_METHOD,
    IGNORE_LRU_CACHE,
    # Dynamo looks at the gradients of a layer's inputs.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]


@pytest.fixture
def config(tmp_path: Path) -> str:
    return write_config(tmp_path)


# Gradients -------------------------------------------------------------------------


def test_gradients_command(config: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    more = [
        "--way",
        "jetrl:lowering=aot",
        "--way",
        "exact:exact=true,lowering=aot",
        "--way",
        "bad:lowering=aot,providers=scaled_mm",
    ]
    arguments = ["--device", "cpu", "--shape", "1x16", "--layers", 1, "--json", file]
    status, out, _ = run(
        "gradients", config, *arguments, *more, "--skip", "jetrl_paper"
    )
    assert status == 0
    assert "failed: " in out
    assert "no provider accepts" in " ".join(out.split())
    rows = {(r["case"], r["way"]): r for r in json.loads(file.read_text())["rows"]}
    assert rows["all parameters", "eager"]["values"]["median dB"] in ("inf", 99.0)
    jetrl = rows["mlp.down_proj.weight", "jetrl"]["values"]
    assert 15 < jetrl["min dB"] <= jetrl["median dB"] < 30
    assert jetrl["parameters"] == 1
    exact = rows["mlp.down_proj.weight", "exact"]["values"]
    assert abs(exact["median dB"] - jetrl["median dB"]) < 1
    assert {("model.norm.weight", way) for way in ("jetrl", "exact")} < rows.keys()


def test_exact_linear_is_a_linear_layer() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(24, 8)
    x = torch.randn(2, 3, 24, requires_grad=True)
    found: list[list[Tensor]] = []
    for exact in (False, True):
        linear.zero_grad()
        x.grad = None
        if exact:
            with exact_linears(linear):
                y = linear(x)
        else:
            y = linear(x)
        y.square().sum().backward()
        assert x.grad is not None
        assert linear.weight.grad is not None
        found.append([y, x.grad, linear.weight.grad.clone()])
    for left, right in zip(*found, strict=True):
        torch.testing.assert_close(left, right)
    assert "forward" not in vars(linear)


def test_sqnr_and_kinds() -> None:
    x = torch.tensor([3.0, 4.0])
    assert sqnr(x, x) == math.inf
    assert sqnr(x, x + torch.tensor([0.5, 0.0])) == pytest.approx(20)
    assert sqnr(x, x / 0) == -math.inf
    assert sqnr(0 * x, x) == -math.inf
    layers = ["model.layers.1", "model.layers.10"]
    assert kind_of("model.layers.10.mlp.up_proj.weight", layers) == "mlp.up_proj.weight"
    assert kind_of("model.norm.weight", layers) == "model.norm.weight"


# Kernels ---------------------------------------------------------------------------


def test_kernels_command(config: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    status, out, _ = run("kernels", config, *ON_CPU, "--m", 8, "--m", 3, "--json", file)
    assert status == 0
    assert "wgrad all M=3, recipe jetrl_paper" in out
    rows = [row for row in json.loads(file.read_text())["rows"]]
    first = {r["way"]: r["values"] for r in rows if r["case"] == "8x192"}
    assert len(first) == len(kernels.KERNELS) + 1
    assert all(values["of copy"] for way, values in first.items() if way != "copy")
    gemm = {(r["case"], r["way"]): r["values"] for r in rows if r["table"] == "GEMMs"}
    for case in ("fprop qkv M=8, recipe jetrl", "wgrad all M=8, recipe jetrl"):
        assert gemm[case, "reference"].keys() == {"TFLOP/s", "over BF16"}
    # Forward is the same in both recipes, and measured once.
    assert not any("fprop" in case and "paper" in case for case, _ in gemm)


def test_a_broken_kernel_is_told_and_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such instruction")

    one = kernels.Kernel("quantize", "broken", kernels.KERNELS[0].inputs, broken)
    monkeypatch.setattr(kernels, "KERNELS", (one, kernels.KERNELS[0]))
    rows = cells(kernels.measure_kernels([(4, 128)], CPU, 1, print))
    assert rows["4x128", "quantize: broken"].note == "RuntimeError: no such instruction"
    assert rows["4x128", "quantize: 1x128"].timing is not None


def test_operands_that_do_not_fit(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = gemms._operands

    def operands(size: Any, *rest: Any) -> Any:
        if size.name == "o":
            raise torch.OutOfMemoryError
        return real(size, *rest)

    monkeypatch.setattr(gemms, "_operands", operands)
    file = tmp_path / "out.json"
    arguments = ["--m", 8, "--only", "gemm", "--json", file]
    status, _, _ = run("kernels", config, *ON_CPU, *arguments)
    assert status == 0
    rows = {(r["case"], r["way"]): r for r in json.loads(file.read_text())["rows"]}
    assert rows["fprop o M=8, recipe jetrl", gemms.BF16]["note"] == "out of memory"
    assert rows["fprop qkv M=8, recipe jetrl", "reference"]["timing"]
    assert not any(case.startswith("fprop all") for case, _ in rows)


def test_nothing_but_a_copy_is_a_failure(
    config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such instruction")

    one = kernels.Kernel("quantize", "broken", kernels.KERNELS[0].inputs, broken)
    monkeypatch.setattr(kernels, "KERNELS", (one,))
    arguments = ["--m", 8, "--only", "quantize"]
    assert run("kernels", config, *ON_CPU, *arguments)[0] == 1


def test_kernels_of_other_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    status, out, err = run("kernels", tmp_path, *ON_CPU, "--m", 8)
    assert (status, out) == (2, "")
    assert "GPT2Config is no Llama-like config" in " ".join(err.split())


def test_bytes_are_those_of_arguments_and_results() -> None:
    kernel = next(k for k in kernels.KERNELS if k.op == "silu_mul_quantize")
    _, moved = kernels._rotating(kernel, 4, 256, CPU)
    assert moved == 4 * 256 * (2 + 2 + 1) + 4 * 2 * 4


# Profiles and targets --------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "group"),
    [
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0>", "GEMM"),
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN", "GEMM"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("_rms_norm_quantize_kernel", "quantize + fused"),
        ("_silu_mul_backward_quantize_kernel", "quantize + fused"),
        ("triton_poi_fused_silu_mul_3", "Inductor"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel", "other"),
    ],
)
def test_groups_of_kernels(kernel: str, group: str) -> None:
    assert group_of(kernel) == group


def test_profile_text() -> None:
    made = [KernelTime(f"gemm_{i}", "GEMM", 2, 10.0 - i / 10) for i in range(45)]
    lines = profile_text(made, "jetrl").splitlines()
    assert lines[0] == "jetrl: 351.000 ms in kernels"
    assert lines[3].split() == ["351.000", "100.0", "90", "GEMM"]
    assert lines[-1].endswith("and 5 more")


def stack_results(jetrl_ms: float, **changes: Any) -> Results:
    rows = [
        Row("forward 4x2048", way, summarize([ms]))
        for way, ms in (("eager", 247.0), ("compile", 185.0), ("jetrl", jetrl_ms))
    ]
    rows = compare(rows, ("eager", "compile"))
    made = Results("stack", "qwen3-8b", tuple(rows), environment(CPU))
    return Results(**{**vars(made), **changes})


def test_verdicts() -> None:
    found = targets.verdicts(stack_results(130.0))
    assert [(v.target.value, v.reached) for v in found] == [
        ("over compile", True),
        ("over eager", True),
    ]
    assert not any(v.reached for v in targets.verdicts(stack_results(150.0)))
    assert targets.verdicts(stack_results(130.0, model="other")) == []
    missing = (Row("forward 4x2048", "jetrl", failed=True, note="out of memory"),)
    (first, _) = targets.verdicts(stack_results(1.0, rows=missing))
    assert (first.reached, first.reason) == (False, "out of memory")


def test_verdicts_are_of_whole_models_and_default_ways() -> None:
    def reasons(**settings: Any) -> set[str]:
        found = targets.verdicts(stack_results(130.0, settings=settings))
        assert len(found) == 2
        return {verdict.reason for verdict in found}

    plain = [
        {"name": "eager", "kind": "eager", "options": {}},
        {"name": "compile", "kind": "compile", "options": {}},
        {"name": "jetrl", "kind": "jetrl", "options": {"recipe": "jetrl"}},
    ]
    assert reasons(layers=36, ways=plain) == {""}
    assert reasons(layers=2, ways=plain) == {"2 of 36 layers were measured"}
    other = [plain[0], {**plain[1], "options": {"backend": "eager"}}, plain[2]]
    assert reasons(ways=other) == {"", "compile was measured with other options"}
    other = [*plain[:2], {**plain[2], "options": {"recipe": "jetrl", "fuse": True}}]
    assert reasons(ways=other) == {"jetrl was measured with other options"}


@pytest.mark.parametrize(("ms", "reached"), [(210.0, True), (211.0, False)])
def test_what_exact_mode_may_cost(ms: float, reached: bool) -> None:
    case = "forward+backward 4x2048"
    rows = [
        Row(case, way, summarize([time]))
        for way, time in (("jetrl", 200.0), ("exact", ms))
    ]
    rows = compare(rows, ("eager",), {"exact": ("jetrl",)})
    settings: Any = {"ways": [{"name": "exact", "options": {"exact": True}}]}
    made = stack_results(1.0, rows=tuple(rows), settings=settings)
    (found,) = [v for v in targets.verdicts(made) if v.target.way == "exact"]
    assert (found.target.value, found.reached) == ("over jetrl", reached)
    settings["ways"][0]["options"] = {"exact": True, "fuse": False}
    (found,) = [v for v in targets.verdicts(made) if v.target.way == "exact"]
    assert found.reason == "exact was measured with other options"


@pytest.mark.parametrize(("ms", "status"), [(130.0, 0), (150.0, 1)])
def test_check_exit_status(
    ms: float, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "run_stack", lambda *_: stack_results(ms))
    found, out, _ = run("stack", "qwen3-8b", "--check")
    assert found == status
    assert ("MISSED" in out) == bool(status)
    assert "at least 1.4" in out
