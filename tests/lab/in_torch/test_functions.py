"""Captures with ops="all": which functions of torch are recorded as which rows, with the same bits in a replay."""

import pytest
import torch
import torch.nn.functional as F

from diptych.lab.replay import table
from diptych.torch import lab
from in_torch.replayed import Runs, draw, recorded_of

X, V, B = draw(40, 48), draw(48), draw(2, 3, 40, 48)
XW = {"x": (40, 48), "weight": (48, 48)}
AB = {"a": (40, 48), "b": (48, 48)}

PRODUCTS = [
    (lambda w: F.linear(X, w), None, XW),
    (lambda w: F.linear(V, weight=w, bias=V), None, {"x": (48,), "weight": (48, 48), "bias": (48,)}),
    (lambda w: torch.addmm(V, X, w), None, XW | {"bias": (48,)}),
    (lambda w: V.addmm(X, w.T), None, XW | {"bias": (48,)}),
    (lambda w: X @ w, "mk,kn->mn", AB),
    (lambda w: X.mm(w), "mk,kn->mn", AB),
    (lambda w: torch.mm(input=X, mat2=w.T), "mk,nk->mn", AB),
    (lambda w: X.T.T @ w.t(), "mk,nk->mn", AB),
    (lambda w: torch.matmul(B, w), "abmk,kn->abmn", {"a": (2, 3, 40, 48), "b": (48, 48)}),
    (lambda w: B @ w.expand(1, 3, 48, 48), "abmk,cbkn->abmn", {"a": (2, 3, 40, 48), "b": (1, 3, 48, 48)}),
    (lambda w: B @ B.transpose(2, 3) * w[0, 0], "abmk,abnk->abmn", {"a": (2, 3, 40, 48), "b": (2, 3, 40, 48)}),
    (lambda w: torch.bmm(B[0], w.repeat(3, 1, 1)), "amk,akn->amn", {"a": (3, 40, 48), "b": (3, 48, 48)}),
    (lambda w: w @ V, "mk,k->m", {"a": (48, 48), "b": (48,)}),
    (lambda w: V @ w, "k,kn->n", {"a": (48,), "b": (48, 48)}),
    (lambda w: w[0] @ V, "k,k->", {"a": (48,), "b": (48,)}),
    (lambda w: w.__rmatmul__(X), "mk,kn->mn", AB),
    (lambda w: torch.einsum("ab,cb->ac", X, w), "ab,cb->ac", AB),
    (lambda w: torch.einsum("ab, bc", [X, w]), "ab,bc->ac", AB),
    (lambda w: torch.einsum("...ij,jk->k...i", B, w), "abij,jk->kabi", {"a": (2, 3, 40, 48), "b": (48, 48)}),
]


@pytest.mark.parametrize("case", PRODUCTS, ids=range(len(PRODUCTS)))
def test_products(tmp_path, case):
    run, equation, shapes = case
    options = {"dtype": "float32"} | ({} if equation is None else {"equation": equation})
    found = [c for c in recorded_of(tmp_path, run) if c[0] != "mul"]
    assert found == [("linear" if equation is None else "matmul", options, shapes)]


def conv(layout, strides, padding, dilation, groups):
    ones = (1,) * len(strides)
    return {
        "layout": f"NC{layout},OI{layout},NC{layout}", "strides": strides, "padding": padding, "dilation": dilation,
        "input_dilation": ones, "groups": groups,
    }  # fmt: skip


