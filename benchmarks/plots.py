"""Plots as SVG: rooflines of products, bars of speeds, and intervals of losses."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from benchmarks.cases import PACKED
from benchmarks.results import Row

MARKS = {"bf16": ("o", "#777777"), "fp8-current": ("^", "#d62728"), "fp8-delayed": ("v", "#d62728"),
         "fp8-block": ("s", "#1f77b4"), "mxfp8": ("D", "#2ca02c"), PACKED: ("P", "#9467bd"),
         "DeepGEMM": ("x", "#ff7f0e"), "torch tensorwise": ("+", "#8c564b"),
         "torch FP8 by row": ("+", "#8c564b")}  # fmt: skip


def roofline(path: Path, rows: list[Row], copy: float | None, title: str) -> None:
    """Draws rates over FLOP per byte, below the roof of a copy's GB/s and of the fastest product of bfloat16."""
    matplotlib.rcParams.update({"svg.hashsalt": "diptych", "svg.fonttype": "none", "font.size": 9})
    figure, axes = plt.subplots(figsize=(7.2, 4.2), layout="constrained")
    axes.set(xscale="log", xlabel="FLOP per necessary byte", ylabel="TFLOP/s", title=title)
    known = [r for r in rows if r["name"] in MARKS]
    for name, (mark, color) in MARKS.items():
        found = [r for r in known if r["name"] == name]
        if found:
            axes.scatter([r["intensity"] for r in found], [r["rate"] for r in found], marker=mark, s=22, label=name,
                         c=color, linewidths=1.1)  # fmt: skip
    low, high = min(r["intensity"] for r in known) / 1.3, max(r["intensity"] for r in known) * 1.3
    if copy is not None:
        flat = max(r["rate"] for r in known)
        knee = min(max(flat * 1e3 / copy, low), high)
        x = [low * (knee / low) ** (i / 40) for i in range(41)]
        axes.plot(x, [v * copy / 1e3 for v in x], color="black", lw=0.9, label=f"copy, {copy:.0f} GB/s")
    if plain := [r["rate"] for r in known if r["name"] == "bf16"]:
        axes.axhline(max(plain), color="#777777", lw=0.9, ls="--", label="fastest bfloat16 product")
    axes.grid(True, which="both", lw=0.3, alpha=0.5)
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def bars(path: Path, speeds: dict[str, float], peer: str, title: str) -> None:
    """Draws speeds as multiples of a peer's, as bars beside a line at 1."""
    matplotlib.rcParams.update({"svg.hashsalt": "diptych", "svg.fonttype": "none", "font.size": 10})
    names = [peer, *speeds]
    figure, axes = plt.subplots(figsize=(7.2, 0.42 * len(names) + 1.0), layout="constrained")
    figure.patch.set_facecolor("white")
    values = [1.0, *speeds.values()]
    held = axes.barh(names, values, color=["#9e9e9e", *["#3f51b5"] * len(speeds)], height=0.66)
    axes.bar_label(held, [f"{v:.2f}" for v in values], padding=4)
    axes.axvline(1.0, color="#9e9e9e", lw=0.9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.12)
    axes.set_xlabel(f"speed, of {peer}")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def intervals(path: Path, rows: list[tuple[str, float, float, float]], title: str) -> None:
    """Draws means in percent with their intervals: rows of a name, the mean and the interval's ends."""
    matplotlib.rcParams.update({"svg.hashsalt": "diptych", "svg.fonttype": "none", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.2, 0.36 * len(rows) + 1.1), layout="constrained")
    figure.patch.set_facecolor("white")
    names, means = [r[0] for r in rows], [r[1] for r in rows]
    ends = [[r[1] - r[2] for r in rows], [r[3] - r[1] for r in rows]]
    axes.errorbar(means, names, xerr=ends, fmt="o", ms=5, capsize=3, color="#3f51b5", lw=1.2)
    axes.axvline(0.0, color="#9e9e9e", lw=0.9)
    axes.invert_yaxis()
    axes.set_xlabel("difference of the final validation loss from high precision, %")
    axes.set_title(title, fontsize=10, loc="left")
    axes.grid(True, axis="x", lw=0.3, alpha=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
