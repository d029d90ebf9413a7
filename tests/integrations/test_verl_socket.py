"""The socket that brings weights from verl's trainer: both ends name the run's own."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import verl_workers as workers

from jetrl_compile.errors import ModelError
from jetrl_compile.examples.verl_grpo.make_model import make_model

pytest.importorskip("verl", reason="verl has an environment of its own: make test-verl")
import verl_vllm_doubles as doubles

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model("tiny", path, layers=None, seed=0)
    return path


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with doubles.vllm_installed(monkeypatch):
        yield


def adapter(folder: Path, recipe: str = "jetrl", **rollout: Any) -> Any:
    config = workers.model_config(folder, jetrl_recipe=recipe)
    return doubles.make_adapter(config, None, **rollout)


def test_runs_on_one_host_have_sockets_of_their_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs, each with a Ray cluster of its own, are both Ray's first job."""
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    monkeypatch.setattr(vLLMHttpServer, "_init_model_config", lambda _, config: config)
    worker, server = doubles.make_worker(None), doubles.make_server(doubles.Engine())
    handles = []
    for address in ("192.0.2.1:6379", "192.0.2.1:6380", f"{'head.' * 50}svc:6379"):
        context = SimpleNamespace(get_job_id=lambda: "01000000", gcs_address=address)
        monkeypatch.setattr("ray.get_runtime_context", lambda made=context: made)
        made = adapter(folder)
        server.config = made.config
        server._init_model_config(workers.model_config(folder))
        assert made.zmq_handle == worker._get_zmq_handle()
        path = made.zmq_handle.removeprefix("ipc://")
        assert Path(path).parent == Path("/tmp"), path
        assert len(path) < 108, "longer than a socket's path may be"
        handles.append(path)
    assert len(set(handles)) == len(handles), handles


def test_a_socket_with_another_name_is_refused() -> None:
    from jetrl_compile.integrations.verl_vllm.channel import of_run

    with pytest.raises(ModelError, match="without Ray's job 't'; use verl"):
        of_run("ipc:///tmp/rl-colocate-zmq-replica-0-rank-0.sock")


def test_replicas_with_servers_of_verl_keep_verls_socket(folder: Path) -> None:
    """Prefill and decode apart: only a recipe without FP8 rollouts may be so."""
    split = {"enabled": True}
    assert "-t-replica-" in adapter(folder, "bf16", disaggregation=split).zmq_handle
    assert "-t-replica-" not in adapter(folder, "bf16").zmq_handle
