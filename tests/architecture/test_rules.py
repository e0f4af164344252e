"""Checks the project by the rules of its architecture, and that the rules find planted violations."""

import shutil
from pathlib import Path

import pytest

from architecture import rules

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("rule", rules.ALL, ids=lambda r: r.__name__)
def test_project_keeps(rule):
    assert rule(ROOT) == []


# rule, file to plant, its text
VIOLATIONS = [
    (rules.python_arrows, "torch_frontend/diptych/torch/x.py", "from diptych.jax import quantize\n"),
    (rules.python_arrows, "torch_frontend/diptych/torch/x.py", "from diptych import lab\n"),
    (rules.python_arrows, "torch_frontend/diptych/torch/lab/x.py", "from diptych.lab.torch import capture\n"),
    (rules.python_arrows, "jax_frontend/diptych/jax/lab.py", "from diptych.lab import job\n"),
    (rules.python_arrows, "lab/diptych/lab/x.py", "from diptych.lab import torch\n"),
    (rules.python_arrows, "lab/diptych/lab/replay/x.py", "import diptych.lab.jax.adapter\n"),
    (rules.python_arrows, "lab/diptych/lab/torch/x.py", "import jax\n"),
    (rules.python_arrows, "jax_frontend/diptych/jax/x.py", "import torch\n"),
    (rules.python_arrows, "common/diptych/common/x.py", "import numpy\n"),
    (rules.python_arrows, "core_cuda/diptych/core/x.py", "from . import _core\n"),
    (rules.namespace, "common/diptych/__init__.py", ""),
    (rules.cpp_arrows, "core_cuda/cpu/x.cpp", '#include "cuda/kernels.h"\n'),
    (rules.cpp_arrows, "core_cuda/cuda/x.cuh", '#include "diptych/ops.h"\n'),
    (rules.cpp_arrows, "core_cuda/src/x.cpp", '#include "cpu/kernels.h"\n'),
    (rules.cpp_arrows, "core_cuda/include/diptych/x.h", '#include "src/registry.h"\n'),
    (rules.file_sizes, "tests/x.py", "a = 1\n" * (rules.MAX_LINES + 1)),
    (rules.format_names, "torch_frontend/diptych/torch/x.py", 'if fmt.name == "mxfp8_e4m3": ...\n'),
    (rules.kernels_named_once, "core_cuda/src/x.cpp", "void f() { cpu::gemm(a, e); }\n"),
    (rules.remembered_nowhere, "torch_frontend/diptych/torch/modules/x.py", "def f(m, r):\n    m._last_region = r\n"),
    *(
        (rules.private_names, f"torch_frontend/diptych/torch/{path}.py", text)
        for path, text in (
            ("x", "import torch\n\ntorch.ops.aten._to_copy\n"),
            ("state/x", "import torch.utils._pytree as tree\n"),
            ("layers/x", "def f():\n    from torch.distributed.tensor.placement_types import _StridedShard\n"),
            ("graph/x", "from torch import _C as c\n\nasked = c\nasked.is_tracing()\n"),
            ("modules/x", "def f(param):\n    param._unsharded_param = None\n"),
            ("tensors/x", 'def f(state):\n    return getattr(state, "_fsdp_param_group", None)\n'),
            ("primitives/x", 'WHERE = "torch._dynamo.eval_frame"\n'),
        )
    ),
    (rules.docstring_subjects, "lab/diptych/lab/x.py", '"""What a file is."""\n'),
    (rules.docstring_subjects, "common/diptych/common/x.py", 'class X:\n    """Of: a class."""\n'),
    (rules.docstring_subjects, "tests/x.py", 'X = 1\n"""Of a constant."""\n'),
    (rules.private_names, "jax_frontend/diptych/jax/state/x.py", "from jax._src import core\n"),
    (rules.private_names, "lab/diptych/lab/torch/x.py", "import torch\n\ntorch._C.DisableTorchFunction()\n"),
    (rules.mirrored, "torch_frontend/diptych/torch/x.py", ""),
    (rules.mirrored, "jax_frontend/diptych/jax/state/autocast.py", ""),
    (rules.mirrored, "lab/diptych/lab/torch/x.py", ""),
    (rules.tests_mirrored, "tests/torch_frontend/test_x.py", ""),
    (rules.tests_mirrored, "tests/lab/in_jax/test_x.py", ""),
    (rules.tests_mirrored, "tests/jax_frontend/modules/test_linear.py", ""),
    (rules.tests_mirrored, "tests/jax_frontend/layers/test_x_linear.py", ""),
    (rules.room_arrows, "torch_frontend/diptych/torch/tensors/x.py", "from diptych.torch.layers import linear\n"),
    (rules.room_arrows, "torch_frontend/diptych/torch/x.py", "from diptych.torch import lab\n"),
    (rules.common_arrows, "common/diptych/common/ops/x.py", "from diptych.common.recipes import Recipe\n"),
    (rules.common_arrows, "common/diptych/common/x.py", "from diptych.common.ops import shapes\n"),
    (rules.room_arrows, "jax_frontend/diptych/jax/layers/x.py", "from diptych.jax import quantize\n"),
    (rules.import_circles, "jax_frontend/diptych/jax/layers/x.py", "from diptych.jax.layers import x\n"),
    (rules.import_circles, "lab/diptych/lab/data.py", "def f():\n    from diptych.lab import train\n"),
]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the project's files, to which each test adds one and removes it again."""
    root = tmp_path_factory.mktemp("project")
    for folder in rules.CODE_FOLDERS:
        if (ROOT / folder).exists():
            shutil.copytree(ROOT / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    return root


@pytest.mark.parametrize(
    "rule, path, text", VIOLATIONS, ids=[f"{r.__name__}-{i}" for i, (r, _, _) in enumerate(VIOLATIONS)]
)
def test_rule_catches(rule, path, text, copy):
    planted, before = copy / path, rule(copy)
    was = planted.read_text() if planted.exists() else None
    planted.parent.mkdir(exist_ok=True)
    planted.write_text(text)
    try:
        assert [v for v in rule(copy) if v not in before], f"{rule.__name__} did not see {path}"
    finally:
        planted.write_text(was) if was is not None else planted.unlink()
