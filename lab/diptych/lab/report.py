"""The HTML report: one self-contained file of tables and inline SVG plots, made from the results alone."""

from __future__ import annotations

import importlib.resources
import io
import math
from typing import Any

import jinja2
import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

Results = dict[str, Any]
_COLORS = ("#d9480f", "#1c5fb8", "#2b8a3e")
_STYLE: Any = {
    "font.size": 11,
    "font.family": "sans-serif",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#868e96",
    "axes.labelcolor": "#343a40",
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e9ecef",
    "legend.frameon": False,
    "svg.fonttype": "path",
    "xtick.color": "#495057",
    "ytick.color": "#495057",
}


def render(results: Results, commands: list[str]) -> str:
    """Returns the report of `compare.compare`'s results as an HTML document without external references.

    **Arguments:** `commands`: the commands that repeat the results.
    """
    with plt.rc_context(_STYLE):
        plots = {"losses": _losses(results), "differences": _differences(results), "drift": _drift(results)}
        plots |= {"scales": _scales(results), "pairs": _pairs_of_seeds(results)}
    text = importlib.resources.files("diptych.lab").joinpath("report.html.j2").read_text()
    env = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    env.filters |= {"count": _count, "percent": _percent, "relative": _relative, "duration": _duration}
    return env.from_string(text).render(r=results, plots=plots, commands=commands, summary=_summary(results))


# --- numbers as text ---


def _count(n: int) -> str:
    return f"{n:,}".replace(",", "\u202f")  # narrow no-break space


def _percent(part: int, whole: int) -> str:
    if part == 0 or whole == 0:
        return "0 %"
    share = 100 * part / whole
    return f"{share:.2g} %" if share < 10 else f"{share:.0f} %"


def _relative(x: float | None) -> str:
    return "" if x is None else ("0" if x == 0 else f"{x:.1e}")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def _summary(r: Results) -> Results:
    replayed = sum(row["tensors"] for row in r["replay"])
    return {
        "passed": sum(c["passed"] is True for c in r["checks"]),
        "failed": sum(c["passed"] is False for c in r["checks"]),
        "undecided": sum(c["passed"] is None for c in r["checks"]),
        "checks": len(r["checks"]),
        "replayed": replayed,
        "replay_differing": sum(row["tensors_differing"] for row in r["replay"]),
        "finals": [{"name": n, "final": run["final"], "low": run["low"]} for n, run in r["runs"].items()],
    }


# --- plots ---


def _svg(fig: Any) -> str:
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg", bbox_inches="tight", metadata={"Date": None})
    plt.close(fig)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _pair(r: Results, low: bool) -> list[tuple[str, Results]]:
    """Returns (framework, run) for both frameworks in one precision."""
    return [(name.split(" ", 1)[0], run) for name, run in r["runs"].items() if run["low"] == low]


