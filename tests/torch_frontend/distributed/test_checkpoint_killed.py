"""Runs that are killed by SIGKILL find their last complete checkpoint, and end with the bits of an unbroken run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_frontend.ranks import needs_gloo

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the processes are forked")


def forks(*args: object) -> str:
    command = [sys.executable, "-m", "torch_frontend.distributed.checkpoint_forks", *map(str, args)]
    ran = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-5000:]
    return ran.stdout


@pytest.mark.parametrize("moments", (5, pytest.param(20, marks=pytest.mark.slow)))
def test_killed_at_random_moments(moments, tmp_path):
    assert f"killed {moments} times" in forks("kill", tmp_path, 1, moments, 0)


@needs_gloo
@pytest.mark.slow
def test_two_ranks_killed_at_twenty_moments(tmp_path):
    assert "killed 20 times" in forks("kill", tmp_path, 2, 20, 0)


@pytest.mark.slow
def test_killed_before_each_call_that_changes_files(tmp_path):
    assert "killed before each of" in forks("points", tmp_path)
