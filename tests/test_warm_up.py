"""Which GEMMs a model runs, and how DeepGEMM is warmed up for them."""

import json
import shutil
import sys
import threading
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen3Config
from typer.testing import CliRunner

from jetrl_compile import cli, formats
from jetrl_compile.errors import ProviderError
from jetrl_compile.gemm_shapes import shapes_of_config
from jetrl_compile.kernels import deep_gemm_cache, provider_deep_gemm
from jetrl_compile.kernels import warm_up as module
from jetrl_compile.kernels.deep_gemm_tiles import Kernel, kernel_for, token_steps
from jetrl_compile.kernels.dispatch import GemmShape
from jetrl_compile.kernels.provider_deep_gemm import DEEP_GEMM
from jetrl_compile.kernels.warm_up import Call, calls_of, warm_up

FPROP = GemmShape(
    "fprop", 256, 128, formats.groups("K"), formats.blocks("K"), 64, device_type="cuda"
)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture(autouse=True)
def without_gluon(monkeypatch: pytest.MonkeyPatch) -> None:
    """All block-scaled GEMMs are DeepGEMM's, whatever Triton there is."""
    monkeypatch.setattr(provider_deep_gemm, "_has_gluon", lambda: False)


@pytest.fixture
def config_dir(tmp_path: Path) -> Path:
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    return tmp_path


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Call]:
    """Let a DeepGEMM that compiles a kernel a call seem usable."""
    calls: list[Call] = []

    def run(call: Call) -> None:
        calls.append(call)
        if call.n == 13:
            raise RuntimeError("Assertion error\nsome.hpp")
        (deep_gemm_cache.cache_dir() / "cache" / f"kernel.{call.n}").mkdir(
            parents=True, exist_ok=True
        )

    monkeypatch.setattr(Call, "run", run)
    usable = replace(DEEP_GEMM, usable=lambda: None)
    monkeypatch.setattr(module, "DEEP_GEMM", usable)
    monkeypatch.setenv(deep_gemm_cache.CACHE_VARIABLE, str(tmp_path / "default"))
    return calls


def test_shapes_of_a_model(config_dir: Path) -> None:
    shapes = shapes_of_config(config_dir, [64, 8, 8])
    sizes = {(s.role, s.m, s.n, s.k) for s in shapes}
    assert len(sizes) == len(shapes)
    layers = {
        (256, 256),  # q, o
        (128, 256),  # k, v
        (512, 256),  # q, k, v
        (384, 256),  # gate, up
        (768, 256),  # gate and up
        (256, 384),  # down
    }
    assert sizes == {
        (role, m, n, k)
        for role in ("fprop", "dgrad", "wgrad")
        for m in (8, 64)
        for n, k in layers
    }
    assert {s.device_type for s in shapes} == {"cuda"}
    forward = shapes_of_config(config_dir, [64], backward=False)
    assert {(s.role, s.n, s.k) for s in forward} == {("fprop", *s) for s in layers}
    paper = shapes_of_config(config_dir, [64], recipe="jetrl_paper")
    assert {str(s.b.granularity) for s in paper if s.role == "wgrad"} == {"1x128"}


def test_calls() -> None:
    wgrad = replace(FPROP, role="wgrad", b=formats.groups("M"))
    shapes = [
        FPROP,
        replace(FPROP, role="dgrad", n=128, k=256),  # the same sizes
        wgrad,
        replace(wgrad, n=16),
        replace(FPROP, m=0),
    ]
    calls, rejected = calls_of(shapes)
    assert calls == [
        Call(64, 256, 128),
        Call(256, 128, 64, 1, over_tokens=True),
    ]
    assert str(calls[1]) == "256x128x64, b by 1x128, bf16"
    assert [why for _, why in rejected] == [
        "16 rows of a are fewer than 33, for groups by groups"
    ]
    with pytest.raises(ProviderError, match="a size is not known; give the number"):
        calls_of([replace(FPROP, m=None)])


