"""Writes docs/pictures/report.png, README's picture of a report: `python docs/site/pictures.py runs/demo/report.html`.

`diptych compare --steps 200 --eval-every 25` made the report that the picture shows. Chromium takes it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

PICTURE = Path(__file__).parents[1] / "pictures" / "report.png"
WIDTH, HEIGHT = 1100, 1356


def main(report: str) -> int:
    browser = next((found for name in ("chromium", "google-chrome") if (found := shutil.which(name))), None)
    if browser is None:
        print("pictures: neither chromium nor google-chrome is on the PATH", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--virtual-time-budget=4000",
             f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}", Path(report).resolve().as_uri()],
            check=True, capture_output=True,
        )  # fmt: skip
        picture = Image.open(shot).convert("RGB").quantize(64)
    PICTURE.parent.mkdir(exist_ok=True)
    picture.save(PICTURE, optimize=True)
    print(f"{PICTURE}: {PICTURE.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]) if len(sys.argv) == 2 else "usage: pictures.py REPORT.html")
