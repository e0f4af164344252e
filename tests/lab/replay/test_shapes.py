"""Results have the shape that operands lead to; what would need more memory than a trace's tensors is refused."""

import numpy as np
import pytest
from op_tools import op

from diptych.lab.replay.op import ReplayError
from diptych.lab.replay.shapes import _ROWS, require_shape
from diptych.lab.replay.table import TABLE

CONV = {"strides": (1, 2), "padding": ((0, 1), (2, 2)), "dilation": (2, 1), "input_dilation": (1, 3), "groups": 1}


def of(*shape):
    return np.ones(shape, np.float32)


def test_every_row_of_the_frameworks_has_a_shape():
    assert set(_ROWS) == {name for name, row in TABLE.items() if not row.own}


MADE = [
    ("linear", {"x": of(2, 3, 5), "weight": of(7, 5)}, (2, 3, 7), {"dtype": "float32"}),
    ("matmul", {"a": of(4, 2, 3), "b": of(4, 3)}, (2, 4), {"dtype": "float32", "equation": "abc,ac->ba"}),
    ("embedding", {"ids": np.ones((2, 3), np.int64), "table": of(5, 4)}, (2, 3, 4), {}),
    ("conv", {"x": of(2, 9, 4, 3), "weight": of(5, 3, 2, 2)}, (8, 2, 5, 7), CONV | {"layout": "N01C,OI01,0NC1"}),
    ("softmax", {"x": of(2, 3)}, (2, 3), {"axis": -1}),
    ("add", {"a": of(2, 1, 3), "b": of(4, 1)}, (2, 4, 3), {}),
    ("rotary", {"x": of(2, 4, 8), "cos": of(4, 8), "sin": of(4, 8)}, (2, 4, 8), {"interleaved": False}),
    *[
        (
            "cross_entropy", {"logits": of(6, 5), "targets": np.ones(6, np.int64)}, shape,
            {"axis": -1, "reduction": how, "ignore_index": None},
        )
        for how, shape in (("none", (6,)), ("sum", ()), ("mean", ()))
    ],
]  # fmt: skip


@pytest.mark.parametrize(("kind", "inputs", "shape", "options"), MADE)
def test_shapes(kind, inputs, shape, options):
    from diptych.lab.torch.adapter import frontend

    made = op(kind, inputs, of(*shape), **options)
    require_shape(made)
    assert frontend.replay(made, "cpu")["out"].data.shape == shape
    with pytest.raises(ReplayError, match=r"the recorded result has shape \[.*, but its operands lead to \["):
        require_shape(op(kind, inputs, of(*shape, 1), **options))


@pytest.mark.parametrize(
    ("kind", "inputs", "options"),
    [
        ("add", {"a": of(60_000, 1), "b": of(1, 60_000)}, {}),
        ("matmul", {"a": of(60_000), "b": of(60_000)}, {"dtype": "float32", "equation": "a,b->ab"}),
        ("conv", MADE[3][1], MADE[3][3] | {"padding": ((0, 2**30), (0, 0)), "strides": (2**30, 1)}),
        ("conv", MADE[3][1], MADE[3][3] | {"dilation": (2**31 - 1, 1)}),
        ("conv", MADE[3][1], MADE[3][3] | {"input_dilation": (2**31 - 1, 1), "padding": ((-(2**33), 9), (0, 0))}),
    ],
)
def test_large_results_are_refused_before_they_are_computed(kind, inputs, options):
    with pytest.raises(ReplayError, match=r"lead to|more than 268435456 elements"):
        require_shape(op(kind, inputs, of(2, 3), **options))


def test_axes_of_one_letter_must_agree():
    made = op("matmul", {"a": of(2, 3), "b": of(4, 5)}, of(2, 5), equation="ab,bc->ac", dtype="float32")
    with pytest.raises(ReplayError, match="axes b have 3 and 4 elements"):
        require_shape(made)


@pytest.mark.parametrize(("ignored", "wrong"), [(None, 3), (-100, 2), (-1, 2)])
def test_targets_must_be_classes(ignored, wrong):
    options = {"axis": 1, "reduction": "none", "ignore_index": ignored}
    right, targets = np.array([[0, 4], [3, 0], [2, 1]], np.uint8), np.array([[0, -100], [5, -1], [2, 1]])
    require_shape(op("cross_entropy", {"logits": of(3, 5, 2), "targets": right}, of(3, 2), **options))
    made = op("cross_entropy", {"logits": of(3, 5, 2), "targets": targets}, of(3, 2), **options)
    with pytest.raises(ReplayError, match=f"{wrong} targets are no classes from 0 to 4, the first is (-100|5)"):
        require_shape(made)


@pytest.mark.parametrize("wrong", [5, -1])
def test_ids_must_be_rows_of_the_table(wrong):
    ids = np.array([[0, 4], [wrong, 1]])
    made = op("embedding", {"ids": ids, "table": of(5, 4)}, of(2, 2, 4))
    with pytest.raises(ReplayError, match=f"1 ids are no rows of the table from 0 to 4, the first is {wrong}; framew"):
        require_shape(made)
    ids[1, 0] = 3
    require_shape(made)