def _smooth(values: Any, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the centres, counted from step 0, and the means of a moving window."""
    values = np.asarray(values, float)
    window = max(1, min(window, len(values)))
    means = np.convolve(values, np.ones(window) / window, mode="valid")
    return np.arange(len(means)) + (window - 1) / 2, means


def _losses(r: Results) -> str:
    fig, axes = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for ax, low in zip(axes, (False, True), strict=True):
        ax.set_title(r["recipe"]["name"] if low else "high precision (float32)")
        for i, (framework, run) in enumerate(_pair(r, low)):
            steps = len(run["losses"])
            style = {"color": _COLORS[i], "lw": 3.5 - 2 * i, "alpha": 0.55 if i == 0 else 1.0}
            ax.plot(*_smooth(run["losses"], max(1, steps // 40)), label=f"{framework}, training", **style)
            at = [int(k) for k in run["validation"]]
            marker = {"marker": "os"[i], "ms": 8 - 3 * i, "mfc": "white" if i == 0 else _COLORS[i]}
            values = list(run["validation"].values())
            ax.plot(at, values, ls="", color=_COLORS[i], label=f"{framework}, validation", **marker)
        entropy = r["entropy"]
        place = {
            "xycoords": ("axes fraction", "data"),
            "ha": "right",
            "va": "bottom",
            "fontsize": 9,
            "color": "#495057",
        }
        for y, text in ((entropy, "unigram entropy"), (0.8 * entropy, "0.8 × unigram entropy")):
            ax.axhline(y, color="#868e96", lw=1, ls=":")
            ax.annotate(f"{text} {y:.2f} ", (1, y), **place)
        ax.set_xlabel("step")
    top, losses = 1.3 * r["entropy"], np.concatenate([run["losses"] for run in r["runs"].values()])
    if np.mean(losses < top) > 0.5:  # most losses of a short run may lie above `top`
        axes[0].set_ylim(top=top)  # the plots share their y axis
    axes[0].set_ylabel("loss, nats per byte")
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside lower center", ncols=4)
    return _svg(fig)


def _differences(r: Results) -> str:
    fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    names = r["frameworks"]
    left.set_title(f"between frameworks: |{names[0]} − {names[1]}|")
    for low, color in ((False, "#868e96"), (True, _COLORS[2])):
        a, b = (np.asarray(run["losses"]) for _, run in _pair(r, low))
        gap = np.abs(a - b)
        steps = np.arange(len(gap))
        left.plot(steps[gap > 0], gap[gap > 0], ".", ms=2.5, color=color, alpha=0.4)
        at, mean = _smooth(gap, max(1, len(gap) // 20))
        name = r["recipe"]["name"] if low else "high precision"
        left.plot(at[mean > 0], mean[mean > 0], color=color, lw=2, label=name)
    left.set_yscale("log")
    left.set_ylabel("difference of training losses, nats")
    left.set_xlabel("step")
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "fontsize": 9.5}
    left.legend(ncols=2, **below)
    right.set_title(f"between precisions: {r['recipe']['name']} against high precision")
    for i, ((framework, high), (_, low_run)) in enumerate(zip(_pair(r, False), _pair(r, True), strict=True)):
        x, y = np.asarray(high["losses"]), np.asarray(low_run["losses"])
        at, mean = _smooth(100 * (y / x - 1), max(1, len(x) // 20))
        style = {"color": _COLORS[i], "lw": 3.5 - 2 * i, "alpha": 0.55 if i == 0 else 1.0}
        right.plot(at, mean, label=f"{framework}, training", **style)
        steps = [int(k) for k in high["validation"]]
        off = [100 * (low_run["validation"][str(k)] / high["validation"][str(k)] - 1) for k in steps]
        marker = {"marker": "os"[i], "ms": 8 - 3 * i, "mfc": "white" if i == 0 else _COLORS[i]}
        right.plot(steps, off, ls="", color=_COLORS[i], label=f"{framework}, validation", **marker)
    allowed = 100 * r["recipe"]["tolerance"]
    label = f"allowed at the end: ±{allowed:g} %"
    right.axhspan(-allowed, allowed, color="#d3f9d8", alpha=0.6, lw=0, label=label)
    right.set_ylabel("difference of losses, %")
    right.set_xlabel("step")
    right.legend(ncols=2, **below)
    low_y, high_y = right.get_ylim()
    right.set_ylim(min(low_y, -1.25 * allowed), max(high_y, 1.25 * allowed))
    return _svg(fig)


def _pairs_of_seeds(r: Results) -> str:
    """Returns a plot of every pair's difference with each framework's mean and interval, "" with a single seed."""
    if r["settings"]["seeds"] < 2:
        return ""
    fig, ax = plt.subplots(figsize=(11, 0.9 + 0.7 * len(r["pairs"])), layout="constrained")
    allowed = 100 * r["recipe"]["tolerance"]
    ax.axvspan(-allowed, allowed, color="#d3f9d8", alpha=0.6, lw=0)
    ax.axvline(0, color="#868e96", lw=1, ls=":")
    for i, pairs in enumerate(r["pairs"].values()):
        low, high = (100 * bound for bound in pairs["interval"])
        ax.plot([low, high], [i, i], color=_COLORS[i], lw=9, alpha=0.3, solid_capstyle="butt")
        ax.plot([100 * pairs["mean"]] * 2, [i - 0.3, i + 0.3], color=_COLORS[i], lw=2.5)
        ax.plot(
            [100 * d for d in pairs["differences"]], [i] * len(pairs["seeds"]), "o", color=_COLORS[i], ms=5, mfc="white"
        )
    ax.set_yticks(range(len(r["pairs"])), list(r["pairs"]))
    ax.set_ylim(len(r["pairs"]) - 0.4, -0.6)
    reach = 1.15 * max(abs(x) for x in (*ax.get_xlim(), 1.1 * allowed))
    ax.set_xlim(-reach, reach)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("difference of final validation losses from high precision, %")
    return _svg(fig)


def _drift(r: Results) -> str:
    """Returns a plot of the relative distance between the activations of both trajectories, in forward order, with one
    line for each traced step."""
    fig, ax = plt.subplots(figsize=(11, 4.0), layout="constrained")
    rows = r["drift"][0]["activations"]
    nonzero = [v["relative"] for d in r["drift"] for v in d["activations"] if v["relative"] > 0]
    floor = 10.0 ** (math.floor(math.log10(min(nonzero, default=1e-8))) - 1)
    x = np.arange(len(rows))
    shades = plt.get_cmap("viridis")(np.linspace(0.15, 0.8, len(r["drift"])))
    for step, (trace, color) in enumerate(zip(r["drift"], shades, strict=True)):
        y = np.array([v["relative"] for v in trace["activations"]])
        ax.plot(x, np.maximum(y, floor), "-o", color=color, ms=3.5, lw=1.3, label=f"step {step}")
    ax.set_yscale("log")
    ax.set_ylim(floor / 2, None)
    ax.axhline(floor, color="#2b8a3e", lw=1, ls=":")
    place = {"xycoords": ("axes fraction", "data"), "va": "bottom", "ha": "right", "fontsize": 9, "color": "#2b8a3e"}
    ax.annotate("same bits ", (1, floor), **place)
    blocks = [
        [i for i, v in enumerate(rows) if f"{v['name']}.".startswith(f"blocks.{b}.")]
        for b in range(r["model"]["layers"])
    ]
    ax.set_xticks([(b[0] + b[-1]) / 2 for b in blocks], [f"block {i}" for i in range(len(blocks))])
    for edge in (blocks[0][0], *(b[-1] + 1 for b in blocks)):
        ax.axvline(edge - 0.5, color="#ced4da", lw=1)
    ax.set_xlim(-0.5, len(rows) - 0.5)
    ax.grid(axis="x", visible=False)
    ax.set_xlabel("activations in forward order, from the embedding on the left to the loss on the right")
    ax.set_ylabel("relative distance ‖a − b‖ / ‖a‖")
    fig.legend(loc="outside lower center", ncols=min(8, len(shades)))
    return _svg(fig)


def _scales(r: Results) -> str:
    """Returns a plot of delayed scales over the run, with the median and range over all layers for each kind of tensor;
    "" without delayed scales."""
    runs = [(framework, run["scales"]) for framework, run in _pair(r, True) if run["scales"]]
    if not runs:
        return ""
    slots = list(dict.fromkeys(name.split(".", 3)[3] for name in next(iter(runs[0][1].values()))))
    fig, axes = plt.subplots(1, len(slots), figsize=(11, 3.6), layout="constrained", squeeze=False)
    for ax, slot in zip(axes[0], slots, strict=True):
        for i, (framework, scales) in enumerate(runs):
            at = [int(k) for k in scales]
            of = [[v for name, v in held.items() if name.split(".", 3)[3] == slot] for held in scales.values()]
            low, middle, high = np.array([(min(v), float(np.median(v)), max(v)) for v in of]).T
            ax.fill_between(at, low, high, color=_COLORS[i], alpha=0.12, lw=0)
            style = {"color": _COLORS[i], "lw": 3.5 - 2 * i, "alpha": 0.55 if i == 0 else 1.0}
            ax.plot(at, middle, label=framework, **style)
        ax.set_title(slot.replace("_", " "))
        ax.set_yscale("log", base=2)
        ax.set_xlabel("step")
    axes[0][0].set_ylabel("scale: median and range over the linears")
    axes[0][0].legend()
    return _svg(fig)