def test_one_call_a_kernel() -> None:
    wgrad = replace(FPROP, role="wgrad", n=6144, k=4096)
    fprop = replace(FPROP, n=6144, k=4096)
    tokens = range(6400, 16384, 256)
    shapes = [replace(s, m=m) for s in (wgrad, fprop) for m in tokens]
    assert len(calls_of(shapes)[0]) == 2
    assert len(calls_of([replace(fprop, m=m) for m in (1, 16, 17, 64)])[0]) == 3


def test_kernels_that_are_not_deep_gemms_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(provider_deep_gemm, "_has_gluon", lambda: True)
    few = [replace(FPROP, m=m, n=6144, k=4096) for m in (1, 16, 17)]
    assert [call.m for call in calls_of(few)[0]] == [17]
    odd = [replace(FPROP, m=m, n=6144, k=4224) for m in (1, 16, 17)]
    assert [call.m for call in calls_of(odd)[0]] == [1, 17]


def test_kernels_for_all_tokens() -> None:
    assert token_steps(1, 200) == [16, 32, 64, 128, 192, 256]
    assert token_steps(65, 128) == [128]
    assert token_steps(8192, 8192) == [8192]
    for n, k in ((4096, 4096), (6144, 4096), (576, 1536)):
        for by_groups in (False, True):
            stand = [kernel_for(m, n, k, by_groups) for m in token_steps(1, 1024)]
            every = {kernel_for(m, n, k, by_groups) for m in range(1, 1025)}
            assert None not in every
            assert set(stand) == every


def test_kernels_keep_the_limits_of_the_source() -> None:
    for m in (1, 16, 33, 100, 1000, 8192):
        for n in (8, 192, 1024, 24576, 151936):
            for by_groups in (False, True):
                chosen = kernel_for(m, n, 4096, by_groups)
                assert chosen is not None
                assert chosen.tile_m in (16, 32, 64, 128, 256)
                assert chosen.tile_n % 8 == 0
                assert not by_groups or m < 33 or chosen.tile_m in (64, 128)
                assert 3 <= chosen.stages <= 16
    assert kernel_for(8192, 4096, 4096, False) == Kernel(
        False, 4096, 256, 128, (1, 2), 3
    )


