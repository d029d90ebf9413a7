"""Write tests/fixtures/vllm_*.json: descriptions of vLLM's graphs, not captures.

    python tests/make_vllm_fixture.py

They let the check of vLLM's graphs run without vLLM until graphs that were captured
from a running engine replace them; the format is the same.
"""

from pathlib import Path

from vllm_description import Engine, describe_engine

from jetrl_compile.capture_json import captured_to_json
from jetrl_compile.files import write_text

FIXTURES = Path(__file__).parent / "fixtures"
# As vLLM runs by default, and one as this project's passes leave it.
ENGINES = {
    "vllm_qwen3": Engine("qwen3"),
    "vllm_llama": Engine("llama", rope="in_place", activation="opaque"),
    "vllm_qwen2": Engine("qwen2", attention="functionalized"),
    "vllm_qwen3_lowered": Engine("qwen3", linear="lowered", add_norm="own"),
}


def fixture_text(name: str) -> str:
    """The JSON text of a fixture."""
    engine = ENGINES[name]
    meta = {
        "engine": "vllm 0.24.0",
        "model": engine.model,
        "level": "dynamo",
        "origin": "described by hand from vLLM's model code; no capture",
    }
    return captured_to_json(describe_engine(engine), meta)


def main() -> None:
    """Write every fixture."""
    FIXTURES.mkdir(exist_ok=True)
    for name in ENGINES:
        write_text(FIXTURES / f"{name}.json", fixture_text(name))


if __name__ == "__main__":
    main()
