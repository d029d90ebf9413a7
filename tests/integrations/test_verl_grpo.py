"""verl's own trainer on a CPU: GRPO on two ranks, FP8 on both sides, checked."""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import verl_workers  # noqa: F401  sets verl's platform

pytest.importorskip("verl", reason="verl has an environment of its own: make test-verl")
pytestmark = pytest.mark.filterwarnings("ignore")

from jetrl_compile.containment import check_containment  # noqa: E402
from jetrl_compile.graph_json import read_graph  # noqa: E402
from jetrl_compile.report_json import read_report  # noqa: E402

FOLDER = Path(__file__).parents[2] / "examples" / "verl_grpo"
SCRIPT, HOPPER = FOLDER / "cpu.sh", FOLDER / "hopper.sh"
# Stands for Python: verl prints its config instead of training, and a warm-up its
# arguments; with backward it fails.
PRINT_CONFIG = """#!/bin/sh
case "$*" in
  *warm-up*) shift 3; echo "$@" >> "{warm}"
    case "$*" in *--no-backward*) exit 0 ;; *) exit 1 ;; esac ;;
  *verl.trainer.main_ppo*) exec "{python}" "$@" --cfg job --resolve ;;
  *curves*) exit 0 ;;
esac
exec "{python}" "$@"
"""
# Planted in every process of verl's: another kernel under the name of exact attention.
SDPA = """
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
import jetrl_compile.exact_attention as exact
AttentionInterface.register(exact.NAME, sdpa_attention_forward)
"""
RANKS, STEPS = 2, 2
SIDES = ("rollout", "train")


