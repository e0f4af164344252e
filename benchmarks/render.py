"""Writes docs/performance.md and its plots from the rows of the present kernels; `page.md` holds the text around them.

A row is shown if its hash is that of the section's sources now. What is absent is named, with the command that
measures it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import results
from benchmarks.cases import GOALS, SECTIONS, Case, Goal, cases_of
from benchmarks.results import Row
from benchmarks.sources import ROOT, digest
from diptych.common import RECIPES

DOCS = ROOT / "docs"
PAGE, TEXT = DOCS / "performance.md", Path(__file__).parent / "page.md"
FOLDERS = {"cuda": "h200", "gpus": "h200-x2", "cpu": "cpu"}  # of results


class Shown:
    """The rows to show, by section."""

    def __init__(self, folder: Path = results.FOLDER, root: Path = ROOT) -> None:
        self.rows: dict[str, list[Row]] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        for section in SECTIONS.values():
            held = results.load(folder / FOLDERS[section.device]).get(section.name)
            if held is None:
                continue
            now = digest(section, root)
            if rows := [r for r in held["rows"] if r.get("sources") == now]:
                self.rows[section.name] = rows
                self.runs[section.name] = held

    def find(self, section: str, case: Case | str) -> dict[str, Row]:
        """Returns the measured rows of a case by name."""
        return {r["name"]: r for r in self.rows.get(section, ()) if r["case"] == str(case) and "failed" not in r}


def number(value: float) -> str:
    """Returns three digits, without an exponent."""
    if abs(value) >= 100:
        return str(int(float(f"{value:.3g}")))
    return f"{value:.2f}" if abs(value) < 10 else f"{value:.1f}"


def grid(heads: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    body = [heads, ["---"] * len(heads), *[list(line) for line in lines]]
    return "\n".join(f"| {' | '.join(line)} |" for line in body)


class Page:
    """The functions that the template `page.md` calls to show rows."""

    def __init__(self, shown: Shown) -> None:
        self.shown = shown

    def has(self, section: str) -> bool:
        return section in self.shown.rows

    def missing(self, section: str) -> str:
        device = " --device cpu" if SECTIONS[section].device == "cpu" else ""
        return f"Nothing here was measured with the present sources: `python -m benchmarks{device} --only {section}`."

    def source(self, section: str) -> str:
        """Says how and where a section was measured, and what failed."""
        held = self.shown.runs[section]
        env = held["environment"]
        device = " --device cpu" if SECTIONS[section].device == "cpu" else ""
        said = f"`python -m benchmarks{device} --only {section}` at {env['commit']}"
        failed = [r for r in self.shown.rows[section] if "failed" in r]
        if failed:
            names = "; ".join(f"{r['case']} {r['name']}".strip() for r in failed[:6])
            more = f" and {len(failed) - 6} more" if len(failed) > 6 else ""
            said += f". Without figures, for the reasons in the file: {names}{more}"
        return said + "."

    def machine(self, device: str) -> str:
        """Describes the machines and versions of the device's rows."""
        found = {}
        for name, held in self.shown.runs.items():
            if SECTIONS[name].device == device:
                env = held["environment"]
                versions = ", ".join(f"{k} {v}" for k, v in env["versions"].items() if k != "diptych")
                where = f"{env.get('gpus', '')} {env.get('gpu', env['machine'])}".strip() + (
                    f", CUDA {env['cuda']}" if "cuda" in env else ""
                )
                lt = f", cuBLASLt {env['cublaslt']}" if env.get("cublaslt") else ""
                found[f"{where}{lt}, Python {env['python']}, {versions}"] = None
        return "; ".join(found) or "nothing was measured with the present sources"

    def absent(self) -> str:
        """Names the peers that were not there, section by section."""
        said: dict[str, list[str]] = {}
        for name, held in self.shown.runs.items():
            for peer, reason in held.get("absent", {}).items():
                said.setdefault(f"{peer} ({reason})", []).append(name)
        return "; ".join(f"{peer}, in {', '.join(names)}" for peer, names in said.items()) or "none"

    def table(
        self, section: str, whats: str | list[str], names: list[str], *, of: str = "",
        value: str = "rate", scale: float = 1.0, heads: dict[str, str] | None = None,
    ) -> str:  # fmt: skip
        """Returns a table with a line for each case and a column for each name.

        **Arguments:** `of`: shows speeds as multiples of this name's, which stands beside them as it is. `value`: the
        field shown otherwise. `heads`: other heads of columns.
        """
        whats = [whats] if isinstance(whats, str) else whats
        lines = []
        for case in cases_of(section):
            rows = self.shown.find(section, case) if case.what in whats else {}
            cells = []
            for name in names:
                row = rows.get(name)
                if row is None or (of and of not in rows):
                    cells.append("–")
                elif of and name != of:
                    cells.append(number(rows[of]["us"] / row["us"]))
                else:
                    cells.append(number(row[value] * scale) if value in row else "–")
            if any(cell != "–" for cell in cells):
                shape = " × ".join(map(str, case.shape))
                lines.append([f"{case.what}, {shape}" if len(whats) > 1 else shape or case.what, *cells])
        return grid(["", *((heads or {}).get(name, name) for name in names)], lines) if lines else "(no rows)"

    def lines(self, section: str, case: str, fields: dict[str, str], of: str = "") -> str:
        """Returns a table with a line for each name of one case. `fields`: from a head to a field of the row. `of`:
        adds the speed as a multiple of this name's."""
        rows = self.shown.find(section, case)
        body = [[name, *(number(r[f]) if f in r else "–" for f in fields.values())] for name, r in rows.items()]
        if of in rows:
            for line in body:
                line.append(number(rows[of]["us"] / rows[line[0]]["us"]))
        return grid(["", *fields, *([f"of {of}"] if of in rows else [])], body)

    def multiples(self, section: str, whats: list[str], of: str, unit: str = "us") -> str:
        """Returns a table with a line for each name: the field `unit` of each case, and its multiple of `of`'s."""
        cases = [c for c in cases_of(section) if c.what in whats]
        found = [self.shown.find(section, c) for c in cases]
        names = list(dict.fromkeys(name for rows in found for name in rows))
        heads = [head for c in cases for head in (f"{c.what}, µs", f"of {of}")]
        body = []
        for name in names:
            cells = []
            for rows in found:
                there = name in rows and of in rows
                cells.append(number(rows[name][unit]) if name in rows else "–")
                cells.append(number(rows[name][unit] / rows[of][unit]) if there and name != of else "")
            body.append([name, *cells])
        return grid(["", *heads], body)

    def ratios(self, section: str) -> str:
        """Returns the range over its rows of each part of a CPU section: speeds over the peer's."""
        found: dict[str, list[Row]] = {}
        for row in self.shown.rows[section]:
            if "peer" in row:
                found.setdefault(f"{row['case']}, beside {row['peer']}", []).append(row)
        body = []
        for part, rows in found.items():
            speeds = [r["peer us"] / r["us"] for r in rows]
            body.append([part, f"{number(min(speeds))} to {number(max(speeds))}",
                         f"{number(min(r['us'] - r['peer us'] for r in rows))} µs",
                         f"{number(max(r['us'] - r['peer us'] for r in rows))} µs"])  # fmt: skip
        return grid(["", "speed, of the peer's", "least more", "most more"], body)

    def goals(self, *sections: str) -> str:
        """Returns the goals whose rows are shown: the figure, and whether it is what must be."""
        body = []
        for goal in GOALS:
            found = measured(self.shown, goal)
            if goal.section in sections and found is not None:
                shown = round(found, 2)  # as printed
                better = shown <= goal.must if goal.less else shown >= goal.must
                bound = "≤" if goal.less else "≥"
                body.append([goal.title, f"{bound} {number(goal.must)}", f"{bound} {number(goal.aim)}", number(found),
                             "" if better else "short"])  # fmt: skip
        if not body:
            return ""
        return grid(["goal", "must", "aim", "measured", ""], body)

    def plot(self, section: str, title: str) -> str:
        """Draws the roofline of a section's products of a forward pass, and returns the line that shows it."""
        from benchmarks import plots

        rows = [
            r for r in self.shown.rows.get(section, ()) if r.get("unit") == "TFLOP/s" and r["case"].startswith("fprop")
        ]
        copies = [r["rate"] for s in ("quantize", "fused", "permute") for r in self.shown.rows.get(s, ())
                  if r["name"] == "copy" and "rate" in r]  # fmt: skip
        if not rows:
            return ""
        path = DOCS / "plots" / f"{section}.svg"
        plots.roofline(path, rows, max(copies, default=None), title)
        return f"![{title}](plots/{section}.svg)"


