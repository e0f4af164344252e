"""A sharded training step over two processes, whose devices exchange by gloo."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import jax
import numpy as np

from jax_frontend import processes, tools


def test_two_processes_have_the_bits_of_one_device(tmp_path):
    """Data parallel with weights, and then experts, cut over the same axis. Gradients of weights are sums in the order
    of gloo."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    file = tmp_path / "results.npz"
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    ranks = [
        subprocess.Popen(
            [sys.executable, processes.__file__, str(i), "2", port, str(file)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=240)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    got = np.load(file)
    for name, recipe in processes.recipes().items():
        both = lambda args, recipe=recipe: processes.step(recipe, **args) | processes.experts(recipe, **args)  # noqa: E731
        want = jax.jit(both)(processes.operands())
        for part, w in want.items():
            g, w = got[f"{name} {part}"], np.asarray(w)
            if part not in ("dkernel", "dbias"):
                tools.same(g, w, f"{name} {part}")
            else:
                assert np.abs(g - w).max() <= 1e-5 * np.abs(w).max(), (name, part)
