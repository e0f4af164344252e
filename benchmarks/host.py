"""Host time of eager torch calls, measured on small tensors.

    python -m benchmarks.host [--device cuda] [--against SITE] [--turns 5] [--out FILE]

Each case is called often, without waiting for the device; its figure is the least over all turns, in microseconds. With
`--against`, a folder of site-packages that holds another build of diptych, both builds run in turns, each in processes
of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NN_LINEAR = "nn.Linear"


def _least(call: Callable[[], Any], done: Callable[[], Any], seconds: float = 0.3) -> float:
    """Microseconds of one call: the minimum over batches that start on an idle device and do not fill its queue."""
    for _ in range(20):
        call()
    done()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(10):
            call()
        best = min(best, time.perf_counter() - start)
        done()
    return best / 10 * 1e6


def _cases(device: str) -> dict[str, Callable[[], Any]]:
    import torch

    import diptych.torch as dt
    from diptych.common import RECIPES, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling
    from diptych.common import QuantizerRole as Role

    role = Role(module="linear", tensor="input")
    current, mx = Float8CurrentScaling().quantizer(role), MXFP8BlockScaling().quantizer(role)
    delayed = DelayedScaling().quantizer(role)
    x, one = torch.randn(16, 32, device=device), torch.ones(1, device=device)
    a, b = dt.quantize(x, current), dt.quantize(x, current)
    tokens, mask = torch.randn(8, 32, device=device), torch.rand(8, 4, device=device) < 0.5
    probs, row_map = torch.rand(8, 4, device=device), dt.moe_map(mask)
    rows = dt.moe_permute(tokens, row_map)[0]
    stack, offsets = torch.randn(2, 16, 32, device=device), torch.tensor([0, 8, 16], dtype=torch.int32, device=device)
    q_stack, q_rows = dt.quantize_stack(stack, mx), dt.quantize(x, mx)
    cases = {
        "quantize, current": lambda: dt.quantize(x, current),
        "quantize, delayed": lambda: dt.quantize(x, delayed, scale=one),
        "quantize, mxfp8": lambda: dt.quantize(x, mx),
        "quantize, given amax": lambda: dt.quantize(x, current, amax=one),
        "dequantize": lambda: dt.dequantize(a),
        "gemm": lambda: dt.gemm(a, b),
        "quantize_stack": lambda: dt.quantize_stack(stack, mx),
        "grouped_gemm": lambda: dt.grouped_gemm(q_rows, q_stack, offsets),
        "moe_map": lambda: dt.moe_map(mask),
        "moe_permute": lambda: dt.moe_permute(tokens, row_map),
        "moe_permute_with_probs": lambda: dt.moe_permute_with_probs(tokens, probs, row_map),
        "moe_unpermute": lambda: dt.moe_unpermute(rows, row_map, probs),
        "moe_sort_chunks": lambda: dt.moe_sort_chunks_by_index(tokens, [4, 4], [1, 0]),
    }
    inputs = torch.randn(128, 256, device=device, dtype=torch.bfloat16)
    for name, recipe in ((NN_LINEAR, None), *RECIPES.items()):
        layer = (torch.nn.Linear if recipe is None else dt.Linear)(256, 256, device=device, dtype=torch.bfloat16)

        def forward(layer: Any = layer, recipe: Any = recipe) -> Any:
            if recipe is None:
                return layer(inputs)
            with dt.autocast(recipe=recipe):
                return layer(inputs)

        def step(forward: Any = forward) -> None:
            forward().sum().backward()

        cases[f"Linear 128x256x256, {name}, forward"] = forward
        cases[f"Linear 128x256x256, {name}, forward and backward"] = step
    return cases


def measure(device: str) -> dict[str, float]:
    """Microseconds of each case in this process."""
    import torch

    torch.set_num_threads(1)
    done = torch.cuda.synchronize if device == "cuda" else lambda: None
    return {name: _least(call, done) for name, call in _cases(device).items()}


def _in_a_process(device: str, site: str | None) -> dict[str, float]:
    env = os.environ | ({"PYTHONPATH": site} if site else {})
    command = [sys.executable, __file__, "--device", device, "--turns", "0"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT, env=env).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--against", help="site-packages with another build of diptych")
    parser.add_argument("--turns", type=int, default=5, help="processes of each build; 0 measures in this one")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    args = parser.parse_args()
    if args.turns < 1:
        print(json.dumps(measure(args.device)))
        return
    least: dict[str, dict[str, float]] = {}
    for _ in range(args.turns):
        for build, site in (("now", None), ("before", args.against)):
            if build == "now" or site:
                for case, figure in _in_a_process(args.device, site).items():
                    least.setdefault(case, {})[build] = min(figure, least.get(case, {}).get(build, figure))
    rows = [{"case": case, **{k: round(v, 2) for k, v in figures.items()}} for case, figures in least.items()]
    plain = {row["case"].rpartition(", ")[2]: row["now"] for row in rows if NN_LINEAR in row["case"]}
    for row in rows:
        ratio = f"  {row['now'] / row['before']:.3f}" if "before" in row else ""
        if (passes := row["case"].rpartition(", ")[2]) in plain and row["case"].startswith("Linear"):
            row[f"of {NN_LINEAR}"] = round(row["now"] / plain[passes], 2)
            ratio += f"  {row[f'of {NN_LINEAR}']:.2f} of {NN_LINEAR}"
        print(f"{row['case']:58}" + "".join(f"{row[k]:10.2f}" for k in ("now", "before") if k in row) + ratio)
    if args.out:
        args.out.write_text(
            json.dumps({"device": args.device, "turns": args.turns, "unit": "us", "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
