"""Memory of eager training on the CPU on batches of changing length: `dt.Linear` against `nn.Linear`.

    python -m benchmarks.memory [--steps 5000] [--recipe mxfp8] [--peak 4000]

Each layer is Linear(256, 256) in its own process, trained on the same batches of random length 1 to --peak. Prints the
resident set (RSS) of each process after the last step and the highest at any step, in MiB, and their ratio. Exits with
1 if the quantized layer ends with, or ever held, more than 1.3 times as much. Then diptych keeps long-lived allocations
between buffers of changing sizes, whose memory the C library cannot merge and return.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import subprocess
import sys
from pathlib import Path

LAYERS = ("nn.Linear", "dt.Linear")
LIMIT = 1.3


def resident() -> int:
    """RSS of this process in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) // 1024
    raise RuntimeError("/proc/self/status names no VmRSS")


def train(layer: str, steps: int, recipe: str, peak: int) -> dict[str, int]:
    """Trains one layer. **Returns** RSS in MiB after the last step, the highest, and that of the loaded libraries."""
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
        x = torch.randn(lengths.randint(1, peak), 256)
        with dt.autocast(enabled=True, recipe=RECIPES[recipe]) if ours else contextlib.nullcontext():
            y = module(x)
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        highest = max(highest, resident())
    return {"loaded": loaded, "end": resident(), "highest": highest}


def measure(layer: str, steps: int, recipe: str, peak: int) -> dict[str, int]:
    """Runs `train` in its own process."""
    command = [sys.executable, "-m", "benchmarks.memory", "--layer", layer, "--recipe", recipe]
    command += ["--steps", str(steps), "--peak", str(peak)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--recipe", default="mxfp8")
    parser.add_argument("--peak", type=int, default=4000, help="longest batch, in rows")
    parser.add_argument("--layer", choices=LAYERS, help="measure this one alone, here, and print JSON")
    args = parser.parse_args()
    options = args.steps, args.recipe, args.peak
    if args.layer:
        print(json.dumps(train(args.layer, *options)))
        return 0
    plain, ours = (measure(layer, *options) for layer in LAYERS)
    for layer, found in zip(LAYERS, (plain, ours), strict=True):
        print(f"{layer}: {found['loaded']} MiB loaded, {found['end']} at the end, {found['highest']} at most")
    worst = max(ours[k] / plain[k] for k in ("end", "highest"))
    print(f"dt.Linear takes {worst:.2f} times the memory of nn.Linear; at most {LIMIT} is wanted")
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
