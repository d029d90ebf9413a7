"""How long `jetrl graph` takes for large models, and how much memory.

    python benchmarks/trace_configs.py

For each model: seconds and peak resident memory of building the training and the
rollout graph from the config, in a process of its own, and whether the one is contained
in the other. Exit status 1 if a target is missed: 60 s and 4 GiB for Qwen3-32B, 180 s
for DeepSeek-V3 (61 layers, 256 experts).
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

GIB = 2**20  # in KiB, the unit of ru_maxrss
TARGETS: dict[str, tuple[float, float]] = {
    "qwen3-32b": (60.0, 4.0),
    "deepseek-v3": (180.0, 16.0),
}


def config_of(name: str) -> Any:
    """Return a model's config, written out: nothing is downloaded."""
    from transformers import DeepseekV3Config, Qwen3Config

    if name == "deepseek-v3":
        return DeepseekV3Config()  # its defaults are DeepSeek-V3's sizes
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=5120,
        intermediate_size=25600,
        num_hidden_layers=64,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )


def measure(name: str, phase: str, folder: str) -> dict[str, Any]:
    """Run `jetrl graph` on a config in a new process."""
    code = (
        "import resource, sys; from jetrl_compile.cli import main\n"
        "try:\n    main()\n"
        "finally:\n    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, "
        "file=sys.stderr)"
    )
    output = Path(folder) / f"{name}.{phase}.json"
    command = [sys.executable, "-c", code, "graph", folder]
    command += ["--phase", phase, "-o", str(output), "--json"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds = time.perf_counter() - start
    gib = int(done.stderr.split()[-1]) / GIB
    summary = json.loads(done.stdout)
    return {
        "seconds": seconds,
        "gib": gib,
        "operators": summary["operators"],
        "path": output,
    }


def main() -> int:
    """Measure each model; return the exit status."""
    from jetrl_compile.containment import check_containment
    from jetrl_compile.graph_json import read_graph

    missed = 0
    for name, (most_seconds, most_gib) in TARGETS.items():
        with tempfile.TemporaryDirectory() as folder:
            config_of(name).save_pretrained(folder)
            found = {p: measure(name, p, folder) for p in ("train", "rollout")}
            graphs = {p: read_graph(item["path"]) for p, item in found.items()}
        report = check_containment(graphs["rollout"], graphs["train"])
        for phase, item in found.items():
            missed += item["seconds"] > most_seconds or item["gib"] > most_gib
            print(
                f"{name:12} {phase:8} {item['seconds']:6.1f} s  "
                f"{item['gib']:5.2f} GiB  {item['operators']:6,} operators"
            )
        print(f"{name:12} {report.verdict()}")
        missed += report.contained is not True
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
