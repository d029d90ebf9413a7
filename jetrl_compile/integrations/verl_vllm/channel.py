"""The socket over which weights reach vLLM's workers: of one run, not of one host.

verl names it after Ray's job, so that runs on one host do not meet. A run that starts a
Ray cluster of its own is always that cluster's first job, and two such runs would send
their weights to each other.
"""

import hashlib

import ray

from jetrl_compile.errors import ModelError

VARIABLE = "VERL_RAY_JOB_ID"  # where verl's extension of vLLM's workers reads the name
DIGITS = 12  # an address may be longer than a socket's path


def name_of_run() -> str:
    """Return what the socket is named after: Ray's job, and its cluster's address."""
    context = ray.get_runtime_context()
    address = hashlib.sha256(str(context.gcs_address).encode()).hexdigest()
    return f"{context.get_job_id()}-{address[:DIGITS]}"


def of_run(handle: str) -> str:
    """Return verl's handle of the socket with the name of this run.

    Args:
        handle: As verl makes it, with the name of Ray's job.

    Raises:
        ModelError: It has no such name: vLLM's workers would wait at another socket.
    """
    job: str = ray.get_runtime_context().get_job_id()
    before, found, after = handle.partition(f"-{job}-")
    if not found:
        raise ModelError(
            f"verl names its socket {handle!r}, without Ray's job {job!r}; use verl "
            "0.9.1"
        )
    return f"{before}-{name_of_run()}-{after}"