STACK, LAYER = "torch 4x4096x4096", "512x1024 by 1024x1024"  # what the plot of speeds shows


def speeds(shown: Shown) -> tuple[dict[str, float], str, str] | None:
    """Returns the speeds that README shows, their peer, and a title: of the Llama-shaped blocks on a GPU; where these
    have no rows, of a layer's forward on the CPU; None without both."""
    found = {r["name"].removesuffix(" fused"): r["us"] for r in shown.rows.get("llama", ())
             if r["case"] == STACK and "us" in r}  # fmt: skip
    section, peer, said = "llama", "bfloat16", "Four Llama-3-8B-shaped blocks, forward and backward"
    ratios = {name: found["bf16"] / us for name, us in found.items() if "bf16" in found}
    if not ratios:
        section, peer, said = "cpu", "float32", "Forward of a layer of 1024 x 1024 on 512 rows"
        ratios = {name.split()[0]: r["peer us"] / r["us"] for r in shown.rows.get("cpu", ())
                  if r["case"] == "linear" and (name := r["name"]).endswith(LAYER)}  # fmt: skip
    if not ratios:
        return None
    env = shown.runs[section]["environment"]
    where = env.get("gpu", f"{env['machine']} (no FP8 units)")
    title = f"{said}\n{where}, at {env['commit']}"
    return {name: ratios[name] for name in RECIPES if name in ratios}, peer, title


