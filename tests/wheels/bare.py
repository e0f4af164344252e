"""Installs each wheel of a folder in environments without a compiler and with one framework, and runs `check.py` there:
`python tests/wheels/bare.py dist`.

torch is tried with this script's Python alone, unless a second argument is `all`: for others pip may take a torch that
needs gigabytes of CUDA's libraries. A wheel whose Python is not on this machine, and a framework that has no package
for a Python here, are named.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "core_cuda/wheels"))
from build import GLIBC, MOST_BYTES, PLATFORM, find_python  # noqa: E402

PACKAGES = {"numpy": ["numpy"], "torch": ["numpy", "torch==2.13.0"], "jax": ["numpy", "jax==0.10.2", "jaxlib==0.10.2"]}
ALLOWED = re.compile(r"libdiptych(_jax)?|lib(c|m|dl|rt|pthread|gcc_s)|ld-linux-x86-64")


def check_file(wheel: Path) -> None:
    """Demands the name, the size, and that no library needs another one than glibc's and libgcc_s."""
    assert wheel.name.endswith(f"{PLATFORM}.whl"), wheel.name
    assert wheel.stat().st_size <= MOST_BYTES, wheel
    with tempfile.TemporaryDirectory() as folder:
        shutil.unpack_archive(wheel, folder, "zip")
        libraries = list(Path(folder).rglob("*.so"))
        assert len(libraries) == 3, libraries
        for library in libraries:
            dump = subprocess.run(["objdump", "-p", library], capture_output=True, text=True, check=True).stdout
            for needed in re.findall(r"NEEDED +(\S+)", dump):
                assert ALLOWED.fullmatch(needed.partition(".so")[0]), f"{library.name} needs {needed}"
            for symbol in re.findall(r"GLIBC_([\d.]+)", dump):
                assert tuple(map(int, symbol.split("."))) <= tuple(map(int, GLIBC.split("."))), f"{library}: {symbol}"


def run(wheel: Path, python: Path, framework: str) -> bool:
    """Returns whether the check ran; False if a package does not exist for this Python here."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        home = Path(folder) / "bin"
        env = {**os.environ, "PATH": str(home), "JAX_PLATFORMS": "cpu", "PYTHONNOUSERSITE": "1"}
        env.pop("PYTHONPATH", None)
        install = [home / "python", "-m", "pip", "install", "-q", *PACKAGES[framework]]
        done = subprocess.run(install, capture_output=True, text=True, env=env)
        if done.returncode:
            print(f"not run: {framework} on {python}: {done.stderr.strip().splitlines()[-1]}")
            return False
        subprocess.run([home / "python", "-m", "pip", "install", "-q", "--no-deps", wheel], check=True, env=env)
        subprocess.run([home / "python", ROOT / "tests/wheels/check.py", framework], check=True, env=env, cwd=folder)
    return True


def main(folder: str, which: str = "") -> int:
    wheels = sorted(Path(folder).glob("*.whl"))
    assert wheels, f"no wheel is in {folder}; `make wheels` builds them"
    ran = 0
    for wheel in wheels:
        check_file(wheel)
        (tag,) = re.findall(r"-cp3(\d+)-cp", wheel.name)
        python = find_python(f"3.{tag}")
        if python is None:
            print(f"not run: {wheel.name}: CPython 3.{tag} is not on this machine")
            continue
        own = tag == str(sys.version_info.minor)
        ran += sum(run(wheel, python, framework) for framework in PACKAGES if framework != "torch" or own or which)
        if not (own or which):
            print(f"not run: torch with {wheel.name}; `all` tries it")
    print(f"{len(wheels)} wheels, {ran} environments")
    return 0 if ran else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
