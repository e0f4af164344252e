"""The report of a training run: one line a step on the terminal, and JSON lines in a file."""

from __future__ import annotations

import json
import resource
import shutil
import sys
from pathlib import Path

PEAKS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "GH200": 989, "B200": 2250, "A100": 312}
"""bfloat16 TFLOP/s without sparsity; the first name that a device's contains. MFU relates to it for every recipe, so
that recipes can be compared; one above 1 is possible in FP8."""


def peak_tflops(device: str) -> float | None:
    """The peak of a device by its name, None if it is not known."""
    return next((peak for part, peak in PEAKS.items() if part in device), None)


def host_gib() -> float:
    """The most memory that this process has had so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Report:
    """Writes the report on the first rank. On a terminal a step's line replaces the one before; each tenth stays."""

    def __init__(self, log: Path | None, resumed_at: int) -> None:
        self.live, self.pending, self.log = sys.stdout.isatty(), False, None
        if log is not None:
            kept = []
            if resumed_at and log.exists():  # steps that a killed run made after its last checkpoint are made again
                lines = log.read_text().splitlines(keepends=True)
                kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] < resumed_at]
            log.write_text("".join(kept))
            self.log = log.open("a")

    def step(self, row: dict[str, float | None]) -> None:
        if self.log is not None:
            self.log.write(json.dumps(row) + "\n")
            self.log.flush()
        mfu = row["mfu"]
        text = (
            f"step {row['step']:>6}  loss {row['loss']:.4f}  {row['tokens_per_s']:>9,.0f} tokens/s  "
            f"MFU {'    -' if mfu is None else f'{mfu:5.1%}'}  {row['memory_gib']:6.2f} GiB  "
            f"grad {row['grad_norm']:8.3g}  lr {row['lr']:.2e}"
        )
        self.pending = self.live and row["step"] % 10 != 0
        if self.pending:
            text = text[: shutil.get_terminal_size().columns - 1]  # a wrapped line would not be replaced
        print(f"\r\x1b[K{text}" if self.live else text, end="" if self.pending else "\n", flush=True)

    def close(self) -> None:
        if self.pending:
            print()
        if self.log is not None:
            self.log.close()
