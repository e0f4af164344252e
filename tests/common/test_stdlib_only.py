"""diptych.common needs Python and nothing else."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import diptych.common
from diptych.common import errors

SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
before = set(sys.modules)
import diptych.common
from diptych.common import RECIPES, QuantizerRole
from diptych.common.ops import shapes
for recipe in RECIPES.values():
    quantizer = recipe.quantizer(QuantizerRole(tensor="weight"))
    shapes.quantize_buffers((4, 128), quantizer)
    recipe.fingerprint, recipe.__fx_repr__()
print(json.dumps(sorted({name.split(".")[0] for name in set(sys.modules) - before})))
print(json.dumps(sorted(name for name in sys.modules if name.startswith("diptych"))))
"""


def test_import_loads_no_third_party_module():
    """Isolated (-I) and without site-packages (-S): a hidden dependency would fail to import."""
    parent = Path(diptych.common.__file__).resolve().parents[2]
    out = subprocess.run(
        [sys.executable, "-S", "-I", "-c", SCRIPT, str(parent)], capture_output=True, text=True, cwd="/"
    )
    assert out.returncode == 0, out.stderr
    loaded, ours = (json.loads(line) for line in out.stdout.splitlines())
    assert set(loaded) - set(sys.stdlib_module_names) == {"diptych"}, loaded
    assert all(name == "diptych" or name.startswith("diptych.common") for name in ours), ours


def test_all_is_complete():
    names = diptych.common.__all__
    assert len(set(names)) == len(names) and all(hasattr(diptych.common, name) for name in names)


def test_errors_are_the_built_ins_that_callers_catch():
    assert issubclass(errors.ShapeError, ValueError) and issubclass(errors.DTypeError, TypeError)
    assert issubclass(errors.DeviceError, ValueError) and issubclass(errors.CheckpointError, ValueError)
    assert issubclass(errors.RankMismatchError, ValueError)
    assert issubclass(errors.UnsupportedError, NotImplementedError)
    assert issubclass(errors.EmulationWarning, UserWarning)