I1, I2, I3, K3 = draw(2, 48, 9), draw(2, 4, 9, 8), draw(2, 3, 5, 4, 6), draw(6, 3, 2, 1, 3)
CONVOLUTIONS = [
    (lambda w: F.conv1d(I1, w[:, :, None], V), conv("0", (1,), ((0, 0),), (1,), 1)),
    (lambda w: torch.conv1d(I1, w.view(48, 16, 3), None, 2, padding=1, groups=3), conv("0", (2,), ((1, 1),), (1,), 3)),
    (
        lambda w: F.conv2d(I2, w[:32, :36].reshape(32, 4, 3, 3), stride=(2, 1), padding=[1]),
        conv("01", (2, 1), ((1, 1), (1, 1)), (1, 1), 1),
    ),
    (
        lambda w: F.conv2d(I2, w[:32, :32].reshape(32, 4, 2, 4), padding="same", dilation=(1, 2)),
        conv("01", (1, 1), ((0, 1), (3, 3)), (1, 2), 1),
    ),
    (lambda w: F.conv2d(I2, w.view(144, 4, 2, 2), padding="valid"), conv("01", (1, 1), ((0, 0), (0, 0)), (1, 1), 1)),
    (
        lambda w: torch.conv3d(I3, K3, padding=(1, 0, 2)) * w[0, 0],
        conv("012", (1, 1, 1), ((1, 1), (0, 0), (2, 2)), (1, 1, 1), 1),
    ),
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=range(len(CONVOLUTIONS)))
def test_convolutions(tmp_path, case):
    run, options = case
    found = [c for c in recorded_of(tmp_path, run) if c[0] != "mul"]
    assert [c[:2] for c in found] == [("conv", options)]
    assert set(found[0][2]) == {"x", "weight"} | ({"bias"} if case is CONVOLUTIONS[0] else set())


IDS, TARGETS = torch.tensor([[3, 0], [5, 5]]), torch.arange(48) % 7
LOSS = {"axis": -1, "reduction": "mean", "ignore_index": -100}
OTHERS = [
    (lambda w: F.embedding(IDS, w, padding_idx=0), "embedding", {}),
    (lambda w: F.softmax(w, 1), "softmax", {"axis": -1}),
    (lambda w: w.softmax(-2), "softmax", {"axis": -2}),
    (lambda w: torch.softmax(w[0, 0], 0), "softmax", {"axis": -1}),
    (lambda w: F.softmax(w.bfloat16(), -1, dtype=torch.float32), "softmax", {"axis": -1}),
    (lambda w: torch.special.log_softmax(w, 0), "log_softmax", {"axis": -2}),
    (lambda w: w.bfloat16().log_softmax(-1, torch.float32), "log_softmax", {"axis": -1}),
    (lambda w: F.log_softmax(w, -1), "log_softmax", {"axis": -1}),
    (lambda w: F.layer_norm(w, (48,), V, V, 0.5), "layer_norm", {"axes": 1, "eps": 0.5}),
    (lambda w: torch.layer_norm(w, [48, 48]), "layer_norm", {"axes": 2, "eps": 1e-5}),
    (lambda w: F.layer_norm(w.bfloat16(), (48,), V, V), "layer_norm", {"axes": 1, "eps": 1e-5}),
    (lambda w: F.rms_norm(w, (48,), V), "rms_norm", {"axes": 1, "eps": 2.0**-23}),
    (lambda w: F.rms_norm(w.bfloat16() / 64, (48,)), "rms_norm", {"axes": 1, "eps": 2.0**-23}),
    (lambda w: F.rms_norm(w, (48,), eps=0.25), "rms_norm", {"axes": 1, "eps": 0.25}),
    (lambda w: F.gelu(w), "gelu", {"approximate": False}),
    (lambda w: F.gelu(w, approximate="tanh"), "gelu", {"approximate": True}),
    (lambda w: F.silu(w), "silu", {}),
    (lambda w: F.silu(w.neg(), inplace=True), "silu", {}),
    (lambda w: w + V, "add", {}),
    (lambda w: torch.add(w, other=V), "add", {}),
    (lambda w: w.neg().add_(V), "add", {}),
    (lambda w: w * V, "mul", {}),
    (lambda w: w.neg().mul_(V[0]), "mul", {}),
    (lambda w: w.bfloat16() * V, "mul", {}),
    (lambda w: F.cross_entropy(w, TARGETS), "cross_entropy", LOSS),
    (lambda w: F.cross_entropy(w[0], TARGETS[0], reduction="sum"), "cross_entropy", LOSS | {"reduction": "sum"}),
    (
        lambda w: F.cross_entropy(
            w.view(6, 24, 16), TARGETS.view(-1, 8).repeat(1, 2), ignore_index=3, reduction="none"
        ),
        "cross_entropy",
        {"axis": -2, "reduction": "none", "ignore_index": 3},
    ),
]


