"""`training.deterministic`: settings that make two runs of the same layout bitwise equal on
GPUs.

Variables are read once, when a library creates its first handle or communicator, so launchers
set them (`toolkit/launchers/job.py`) and the worker checks them.
"""

from collections.abc import Iterator, Mapping

from toolkit.errors import BackendUnavailable, RunFailed

VARIABLES: Mapping[str, tuple[str, ...]] = {
    # cuBLAS and NCCL add in a fixed order; Transformer Engine's attention is deterministic.
    "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
    "NCCL_ALGO": ("Ring", "CollnetDirect", "CollnetChain", "^NVLS"),
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("0",),
}
"""Accepted parts of each variable's value, between commas. Launchers set the first.

As NVIDIA's Megatron-LM checks them (megatron/training/determinism.py). cuBLAS' own
documentation, "Results reproducibility", has the first."""

_NO_WAY = "does not have a deterministic implementation"
"""Text in torch's error about an operator."""


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that launchers add to the environment of workers. The user's own values are
    kept."""
    return {name: values[0] for name, values in VARIABLES.items() if name not in environ}


def unsuitable(environ: Mapping[str, str]) -> Iterator[str]:
    """Names of the variables that are set to a nondeterministic value."""
    for name, accepted in VARIABLES.items():
        stated = environ.get(name, accepted[0]).split(",")
        if not {part.strip() for part in stated} <= {*accepted}:
            yield name


def switch_on(environ: Mapping[str, str], *, on_gpu: bool) -> None:
    """Make torch deterministic, or fail. Call it before the first operator.

    Raises BackendUnavailable if, on GPUs, a variable is missing or has another value.
    """
    import torch

    if on_gpu:
        missing = [name for name in VARIABLES if name not in environ]
        if wrong := [*missing, *unsuitable(environ)]:
            settings = " ".join(f"{name}={VARIABLES[name][0]}" for name in wrong)
            raise BackendUnavailable(
                f"training.deterministic needs {', '.join(wrong)} set before the ranks start",
                fix=f"`dmt launch` sets them; for a launcher of your own: export {settings}",
            )
    torch.use_deterministic_algorithms(True)
    # No code reads uninitialised memory; filling it would cost time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def as_users_mistake(error: Exception) -> RunFailed | None:
    """The error message if torch refuses a nondeterministic operator. None for any other
    error."""
    if not isinstance(error, RuntimeError) or _NO_WAY not in str(error):
        return None
    operator = str(error).partition(_NO_WAY)[0].strip()
    return RunFailed(
        f"training.deterministic: {operator} has no deterministic implementation here",
        fix="set training.deterministic to false, or choose another engine or model "
        "implementation, which may compute it by other operators",
        retry=False,
    )
