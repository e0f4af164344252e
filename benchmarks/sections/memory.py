"""Memory of eager training on the CPU on batches of changing length: `dt.Linear` beside `nn.Linear`.

Each layer is Linear(256, 256) in its own process, trained on the same batches of random length. Long-lived allocations
between buffers of changing sizes would keep the C library from merging and returning them.
"""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.results import Row

LAYERS = ("nn.Linear", "dt.Linear")
LIMIT = 1.3  # times the memory of nn.Linear, at the end and at any step
STEPS, LONGEST = 5000, 4000


def resident() -> int:
    """Returns the resident set of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) // 1024
    raise RuntimeError("/proc/self/status names no VmRSS")


def train(layer: str, steps: int, recipe: str, longest: int) -> dict[str, int]:
    """Trains one layer. **Returns** MiB after the last step, the highest, and those of the loaded libraries."""
    import torch

    import diptych.torch as dt  # both processes load the same libraries
    from diptych.common import RECIPES

    torch.manual_seed(0)
    lengths = random.Random(0)
    ours = layer == "dt.Linear"
    module = (dt.Linear if ours else torch.nn.Linear)(256, 256)
    optimizer = torch.optim.SGD(module.parameters(), 1e-3)
    loaded = highest = resident()
    for _ in range(steps):
        x = torch.randn(lengths.randint(1, longest), 256)
        with dt.autocast(enabled=True, recipe=RECIPES[recipe]) if ours else contextlib.nullcontext():
            y = module(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        highest = max(highest, resident())
    return {"loaded": loaded, "end": resident(), "highest": highest}


def measure(layer: str, steps: int, recipe: str, longest: int) -> dict[str, int]:
    """Runs `train` in its own process."""
    arguments = [layer, str(steps), recipe, str(longest)]
    command = [sys.executable, "-m", "benchmarks.sections.memory", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def rows(case: Case, _: Any) -> Iterator[Row]:
    (recipe,) = case.names
    found = {layer: measure(layer, STEPS, recipe, LONGEST) for layer in LAYERS}
    plain, ours = found.values()
    for layer, mib in found.items():
        yield {"case": str(case), "name": layer, **{f"{k} MiB": v for k, v in mib.items()}}
    worst = max(ours[k] / plain[k] for k in ("end", "highest"))
    yield {"case": str(case), "name": f"{recipe} of nn.Linear", "ratio": LIMIT / worst, "goal": 1.0, "times": worst}


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))))