@pytest.mark.parametrize("case", OTHERS, ids=range(len(OTHERS)))
def test_other_functions(tmp_path, case):
    run, row, options = case
    found = recorded_of(tmp_path, run)
    assert [c[:2] for c in found] == [(row, options)]
    assert set(found[0][2]) <= {*table.TABLE[row].operands, *table.TABLE[row].optional}


def _written(w):
    x = w.neg()
    x += V
    x *= w
    return x


def test_operands_are_copied_before_they_are_written(tmp_path):
    found = recorded_of(tmp_path, _written)
    assert [c[0] for c in found] == ["add", "mul"]  # with the same bits again


UNKNOWN = [
    lambda w: torch.add(w, w, alpha=2),
    lambda w: w + 2,
    lambda w: 2 * w,
    lambda w: w - V,
    lambda w: torch.addmm(V, X, w, beta=0.5),
    lambda w: torch.addmm(X, X, w),
    lambda w: torch.mul(w.detach(), V, out=torch.empty(48, 48)) * 2,
    lambda w: w.bfloat16().add_(V),
    lambda w: w.bfloat16() * w[0, 0],  # bfloat16 in torch, by numbers of axes
    lambda w: w[0, 0].double() + w,
    lambda w: w.neg().mul_(V.double()[0]),
    lambda w: torch.einsum("ij,jk,kl->il", w, w, w),
    lambda w: torch.einsum("ii", w),
    lambda w: F.conv1d(X, w[:, :40, None]),
    lambda w: F.conv_transpose1d(I1, w[:, :, None]),
    lambda w: F.embedding(IDS, w.detach().clone(), max_norm=1.0) * 2,
    lambda w: F.cross_entropy(w, TARGETS, weight=V),
    lambda w: F.cross_entropy(w, TARGETS, label_smoothing=0.1),
    lambda w: F.cross_entropy(w, w.detach()),
    lambda w: torch.view_as_real(torch.complex(w, w) * torch.complex(V, V)),
    lambda w: torch.func.vmap(lambda x: x * V)(w),
    lambda w: F.linear(w.to_sparse(), V.diag()).to_dense(),
]


@pytest.mark.parametrize("run", UNKNOWN, ids=range(len(UNKNOWN)))
def test_a_call_that_the_table_cannot_express_is_not_recorded(tmp_path, run):
    assert recorded_of(tmp_path, run) == []


@pytest.mark.parametrize(
    "run",
    [
        lambda w: torch.matmul(w, None),
        lambda w: w @ w[:3],
        lambda w: F.linear(w, w, nothing=1),
        lambda w: F.conv2d(I2, w),
        lambda w: torch.einsum("a,b->ab", w, w),
        lambda w: F.rms_norm(IDS, (2,)),
        lambda w: F.layer_norm(w, "no"),
        lambda w: F.layer_norm(w, (48,), eps=None),
        lambda w: F.rms_norm(w, None),
        lambda w: F.conv2d(I2, w.view(144, 4, 2, 2), stride="a"),
        lambda w: F.conv2d(I2, w.view(144, 4, 2, 2), dilation=None),
        lambda w: F.conv2d(I2, w.view(144, 4, 2, 2), padding="no"),
        lambda w: F.conv2d(I2, w.view(144, 4, 2, 2), stride=(1, 2, 3)),
        lambda w: F.softmax(w, 7),
        lambda w: F.gelu(w, approximate="no"),
        lambda w: F.cross_entropy(w, TARGETS, reduction="no"),
        lambda w: F.cross_entropy(w, TARGETS, ignore_index="no"),
        lambda w: F.cross_entropy(w.sum(), TARGETS),
        lambda w: torch.einsum("ab->a->b,c", w, w),
        lambda w: torch.einsum("a?,bc", w, w),
        lambda w: torch.einsum("ab,bc->az", w, w),
        lambda w: F.linear(w, V.sum()),
        lambda w: torch.addmm(V, w, V),
    ],
)
def test_errors_are_those_of_torch(tmp_path, run):
    with pytest.raises(Exception) as plain:
        run(torch.ones(48, 48))
    with lab.capture(Runs(run), out=tmp_path / "t", ops="all") as t, pytest.raises(type(plain.value)) as found:
        t._model()
    assert str(found.value) == str(plain.value)
