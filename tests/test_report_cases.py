"""Each case of public bug reports: the cause is told by the first three lines."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from report_cases import CASES, live_pair, quantized, skip, traced
from tiny_models import IGNORE_SCRIPT_METHOD

from jetrl_compile import graph_store
from jetrl_compile.bytes_check import check_bytes
from jetrl_compile.containment import ContainmentReport, check_containment
from jetrl_compile.grouping import group_causes, subject
from jetrl_compile.pipeline import CompileReport
from jetrl_compile.recipe import JETRL
from jetrl_compile.report import FORMATS, render

Golden = Callable[[str, str], None]
pytestmark = [
    IGNORE_SCRIPT_METHOD,
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]
# The level, the attribute, and what the first three lines must say.
TOLD: dict[str, tuple[int, str, list[str]]] = {
    "01_substring_skip": (
        *(1, "fp8"),
        [
            "GEMM precision is bf16 in rollout, e4m3 in train",
            "6 layers (model.layers.0-5), mlp.gate_proj:fprop and mlp.up_proj:fprop",
            "recipe rollout_skips excludes 'model.layers.*.mlp.gate_proj'",
        ],
    ),
    "02_scales_rounded_in_rollout": (
        *(2, "scale_format"),
        ["all 42 FP8 GEMMs (x and w)", "rollout rounds scales to powers of two"],
    ),
    "02_scales_rounded_in_trainer": (
        *(2, "scale_format"),
        ["all 42 FP8 GEMMs (x and w)", "train rounds scales to powers of two"],
    ),
    "03_fp32_master": (
        *(2, "source_dtype"),
        ["bf16 in rollout, fp32 in train", "quantizes the FP32 master weight"],
    ),
    "04_memory_layout": (
        *(3, "bytes"),
        ["model.layers.1.self_attn.q_proj.weight", "another memory layout"],
    ),
    "04_stale_weights": (3, "bytes", ["as with weights of another step"]),
    "05_scales_after_the_codes": (
        *(3, "bytes"),
        ["stored scales", "as when scales are rounded to powers of two"],
    ),
    "06_straddling_parts": (
        *(2, "params.straddles"),
        ["self_attn.q_proj", "blocks of qkv_proj cross its seam at row 576"],
    ),
    "07_embedding_of_a_tied_head": (
        *(2, "dtype"),
        ["model.embed_tokens:embedding.weight", "rollout stores the embedding in E4M3"],
    ),
    "08_quantized_router": (
        *(1, "fp8"),
        ["mlp.gate:fprop", "recipe jetrl keeps the role router in high precision"],
    ),
    "09_zero_block": (
        *(3, "bytes"),
        ["mlp.up_proj.weight_scale_inv", "a scale is 0", "all-zero block"],
    ),
    "10_residual_in_fp32": (
        *(2, "dtype"),
        ["post_attention_layernorm:norm.x", "without rounding it to BF16 first"],
    ),
    "10_rope_in_fp32": (2, "dtype", ["rope.q", "rotates in FP32, train in BF16"]),
    "10_activation_in_fp32": (
        *(2, "params.rounded"),
        ["mlp.act_fn:activation", "rollout keeps FP32 where train rounds to BF16"],
    ),
    "10_bias_in_fp32": (2, "dtype", ["bias_add.bias", "adds the bias in FP32"]),
    "11_ninth_recompile": (
        *(1, "fp8"),
        ["7 places in model.layers.3", "ran eagerly", "recompile_limit"],
    ),
    "12_passes_skipped_by_a_cache": (
        *(1, "fp8"),
        ["e4m3 in train", "the compile cache held this graph without its passes"],
    ),
    "13_padded_vocabulary": (
        *(2, "params.N"),
        ["384 in rollout, 320 in train: lm_head", "a padded or sharded weight"],
    ),
    "14_larger_floor": (
        *(2, "amax_floor"),
        ["0.045 in rollout, 1e-10 in train", "flattens blocks of small values"],
    ),
}


@cache
def report_of(name: str) -> ContainmentReport:
    return CASES[name]()


def without_versions(report: ContainmentReport) -> ContainmentReport:
    metas = (
        {key: value for key, value in meta.items() if key != "torch"}
        for meta in (report.rollout_meta, report.train_meta)
    )
    rollout, train = metas
    return replace(report, rollout_meta=rollout, train_meta=train)


@pytest.mark.parametrize("name", CASES)
def test_the_first_three_lines_tell_the_cause(name: str, golden: Golden) -> None:
    level, attribute, words = TOLD[name]
    report = report_of(name)
    first = group_causes(report)[0]
    assert report.contained is False
    assert (first.level, first.attribute) == (level, attribute)
    text = render(without_versions(report))
    head = "\n".join(text.split("\n")[:3])
    for each in words:
        assert each in head
    golden(f"report/cases/{name}", text)


def test_every_case_of_the_list_has_a_report() -> None:
    assert set(TOLD) == set(CASES)
    assert {int(name[:2]) for name in CASES} == set(range(1, 15))


@pytest.mark.parametrize("format_name", FORMATS)
def test_every_format_names_the_cause(format_name: str) -> None:
    for name in CASES:
        report = report_of(name)
        text = render(report, format_name)
        title = group_causes(report)[0].title
        shown = re.sub(r"\\(.)", r"\1", text).replace("%2C", ",").replace("%3A", ":")
        assert title in shown or format_name == "json"
        assert subject(report.differences[0]).rpartition(".")[2] in shown


# Without the fault -----------------------------------------------------------------


def test_pairs_without_a_fault_are_contained() -> None:
    assert check_containment(traced("rollout"), traced("train")).contained
    moe = traced("rollout", moe=True), traced("train", moe=True)
    assert check_containment(*moe).contained
    recipe = replace(JETRL, name="with_head", include=("lm_head",))
    tied = (
        traced(phase, recipe, tie_word_embeddings=True)
        for phase in ("rollout", "train")
    )
    assert check_containment(*tied).contained
    model, rollout = live_pair()
    assert check_bytes(model, rollout)[0].status == "passed"


def test_one_to_three_percent_of_the_codes_differ_after_a_step() -> None:
    """Case 3: an FP32 master, quantized with and without rounding to BF16 first."""
    report = report_of("03_fp32_master")
    three = [item for item in report.differences if item.level == 3]
    codes = [item for item in three if "_proj.weight:" in item.message]
    assert len(codes) == 14
    shares = [re.search(r"\((\d+\.\d+)%\)", item.message) for item in codes]
    assert all(match and 0.5 < float(match[1]) < 4 for match in shares)
    (cause,) = (cause for cause in group_causes(report) if cause.level == 3)
    assert cause.size == len(three)


def test_a_stored_graph_gives_the_same_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 12: what is kept beside a compile cache is the graph; it is reported."""
    monkeypatch.setattr(graph_store, "cache_dir", lambda: str(tmp_path))
    graphs = traced("rollout", skip("model.layers.*.mlp.*")), traced("train")
    stored = []
    for key, graph in zip(("a", "b"), graphs, strict=True):
        report = CompileReport("", "train", True, "jetrl", graph, {}, {})
        graph_store.store_report(key, report)
        found = graph_store.load_report(key)
        assert found is not None
        assert found.from_cache
        stored.append(found.graph)
    report_text = render(check_containment(*stored))
    assert report_text == render(check_containment(*graphs))
    assert report_text.startswith("not contained: 18 differences")


def test_every_layer_of_a_live_rollout_model_was_compared() -> None:
    _, rollout = live_pair()
    assert len(quantized(rollout)) == 14
