"""Benchmarks of the project beside ceilings and peers: `python -m benchmarks --help`. Its parts:

- `cases.py`: everything that is measured, and the goals; `sources.py`: which sources a section's rows depend on.
- `room.py`: how GPU calls are timed and checked; `ranks.py`: how those of several GPUs are.
- `sections/`: one file for each section; `peers/`: one for each peer.
- `quality.py`, `quality.md`: how recipes train, which `python -m benchmarks.quality` measures: docs/quality.md.
- `results.py`: the JSON; `render.py`, `plots.py`, `page.md`: docs/performance.md from it.
"""
