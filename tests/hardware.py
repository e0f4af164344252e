"""Checks of the hardware that tests need."""

from __future__ import annotations


def cuda_missing() -> str:
    """Returns why CUDA cases cannot run here, or an empty string."""
    from diptych import core

    if not core.build_info()["cuda"]:
        return "this build has no CUDA backend"
    if not core.cuda_info()["archs"]:
        return "this machine has no GPU"
    return ""
