"""Adapters of the peers, one file each: `load` returns what sections call, or raises `Absent`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

NAMES = ("scaled_mm", "grouped_mm", "torchao", "xla", "deepgemm", "te")


class Absent(Exception):
    """Says why a peer cannot be measured here."""


def find(library: Path | None) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the peers that are here, and why each other one is not.

    **Arguments:** `library`: DeepGEMM's kernels, compiled by `python -m benchmarks.peers.deepgemm`."""
    here: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for name in NAMES:
        try:
            here[name] = importlib.import_module(f"benchmarks.peers.{name}").load(library)
        except Absent as reason:
            absent[name] = str(reason)
        except Exception as error:  # a peer that breaks on import must not end the suite
            absent[name] = f"{type(error).__name__}: {error}"
    return here, absent
