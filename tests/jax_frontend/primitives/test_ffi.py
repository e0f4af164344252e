"""Loading and registration of handlers, refused versions, and imports that start no backend."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest

import diptych.jax as dj
from diptych import core
from diptych.jax.primitives import ffi
from jax_frontend import tools


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def fresh_load():
    """`ffi.load` without its cache, before and after."""
    ffi.load.cache_clear()
    yield ffi.load
    ffi.load.cache_clear()


def test_header_version():
    headers = ffi.load()
    assert dj.header_version() == headers.jaxlib and headers.ffi <= ffi.runtime_ffi_version()
    assert headers.library == str(ffi.library_path()) and ffi.library_path().exists()


def test_a_build_without_jax_says_what_to_do(fresh_load, monkeypatch, tmp_path):
    monkeypatch.setattr(ffi, "library_path", lambda: tmp_path / "libdiptych_jax.so")
    with pytest.raises(ImportError, match="DIPTYCH_JAX"):
        fresh_load()


def test_headers_newer_than_the_runtime_are_refused_before_they_break_it(fresh_load, monkeypatch):
    monkeypatch.setattr(ffi, "runtime_ffi_version", lambda: (0, 0))
    monkeypatch.setattr(jax.ffi, "register_ffi_target", lambda *a, **k: pytest.fail("was registered"))
    with pytest.raises(ImportError, match=r"compiled with the headers of jaxlib .* takes up to 0\.0"):
        fresh_load()


def test_another_version_of_the_attributes_is_refused(fresh_load, monkeypatch):
    monkeypatch.setattr(ffi, "ATTRIBUTES_VERSION", 1)
    with pytest.raises(ImportError, match="two builds"):
        fresh_load()


def test_a_handler_refuses_attributes_of_another_version(monkeypatch):
    monkeypatch.setattr(ffi, "ATTRIBUTES_VERSION", 7)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"INVALID_ARGUMENT.*version 7"):
        jax.jit(lambda x: dj.amax(x) + 0)(np.ones((3, 5), np.float32))


def test_core_and_handlers_share_one_library():
    """Hence one kernel table: its counts see the calls of both."""
    dj.amax(np.ones(3, np.float32))
    if sys.platform == "linux":
        maps = pathlib.Path("/proc/self/maps").read_text().splitlines()
        found = {line.split()[-1] for line in maps if line.endswith("/libdiptych.so")}
        assert len(found) == 1, found
    before = tools.calls("amax")
    dj.amax(np.ones(3, np.float32)).block_until_ready()
    core.amax(np.ones(3, np.float32))
    assert tools.calls("amax") == before + 2


def test_importing_starts_no_backend_and_loads_no_cuda():
    """Beyond those that JAX's own registration of a CUDA target brings: on GPU machines its plugin loads libraries."""
    loaded = (
        "import ctypes, jax, jax._src.xla_bridge as b; f = jax.ffi.pycapsule(ctypes.CDLL(None).getpid)\n"
        "jax.ffi.register_ffi_target('never_called', f, platform='CUDA')\n"
        "def cuda(): return {l.split()[-1] for l in open('/proc/self/maps') if 'libcuda' in l or 'cublas' in l}\n"
    )
    out = run(loaded + "before = cuda(); import diptych.jax; print(len(b._backends), cuda() - before)")
    assert out.strip() == "0 set()"


def test_importing_is_quick(tmp_path, monkeypatch):
    """It takes at most two fifths of the processor time that jax takes, on any machine, once bytecode is written."""
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    clock = "import time; clock = time.process_time; start = clock()\n"
    code = clock + "import jax, numpy; after = clock(); import diptych.jax; print((clock() - after) / (after - start))"
    run(code)  # writes the bytecode
    assert any(float(run(code)) < 0.4 for _ in range(4))


def test_torch_is_not_imported():
    assert run("import sys, diptych.jax; print('torch' in sys.modules)").strip() == "False"


def test_batch_axes():
    batch = ffi.Batch.none(2).outer([True, False]).outer([True, True]).outer([False, True])
    assert batch == (3, (0b011, 0b110))
    assert ffi.amax_attributes(batch, 0, False)["axes"] == 0b011 | 0b110 << 8
    for _ in range(5):
        batch = batch.outer([True, True])
    with pytest.raises(NotImplementedError, match="8 nested vmaps"):
        batch.outer([True, True])
