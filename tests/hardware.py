"""Checks of the hardware that tests need."""

from __future__ import annotations


def cuda_missing(gpus: int = 1) -> str:
    """Returns why CUDA cases that need so many GPUs cannot run here, or an empty string."""
    from diptych import core

    if not core.build_info()["cuda"]:
        return "this build has no CUDA backend"
    found = len(core.cuda_info()["archs"])
    if not found:
        return "this machine has no GPU"
    return f"{gpus} GPUs are needed, this machine has {found}" if found < gpus else ""