def test_grpo(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "RANKS": str(RANKS),
        "STEPS": str(STEPS),
    }
    done = subprocess.run(
        # Gradient checkpointing is tested in one process; here it costs a compile.
        [
            "bash",
            str(SCRIPT),
            str(tmp_path / "run"),
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    for phase, count in (
        ("old log-prob", 14),
        ("reference", 14),
        ("actor update", 42),
    ):
        assert f"jetrl: {phase} runs {count} GEMMs in FP8" in log
    steps = [line for line in log.splitlines() if re.search(r"step:\d+ - ", line)]
    assert len(steps) == STEPS
    for line in steps:
        metrics = dict(re.findall(r"([\w/]+):([-+.\de]+)", line))
        # The same bits of logits on both sides; what is left is one rounding in FP32.
        assert float(metrics["rollout_corr/k3_kl"]) < 1e-12
        assert float(metrics["rollout_corr/log_ppl_abs_diff"]) < 1e-6
        assert float(metrics["training/rollout_probs_diff_max"]) < 1e-6
        assert float(metrics["actor/jetrl/contained"]) == 1
        assert float(metrics["actor/jetrl/level_3_bytes"]) == 1
        assert float(metrics["actor/grad_norm"]) > 0
    graphs = [read_graph(tmp_path / "run/reports" / f"{n}.json") for n in SIDES]
    assert check_containment(*graphs).contained is True
    for rank in range(RANKS):
        path = tmp_path / "run" / "reports" / f"containment-rank{rank}.json"
        levels = read_report(path).levels
        assert [level.status for level in levels[:3]] == ["passed"] * 3


def test_grpo_with_vllms_servers(tmp_path: Path) -> None:
    """Two replicas of verl's vLLM rollout around a model of vLLM's shape."""
    rollout, model = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
    tests = str(Path(__file__).parents[1])
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")]),
        "VERL_USE_EXTERNAL_MODULES": "verl_fake_vllm",
        "RANKS": str(RANKS),
        "STEPS": str(STEPS),
    }
    done = subprocess.run(
        [
            "bash",
            str(SCRIPT),
            str(tmp_path / "run"),
            f"{rollout}.name=vllm",
            f"{rollout}.load_format=dummy",
            f"{rollout}.free_cache_engine=True",
            f"{model}.enable_gradient_checkpointing=False",
            f"+{model}.override_config.jetrl_wire=fp8",
        ],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    log = done.stdout + done.stderr
    assert done.returncode == 0, log[-4000:]
    steps = [line for line in log.splitlines() if re.search(r"step:\d+ - ", line)]
    assert len(steps) == STEPS
    for line in steps:
        metrics = dict(re.findall(r"([\w/]+):([-+.\de]+)", line))
        assert float(metrics["rollout_corr/k3_kl"]) < 1e-3, "attention is another"
        assert float(metrics["actor/jetrl/contained"]) == 1
        assert float(metrics["actor/jetrl/level_3_bytes"]) == 1
    for rank in range(RANKS):
        path = tmp_path / "run" / "reports" / f"containment-rank{rank}.json"
        report = read_report(path)
        assert [level.status for level in report.levels[:3]] == ["passed"] * 3
        assert report.rollout_meta["engine"] == "vllm"


def run_exact(folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """GRPO in exact mode on two ranks, its output in `stdout`."""
    given = {"PYTHON": sys.executable, "RANKS": str(RANKS), "STEPS": str(STEPS)}
    model = "actor_rollout_ref.model"
    return subprocess.run(
        [
            "bash",
            str(SCRIPT),
            str(folder),
            f"{model}.enable_gradient_checkpointing=False",
        ],
        env={**os.environ, **given, "EXACT": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
        check=False,
    )


def test_grpo_in_exact_mode(tmp_path: Path) -> None:
    done = run_exact(tmp_path / "run")
    assert done.returncode == 0, done.stdout[-4000:]
    steps = [e for e in done.stdout.splitlines() if re.search(r"step:\d+ - ", e)]
    assert len(steps) == STEPS
    for line in steps:
        metrics = dict(re.findall(r"([\w/]+):([-+.\de]+)", line))
        for name in (
            "rollout_corr/k3_kl",
            "rollout_corr/log_ppl_abs_diff",
            "training/rollout_probs_diff_max",
            "actor/ppo_kl",  # one update a step: of the policy that sampled
        ):
            assert float(metrics[name]) == 0.0, (name, metrics[name])
        assert float(metrics["actor/jetrl/equal_log_probs"]) == 1
        assert float(metrics["actor/jetrl/contained"]) == 1
        assert float(metrics["actor/grad_norm"]) > 0
    graphs = [read_graph(tmp_path / "run/reports" / f"{n}.json") for n in SIDES]
    assert check_containment(*graphs, exact=True).contained is True


def test_sdpa_in_the_place_of_exact_attention_stops_the_run(tmp_path: Path) -> None:
    (tmp_path / "planted_sdpa.py").write_text(SDPA)
    done = run_exact(
        tmp_path / "run",
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        VERL_USE_EXTERNAL_MODULES="planted_sdpa",
    )
    assert done.returncode != 0
    assert "operators may give a token other bits in another batch" in done.stdout
    assert "model.layers.0.self_attn:attention (attention) is run by" in done.stdout
    assert not re.search(r"step:\d+ - ", done.stdout)


@pytest.mark.parametrize(
    ("recipe", "setting", "message"),
    [
        ("jetrl", "EXACT=True", "EXACT is 'True'; use 0 or 1"),
        ("jetrl", "WARM=yes", "WARM is 'yes'; use 0 or 1"),
        ("jetrl", "MICRO=08", "MICRO is '08'; use a number"),
        ("jetrl", "RESPONSE=1k", "RESPONSE is '1k'; use a number"),
        ("jetlr", "WARM=1", "no recipe here is called 'jetlr'"),
    ],
)
def test_hopper_refuses(
    tmp_path: Path, recipe: str, setting: str, message: str
) -> None:
    name, value = setting.split("=")
    done = subprocess.run(  # KL and RESIDENT are True or False
        ["bash", str(HOPPER), "smollm2", recipe, str(tmp_path / "run")],
        env={**os.environ, "PYTHON": "false", "GPUS": "1", name: value},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
    assert message in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "exact"),
    [
        *[(recipe, "") for recipe in ("rollout_only", "bf16", "verl_fp8", "jetrl")],
        ("jetrl", "0"),
    ],
)
def test_verl_accepts_the_options_of_hopper(
    tmp_path: Path, recipe: str, exact: str
) -> None:
    # It registers the engine, and verl warns of what is not installed.
    from jetrl_compile.integrations.verl.settings import read_settings

    OmegaConf = pytest.importorskip("omegaconf").OmegaConf

    python = tmp_path / "python"
    warm = tmp_path / "warm"
    python.write_text(PRINT_CONFIG.format(python=sys.executable, warm=warm))
    python.chmod(0o755)
    run = tmp_path / "run"
    for name in ("model/config.json", "data/train.parquet"):  # they are there already
        (run / name).parent.mkdir(parents=True)
        (run / name).touch()
    environment = {**os.environ, "PYTHON": str(python), "GPUS": "2", "EXACT": exact}
    is_exact = recipe == "jetrl" and exact != "0"
    more = {"rollout_only": "--no-backward ", "jetrl": "--exact " if is_exact else ""}
    done = subprocess.run(
        ["bash", str(HOPPER), "smollm2", recipe, str(run), "trainer.save_freq=5"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    asked = warm.read_text() if warm.exists() else ""
    tokens = f"--tokens 1:{8 * (512 + 1024)}"
    assert asked == (
        f"{run}/model --recipe {recipe} {more[recipe]}{tokens}\n"
        if recipe in more
        else ""
    )
    assert ("kernels are compiled where they" in done.stderr) == (recipe == "jetrl")
    text = done.stdout
    config: Any = OmegaConf.create(text[text.index("actor_rollout_ref:") :])
    parts = config.actor_rollout_ref
    assert (parts.actor.strategy, parts.ref.strategy) == ("fsdp2", "fsdp2")
    assert config.trainer.n_gpus_per_node == 2
    assert (config.trainer.save_freq, config.trainer.resume_mode) == (5, "auto")
    assert parts.rollout.max_model_len == 512 + 1024
    vllm = OmegaConf.to_container(parts.rollout.engine_kwargs.vllm)
    override = OmegaConf.to_container(parts.model.override_config)
    if recipe == "verl_fp8":
        assert (parts.model.external_lib, vllm) == (None, {})
        assert parts.rollout.quantization == "fp8"
        assert override == {"attn_implementation": "sdpa"}
        return
    assert parts.rollout.quantization is None
    assert parts.model.external_lib == "jetrl_compile.integrations.verl"
    settings = read_settings(override)
    assert settings.recipe.name == recipe
    assert settings.on_violation == ("warn" if recipe == "rollout_only" else "stop")
    assert settings.reports == run / "reports"
    assert (settings.level, settings.wire) == (3, "bf16")
    assert settings.resident_reference
    assert settings.exact == parts.model.use_remove_padding == is_exact
    attention = "jetrl_exact" if is_exact else "sdpa"
    assert override["attn_implementation"] == attention
    wanted = {"recipe": recipe}
    assert vllm == (
        {}
        if recipe == "bf16"
        else {"quantization": "jetrl", "additional_config": {"jetrl": wanted}}
    )


def test_rewards_of_written_tasks(tmp_path: Path) -> None:
    import pandas

    from jetrl_compile.examples.verl_grpo import make_data
    from jetrl_compile.examples.verl_grpo.reward import digit_share, verified

    names = ["gcd", "letter_counting"]
    sizes = ["--train", "6", "--val", "2"]
    make_data.main([str(tmp_path), *sizes, *(f"--task={name}" for name in names)])
    frame = pandas.read_parquet(tmp_path / "train.parquet")
    assert list(frame.data_source) == [f"reasoning_gym/{n}" for n in names] * 3
    for row in frame.to_dict("records"):
        truth = row["reward_model"]["ground_truth"]
        assert [m["role"] for m in row["prompt"]][-2:] == ["assistant", "user"]
        args = row["data_source"], f"It is {truth}.", truth, row["extra_info"]
        assert verified(*args) == 1.0
        assert verified(args[0], f"It is {truth}9.", *args[2:]) < 1.0
    assert digit_share("", "a1b2", "") == 0.5


def test_the_reward_of_a_long_answer_is_of_all_of_it(tmp_path: Path) -> None:
    import pandas

    from jetrl_compile.examples.verl_grpo import make_data
    from jetrl_compile.examples.verl_grpo.reward import verified

    make_data.main([str(tmp_path), "--train=2", "--val=2", "--task=counting"])
    row = pandas.read_parquet(tmp_path / "train.parquet").to_dict("records")[0]
    truth = row["reward_model"]["ground_truth"]
    more = row["data_source"], truth, row["extra_info"]
    assert verified(more[0], truth, *more[1:]) == 1.0
    numbers = truth.split(", ")
    some = ", ".join(numbers[:60])
    assert verified(more[0], some, *more[1:]) == 60 / len(numbers)
    assert verified(more[0], numbers[-1], *more[1:]) == 0.0


def test_seeds_have_one_worked_example_and_other_questions(tmp_path: Path) -> None:
    """Question i of a seed of reasoning-gym is question i - 1 of the next one."""
    import pandas

    from jetrl_compile.examples.verl_grpo import make_data

    questions, examples = [], set()
    for seed in ("0", "1", "2"):
        folder = tmp_path / seed
        sizes = ["--train", "20", "--val", "20"]
        make_data.main([str(folder), *sizes, "--seed", seed])
        for split in ("train", "val"):
            prompts = list(pandas.read_parquet(folder / f"{split}.parquet").prompt)
            questions.append([turns[-1]["content"] for turns in prompts])
            examples |= {turns[1]["content"] for turns in prompts}
    assert len(examples) == 1
    for one, other in itertools.permutations(questions, 2):
        assert one != other
        assert one[1:] != other[:-1]