def measured(shown: Shown, goal: Goal) -> float | None:
    """Returns the figure that a goal bounds; None if a case that counts has no rows."""
    ratios = []
    for case in cases_of(goal.section):
        if case.what in goal.what and (not goal.shapes or case.shape in goal.shapes):
            rows = shown.find(goal.section, case)
            if goal.name in rows and goal.of in rows:
                mine, its = rows[goal.name], rows[goal.of]
                if goal.of == "copy":
                    ratios.append(mine["rate"] / its["rate"])
                else:
                    ratios.append(mine[goal.less] / its[goal.less] if goal.less else its["us"] / mine["us"])
    if not ratios:
        return None
    return statistics.geometric_mean(ratios) if goal.mean else max(ratios) if goal.less else min(ratios)


def rendered(shown: Shown) -> str:
    import jinja2

    text = TEXT.read_text()
    env = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    page = env.from_string(text).render(page=Page(shown))
    while "\n\n\n" in page:
        page = page.replace("\n\n\n", "\n\n")
    return page.strip() + "\n"


def main(check: bool) -> int:
    shown = Shown()
    page = rendered(shown)
    if check:
        if page != PAGE.read_text():
            print("docs/performance.md is not what `python -m benchmarks render` writes", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(page)
    if found := speeds(shown):
        from benchmarks import plots

        plots.bars(DOCS / "plots" / "speed.svg", *found)
    for section in SECTIONS.values():
        if section.name not in shown.rows and section.default:
            print(Page(shown).missing(section.name))
    return 0