def test_runs_each_once_and_counts(ran: list[Call], tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    shapes = [FPROP, FPROP, replace(FPROP, n=512), replace(FPROP, n=104, k=64)]
    shapes.append(replace(FPROP, m=50))  # the kernel of the first
    done = warm_up(shapes, jobs=0, progress=lambda *step: seen.append(step))
    assert sorted(ran)[1:] == [Call(64, 104, 64), Call(64, 512, 128)]
    assert (done.calls, done.compiled, done.cached) == (3, 3, 0)
    assert done.cache_dir == tmp_path / "default"
    assert [(a, b) for a, b, _ in seen] == [(1, 3), (2, 3), (3, 3)]
    assert done.failed == done.rejected == ()
    again = warm_up(shapes[:1], jobs=0, into=tmp_path / "default")
    assert (again.calls, again.compiled, again.cached) == (1, 0, 3)


def test_a_second_warm_up_runs_only_what_is_new(ran: list[Call]) -> None:
    warm_up([FPROP, replace(FPROP, n=13)], jobs=0)
    assert len(ran) == 1  # 13 is rejected
    ran.clear()
    warm_up([FPROP, replace(FPROP, n=512)], jobs=0)
    assert ran == [Call(64, 512, 128)]
    # Kernels that are gone are compiled again.
    shutil.rmtree(deep_gemm_cache.cache_dir() / "cache")
    ran.clear()
    warm_up([FPROP, replace(FPROP, n=512)], jobs=0)
    assert len(ran) == 2
    # So they are where the list cannot be read, or is another library's.
    listed = deep_gemm_cache.cache_dir() / deep_gemm_cache.WARMED
    for text in ("{", "[]", '{"identity": []}', listed.read_text().replace("nvcc", "")):
        listed.write_text(text.replace('"kernels": 2', '"kernels": 3'))
        ran.clear()
        warm_up([FPROP], jobs=0)
        assert ran == [Call(64, 256, 128)]


def test_one_of_several_processes_compiles(ran: list[Call]) -> None:
    fprop, done, told = [FPROP], [], []

    def run() -> None:
        done.append(warm_up(fprop, jobs=0, progress=lambda *step: told.append(step)))

    with deep_gemm_cache.locked():
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        threads[0].join(0.3)
        assert not done
        wait = (
            f"waiting for another process that warms up {deep_gemm_cache.cache_dir()}"
        )
        assert told == [(0, 1, wait)] * 2
    for thread in threads:
        thread.join()
    assert len(done) == 2
    assert len(ran) == 1


@pytest.mark.usefixtures("ran")
def test_numbers_of_tokens_that_another_process_adds_stay() -> None:
    deep_gemm_cache.token_counts.cache_clear()
    assert deep_gemm_cache.token_counts() == set()
    listed = deep_gemm_cache.cache_dir() / deep_gemm_cache.LIST
    listed.parent.mkdir(parents=True)
    listed.write_text("[64]")
    deep_gemm_cache.add_token_counts([128])
    assert deep_gemm_cache.token_counts() == {64, 128}
    deep_gemm_cache.token_counts.cache_clear()


@pytest.mark.usefixtures("ran")
def test_a_list_that_cannot_be_written_leaves_nothing() -> None:
    folder = deep_gemm_cache.cache_dir()
    (folder / deep_gemm_cache.WARMED).mkdir(parents=True)
    with pytest.raises(ProviderError, match=r"cannot be written: .*; name another fol"):
        warm_up([FPROP], jobs=0)
    ours = {deep_gemm_cache.WARMED, deep_gemm_cache.LOCK, "cache"}
    assert {path.name for path in folder.iterdir()} <= ours


def test_what_is_all_there_needs_no_lock(
    ran: list[Call], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    warm_up([FPROP], jobs=0)
    lock = deep_gemm_cache.cache_dir() / deep_gemm_cache.LOCK
    lock.unlink(missing_ok=True)
    lock.mkdir()
    assert warm_up([FPROP], jobs=0).failed == ()
    with pytest.raises(ProviderError, match="cannot be locked: "):
        warm_up([replace(FPROP, n=512)], jobs=0)


def test_heads_of_exact_mode(
    ran: list[Call], config_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = [str(config_dir), "--exact", "--jobs", "0", "--no-backward"]
    args += ["--tokens", "8", "--tokens", "64"]
    done = CliRunner().invoke(cli.app, ["warm-up", *args])
    assert done.exit_code == 0, done.output
    heads = [call for call in ran if not call.quantized]
    assert [(call.m, call.n, call.k) for call in heads] == [
        (8, 512, 256),
        (64, 512, 256),
    ]
    listed = CliRunner().invoke(cli.app, ["warm-up", *args, "--dry-run"]).output
    assert "8x512x256, bf16\n64x512x256, bf16\n" in listed


def test_workers_fit_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for free, workers in ((5 << 30, 5), (100 << 30, 16), (1 << 20, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda f=free: (f, f))
        assert module._workers([]) == workers
    # The output head of 16384 tokens: 1.3 GB of weights, 5 GB of logits.
    head = Call(16384, 151936, 4096, quantized=False)
    assert head.operand_bytes() == 2 * (16384 + 151936) * 4096 + 2 * 16384 * 151936
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40 << 30, 80 << 30))
    assert module._workers([Call(8192, 4096, 4096), head]) == 5


def test_what_failed_is_tried_again(
    ran: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    accepts = replace(DEEP_GEMM, usable=lambda: None, rejects=lambda _: None)
    monkeypatch.setattr(module, "DEEP_GEMM", accepts)
    for _ in range(2):
        ran.clear()
        assert len(warm_up([FPROP, replace(FPROP, n=13)], jobs=0).failed) == 1
    assert ran == [Call(64, 13, 128)]


def test_failure_is_told(ran: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    accepts = replace(DEEP_GEMM, usable=lambda: None, rejects=lambda _: None)
    monkeypatch.setattr(module, "DEEP_GEMM", accepts)
    done = warm_up([FPROP, replace(FPROP, n=13)], jobs=0)
    assert done.failed == (
        ("64x13x128, b by 128x128, bf16", "Assertion error some.hpp"),
    )
    assert done.compiled == 1


def test_folder_is_chosen_before_deep_gemm_is_imported(
    ran: list[Call], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert warm_up([FPROP], jobs=0, into=tmp_path / "a").cache_dir == tmp_path / "a"
    monkeypatch.setitem(
        sys.modules,
        "deep_gemm",
        SimpleNamespace(__spec__=ModuleSpec("deep_gemm", None)),
    )
    warm_up([FPROP], jobs=0, into=tmp_path / "a")
    with pytest.raises(ProviderError, match=r"set DG_JIT_CACHE_DIR before"):
        warm_up([FPROP], jobs=0, into=tmp_path / "b")


@NO_GPU
def test_workers_report_what_failed(ran: list[Call]) -> None:
    # Workers are new processes: there, nothing is patched and there is no GPU.
    done = warm_up([FPROP], jobs=2)
    assert [what for what, _ in done.failed] == ["64x256x128, b by 128x128, bf16"]
    assert ran == []


@NO_GPU
def test_without_deep_gemm(config_dir: Path) -> None:
    with pytest.raises(ProviderError, match="deep_gemm cannot be warmed up: the pack"):
        warm_up([FPROP])
    result = CliRunner().invoke(cli.app, ["warm-up", str(config_dir)])
    assert result.exit_code == 2
    assert "cannot be warmed up" in result.stderr


def test_command(ran: list[Call], config_dir: Path, tmp_path: Path) -> None:
    arguments = ["warm-up", str(config_dir), "--tokens", "64", "--tokens", "1:8"]
    result = CliRunner().invoke(cli.app, [*arguments, "--dry-run"])
    assert result.exit_code == 0
    assert "64x512x256, b by 128x128, bf16" in result.stdout.splitlines()
    assert ran == []
    arguments += ["--no-backward", "--jobs", "0", "--cache-dir", str(tmp_path / "kept")]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0
    assert len(ran) == 12  # six (N, K), two numbers of tokens
    assert result.stderr.splitlines()[-1].startswith("12/12 ")
    assert "12 kernels are needed: 5 compiled" in result.stdout
    assert f"export DG_JIT_CACHE_DIR={tmp_path / 'kept'}" in result.stdout


@pytest.mark.parametrize(
    "tokens", ["0", "many", "9:8", "1:x", "1:", "9" * 30, f"1:{9**20}"]
)
def test_tokens_that_are_none(config_dir: Path, tokens: str) -> None:
    arguments = ["warm-up", str(config_dir), "--tokens", tokens, "--dry-run"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 2
    assert "LOW:HIGH" in result.stderr


def test_recipe_without_fp8(config_dir: Path) -> None:
    arguments = ["warm-up", str(config_dir), "--recipe", "bf16", "--dry-run"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0
    assert result.stdout == (
        "recipe bf16 has no FP8 GEMM in this model: nothing to compile\n"
    )


@pytest.mark.usefixtures("ran")
def test_folder_that_is_a_file(config_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("kept")
    for tokens in ("64", "64:64"):
        arguments = ["warm-up", str(config_dir), "--tokens", tokens, "--jobs", "0"]
        result = CliRunner().invoke(cli.app, [*arguments, "--cache-dir", str(file)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert "cannot be" in result.stderr.splitlines()[-1]
    assert file.read_text() == "kept"
