"""Checked graphs, kept beside torch's compile cache.

When a compile cache holds a graph, its passes do not run; the report then comes from
here. It is keyed by Dynamo's graph, its inputs and the passes' uuid.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx import GraphModule

from jetrl_compile.errors import GraphFormatError
from jetrl_compile.files import write_text
from jetrl_compile.graph_json import graph_from_json, graph_to_json
from jetrl_compile.pipeline import CompileReport


def graph_key(gm: GraphModule, inputs: Sequence[Any], uuid: Any) -> str:
    """Return the key of a Dynamo graph.

    Two graphs have one key only if the passes would make the same of them: code,
    dtypes, sizes, which inputs need gradients, autocast and grad mode, and the uuid.
    """
    digest = hashlib.sha256()
    described = [
        (
            str(value.dtype),
            tuple(str(size) for size in value.shape),
            value.requires_grad,
            value.device.type,
        )
        if isinstance(value, torch.Tensor)
        else type(value).__name__
        for value in inputs
    ]
    modes = (
        torch.is_grad_enabled(),
        [torch.is_autocast_enabled(device) for device in ("cpu", "cuda")],
        torch.__version__,
    )
    for part in (gm.code, described, modes, uuid):
        digest.update(repr(part).encode())
    return digest.hexdigest()


def _path(key: str) -> Path:
    return Path(cache_dir()) / "jetrl" / f"{key}.json"


def store_report(key: str, report: CompileReport) -> None:
    """Keep a report."""
    path = _path(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "module": report.module,
        "phase": report.phase,
        "training": report.training,
        "recipe": report.recipe,
        "changes": dict(report.changes),
        "providers": dict(report.providers),
        "notes": list(report.notes),
        "unmatched": list(report.unmatched),
        "graph": graph_to_json(report.graph),
    }
    write_text(path, json.dumps(document))


def load_report(key: str) -> CompileReport | None:
    """Return a kept report, marked `from_cache`, or None if none can be read."""
    path = _path(key)
    try:
        document = json.loads(path.read_text())
        graph = graph_from_json(document.pop("graph"))
        for name in ("unmatched", "notes"):
            document[name] = tuple(document[name])
        return CompileReport(**document, graph=graph, from_cache=True)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, GraphFormatError):
        return None
