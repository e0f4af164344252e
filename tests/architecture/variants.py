"""Builds the core from patched copies of the sources, CPU only, and runs checks against them in separate processes.

One copy, with added rows in its format table, is configured and built once per test run with the project's own CMake
file. A mutant recompiles only the source it names, with the command that CMake recorded, and is linked to the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS, TORCH = ROOT / "tests", "torch_frontend/diptych/torch"
CHECK = Path(__file__).with_name("variant_check.py")
WRAPPER = """cmake_minimum_required(VERSION 3.25)
project(variant LANGUAGES CXX)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_BUILD_TYPE Release)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INTERPROCEDURAL_OPTIMIZATION OFF)
add_subdirectory(core_cuda)
target_compile_options(diptych PRIVATE -O1)
target_compile_options(_core PRIVATE -O0)
"""  # the last -O wins: IEEE results are the same at every level, and half of the compile time is spent above -O1


@dataclasses.dataclass(frozen=True)
class Patch:
    """One textual change. `old` must occur in the file exactly once, or the test that uses it is out of date."""

    path: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        file = root / self.path
        text = file.read_text()
        found = text.count(self.old)
        assert found == 1, f"{self.path} holds {self.old!r} {found} times, not once: update the patch"
        file.write_text(text.replace(self.old, self.new))


def missing() -> str:
    """Returns why variants cannot be built here, or an empty string."""
    for tool in ("cmake", "ninja"):
        if _tool(tool) is None:
            return f"variants of the core need {tool}"
    if not any(shutil.which(c) for c in (os.environ.get("CXX", "c++"), "c++", "g++")):
        return "variants of the core need a C++ compiler"
    return "" if importlib.util.find_spec("pybind11") else "variants of the core need pybind11"


def _tool(name: str) -> str | None:
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name)


def _run(command: list[str], cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


class Builder:
    """Builds variants below one folder, which xdist workers share; `patches` are part of every variant."""

    def __init__(self, folder: Path, *patches: Patch):
        self.folder, self.patches = folder, patches
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _once(self, name: str):
        """Yields the variant's folder, or None if it was built already; one worker at a time."""
        target = self.folder / name
        with (self.folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield None if (target / "ready").exists() else target
            (target / "ready").touch()

    def base(self) -> Path:
        """Returns the package with only the builder's patches."""
        with self._once("base") as target:
            if target:
                self._copy_sources(target)
                (target / "src/CMakeLists.txt").write_text(WRAPPER)
                options = ["-DDIPTYCH_CUDA=off", f"-DPython_EXECUTABLE={sys.executable}"]
                options.append(f"-Dpybind11_DIR={self._pybind11()}")
                cmake, ninja = _tool("cmake"), _tool("ninja")
                assert cmake and ninja
                configure = [cmake, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}", "-S", "src", "-B", "build"]
                _run([*configure, *options], target)
                _run([ninja, "-C", "build", "-j2"], target)
                self._package(target, target / "build/core_cuda/libdiptych.so", target / "build/core_cuda")
        return self.folder / "base/package"

    def mutant(self, name: str, source: str, patch: Patch) -> Path:
        """Returns a variant in which one translation unit differs from the base."""
        base = self.base().parent
        with self._once(name) as target:
            if target:
                self._copy_sources(target)
                patch.apply(target / "src")
                commands = json.loads((base / "build/compile_commands.json").read_text())
                (entry,) = [c for c in commands if c["file"].endswith(f"/core_cuda/{source}")]
                words = shlex.split(entry["command"].replace(str(base / "src"), str(target / "src")))
                built = target / "patched.o"
                old = words[words.index("-o") + 1]
                words[words.index("-o") + 1] = str(built)
                _run(words, target)
                objects = sorted((base / "build/core_cuda/CMakeFiles/diptych.dir").rglob("*.o"))
                rest = [str(o) for o in objects if not str(o).endswith(old)]
                assert len(rest) == len(objects) - 1, f"{old} is not among the base's objects"
                library = target / "libdiptych.so"
                flags = ["-shared", "-Wl,--exclude-libs,ALL", "-Wl,-Bsymbolic", "-Wl,-soname,libdiptych.so"]
                _run([words[0], *flags, *rest, str(built), "-o", str(library), "-pthread", "-ldl"], target)
                self._package(target, library, base / "build/core_cuda")
        return self.folder / name / "package"

    @staticmethod
    def _pybind11() -> str:
        import pybind11

        return pybind11.get_cmake_dir()

    def _copy_sources(self, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)
        ignore = shutil.ignore_patterns("__pycache__", "cuda", "*.so")
        shutil.copytree(ROOT / "core_cuda", target / "src/core_cuda", ignore=ignore)
        shutil.copytree(ROOT / "common/diptych/common", target / "src/common/diptych/common", ignore=ignore)
        shutil.copytree(ROOT / TORCH, target / "src" / TORCH, ignore=ignore)
        for patch in self.patches:
            patch.apply(target / "src")

    @staticmethod
    def _package(target: Path, library: Path, modules: Path) -> None:
        core = target / "package/diptych/core"
        shutil.copytree(target / "src/core_cuda/diptych/core", core)
        shutil.copytree(target / "src/common/diptych/common", target / "package/diptych/common")
        shutil.copytree(target / "src" / TORCH, target / "package/diptych/torch")
        (module,) = modules.glob("_core*.so")
        shutil.copy2(module, core)
        shutil.copy2(library, core / "libdiptych.so")  # where the module's $ORIGIN looks


def run(package: Path, *args: str) -> dict[str, Any]:
    """Runs variant_check.py against a package. Site hooks stay off (-S): an editable install would win otherwise."""
    folders = [package, TESTS] + [_home(name) for name in ("numpy", "ml_dtypes", "torch")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(str(f) for f in folders)}
    command = [sys.executable, "-S", str(CHECK), str(package), *args]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def _home(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin, f"{module} is not installed"
    return Path(spec.origin).parents[1]
