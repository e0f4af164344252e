"""Captures with ops="all": calls of torch's functions are recorded, and give the same bits when they are replayed."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from diptych.lab.capture import CaptureWarning
from diptych.lab.replay import table
from diptych.lab.replay.op import Bits, Op
from diptych.lab.traces import Trace
from diptych.torch import lab
from diptych.torch.lab.adapter import frontend
from torch_frontend.lab.captured import hashes, observed


def captured(folder, step, model, ops="all", values="full", **options):
    with lab.capture(model, out=folder, ops=ops, values=values, **options) as t:
        assert t.check(step)
        model.zero_grad(set_to_none=True)
        step()
        t.step()
    return calls(folder)


def calls(folder):
    """The recorded operations in order: (module, row, options, shapes of operands by name)."""
    found = observed(folder)
    done = []
    for o in found.values():
        if o.site.kind == "result" and o.site.operation is not None:
            module, _, last = o.site.name.rpartition("/")
            row, options = o.site.operation.name, table.decoded(o.site.operation.name, o.site.operation.options)
            assert last == f"{row}.out"
            operands = {}
            for key in o.site.inputs:
                operand = found[key]
                assert operand.site.kind == "operand" and operand.site.name.startswith(f"{module}/{row}.")
                operands[operand.site.name.rpartition(".")[2]] = operand.site.shape
            done.append((module, row, options, operands))
    operands = [o for o in found.values() if o.site.kind == "operand"]
    assert sum(len(c[3]) for c in done) == len(operands)
    return done


def assert_replays(folder):
    """Asserts that each operation has the recorded bits again, and returns how many there are."""
    found = observed(folder)
    results = [o for o in found.values() if o.site.kind == "result"]
    for o in results:
        row = o.site.operation.name
        operands = {key.partition("#")[0].rpartition(".")[2]: _bits(found[key]) for key in o.site.inputs}
        options = table.decoded(row, o.site.operation.options)
        again = frontend.replay(Op(row, operands, options, {"out": _bits(o)}), "cpu")["out"]
        assert again.dtype == o.site.dtype and again.data.shape == o.site.shape, o.site
        assert again.data.tobytes() == _bits(o).data.tobytes(), o.site
    return len(results)


def _bits(observation):
    assert observation.values.whole
    return Bits(observation.site.dtype, observation.values.tensor.bits)


class Runs(nn.Module):
    """A model of one function of a parameter and other tensors."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(48, 48))
        self.function = function

    def forward(self):
        return self.function(self.w)


def recorded_of(tmp_path, function):
    """What a capture has of the functions that a model runs; all of them give the same bits again."""
    model = Runs(function)

    def step():
        found = model()
        if found.is_floating_point() and found.requires_grad:
            found.float().sum().backward()
        return found

    found = captured(tmp_path / "t", step, model)
    assert {c[0] for c in found} <= {"model"}
    assert_replays(tmp_path / "t")
    return [c[1:] for c in found]


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(dtype)


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
    (lambda w: w.neg().mul_(V.double()[0]), "mul", {}),
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
    ],
)
def test_errors_are_those_of_torch(tmp_path, run):
    with pytest.raises(Exception) as plain:
        run(torch.ones(48, 48))
    with lab.capture(Runs(run), out=tmp_path / "t", ops="all") as t, pytest.raises(type(plain.value)) as found:
        t._model()
    assert str(found.value) == str(plain.value)


# --- models ---


class Attention(nn.Module):
    """A transformer's block with torch's attention, and a product in the loss."""

    def __init__(self, width=32, weights=False):
        super().__init__()
        self.norm, self.weights = nn.LayerNorm(width), weights
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.RMSNorm(width), nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, x):
        normal = self.norm(x)
        x = x + self.attention(normal, normal, normal, need_weights=self.weights)[0]
        return x + self.mlp(x)


def attention_and_step(**options):
    torch.manual_seed(0)
    model = Attention(**options)
    x, targets = torch.randn(2, 12, 32), torch.randint(0, 32, (24,))

    def step(run=model):
        loss = F.cross_entropy(run(x).flatten(0, 1), targets)
        loss.backward()
        return loss

    return model, step


def named(found):
    return [f"{module}/{row}" for module, row, *_ in found]


BLOCK = ["norm/layer_norm", "attention/linear", "attention/linear", "model/add"]
MLP = ["mlp.0/rms_norm", "mlp.1/linear", "mlp.2/gelu", "mlp.3/linear", "model/add"]


@pytest.mark.parametrize("weights", [False, True])
def test_a_transformer(tmp_path, weights):
    model, step = attention_and_step(weights=weights)
    found = captured(tmp_path / "t", step, model)
    inner = ["attention/matmul", "attention/softmax", "attention/matmul"] if weights else []
    assert named(found) == [*BLOCK[:2], *inner, *BLOCK[2:], *MLP, "loss/cross_entropy"]
    assert assert_replays(tmp_path / "t") == len(found)


def test_a_convolutional_network(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.SiLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1, groups=2),
        nn.Conv2d(8, 6, 2, padding=1, padding_mode="reflect"), nn.Flatten(), nn.Linear(150, 5), nn.LogSoftmax(-1),
    )  # fmt: skip
    x = torch.randn(2, 3, 8, 8)

    def step():
        loss = F.nll_loss(model(x), torch.tensor([1, 4]))
        loss.backward()
        return loss

    found = captured(tmp_path / "t", step, model)
    assert named(found) == ["0/conv", "1/silu", "2/conv", "3/conv", "5/linear", "6/log_softmax"]
    assert [c[3]["x"] for c in found[:4]] == [(2, 3, 8, 8), (2, 8, 4, 4), (2, 8, 4, 4), (2, 8, 6, 6)]
    assert assert_replays(tmp_path / "t") == 6


def hugging_face(name, config, **options):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    settings = getattr(transformers, f"{config}Config")(attn_implementation="eager", **options)
    model = getattr(transformers, name)(settings)
    tokens = torch.randint(0, 48, (2, 16))

    def step():
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        return loss

    return model, step


LLAMA = {
    "vocab_size": 48, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip


def test_llama(tmp_path):
    model, step = hugging_face("LlamaForCausalLM", "Llama", **LLAMA)
    module = sys.modules[type(model).__module__]
    before = module.apply_rotary_pos_emb
    found = captured(tmp_path / "t", step, model)
    assert module.apply_rotary_pos_emb is before
    assert assert_replays(tmp_path / "t") == len(found)
    layer = [c[1:] for c in found if c[0] == "model.layers.1.self_attn"]
    heads, cos = (2, 4, 16, 16), (2, 1, 16, 16)
    whole = {"interleaved": False}
    rotary = [c for c in layer if c[0] == "rotary"]
    assert [(c[1], c[2]["x"]) for c in rotary] == [(whole, heads), (whole, (2, 2, 16, 16))]
    assert {c[2][k] for c in rotary for k in ("cos", "sin")} <= {cos, (1, *cos[1:])}
    assert [c[0] for c in layer] == ["rotary", "rotary", "matmul", "add", "softmax", "matmul"]
    assert [c[1]["equation"] for c in layer if c[0] == "matmul"] == ["ambk,abnk->abmn", "abmk,abkn->abmn"]
    counts = {row: sum(c[1] == row for c in found) for row in table.TABLE}
    assert {k: n for k, n in counts.items() if n} == {
        "embedding": 1, "linear": 15, "rotary": 4, "matmul": 4 + 1, "add": 2 + 4, "softmax": 2, "silu": 2,
        "mul": 2 + 2 * 5, "cross_entropy": 1,
    }  # fmt: skip


def test_gpt2(tmp_path):
    model, step = hugging_face(
        "GPT2LMHeadModel", "GPT2", vocab_size=48, n_embd=64, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    found = captured(tmp_path / "t", step, model)
    assert assert_replays(tmp_path / "t") == len(found)
    mlp = [c for c in found if c[0].startswith("transformer.h.0.mlp.c_")]
    assert [(c[0], c[1], c[3]["weight"]) for c in mlp] == [
        ("transformer.h.0.mlp.c_fc", "linear", (256, 64)), ("transformer.h.0.mlp.c_proj", "linear", (64, 256))
    ]  # fmt: skip
    assert [row for module, row, *_ in found if module == "transformer.h.0.ln_1"] == ["layer_norm"]


# --- rotary embeddings ---


def _pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def _halves(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)


def plain_rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return (q * cos) + (_halves(q) * sin), (k * cos) + (_halves(k) * sin)


def interleaved_rotary(q, k, cos, sin, unsqueeze_dim=2):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + _pairs(q) * sin, k * cos + _pairs(k) * sin


def partial_rotary(q, k, cos, sin):
    n = cos.shape[-1] // 2
    return tuple(
        [torch.cat((x[..., :n] * cos[..., :n] + _halves(x[..., :n]) * sin[..., :n], x[..., n:]), -1) for x in (q, k)]
    )


def other_rotary(x, cos, sin):
    return x * cos + _halves(x) * sin, x


@pytest.mark.parametrize(
    ("function", "of_cos", "want"),
    [
        (plain_rotary, (2, 3, 8), [("rotary", {"interleaved": False})] * 2),
        (interleaved_rotary, (2, 4, 8), [("rotary", {"interleaved": True})] * 2),
        (partial_rotary, (2, 4, 3, 8), [("mul", {}), ("mul", {}), ("add", {})] * 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_for_rotary_embeddings(tmp_path, monkeypatch, function, of_cos, want, dtype):
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", function)
    q, k, cos, sin = draw(2, 4, 3, 8, dtype=dtype), draw(2, 4, 3, 8, dtype=dtype), draw(*of_cos, dtype=dtype), None
    cos, sin = cos.sin(), cos.cos()

    def run(w):
        first, second = globals()["apply_rotary_pos_emb"](q, k, cos, sin=sin)
        return torch.stack((first, second)).float() - w.sum()

    assert [c[:2] for c in recorded_of(tmp_path, run)] == want
    assert globals()["apply_rotary_pos_emb"] is function


def test_a_function_with_other_arguments_is_not_rotary(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", other_rotary)
    found = recorded_of(tmp_path, lambda w: globals()["apply_rotary_pos_emb"](w, V, V)[0])
    assert [c[0] for c in found] == ["mul", "mul", "add"]


def test_two_captures_leave_the_function_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", plain_rotary)
    one, two = (lab.capture(Runs(lambda w: w), out=tmp_path / n, ops="all") for n in "ab")
    with pytest.warns(CaptureWarning, match="nothing is recorded"):
        one.__enter__(), two.__enter__()
        one._model(), two._model()
        one.__exit__()
        assert globals()["apply_rotary_pos_emb"] is not plain_rotary
        two.__exit__()
    assert globals()["apply_rotary_pos_emb"] is plain_rotary


# --- what is recorded, and where ---


def test_own_alone_records_no_functions(tmp_path):
    model, step = attention_and_step()
    assert captured(tmp_path / "t", step, model, ops="own") == []
    assert not any(o.site.kind in ("operand", "result") for o in observed(tmp_path / "t").values())
    assert captured(tmp_path / "u", step, model, values="hash")
    assert Trace.open(tmp_path / "u").meta.options.ops == "all"
    plain, every = hashes(tmp_path / "t"), hashes(tmp_path / "u")
    assert plain == {k: v for k, v in every.items() if k in plain}


def test_ops_is_checked(tmp_path):
    with pytest.raises(ValueError, match='"own" or "all"'):
        lab.capture(nn.Linear(2, 2), out=tmp_path / "t", ops="every")


def test_backward_passes_and_updates_are_not_recorded(tmp_path):
    model, step = attention_and_step()
    optimizer = torch.optim.Adam(model.parameters())
    hooked = []
    model.norm.weight.register_hook(lambda g: hooked.append(g * g))

    def whole():
        for _ in range(2):  # microbatches
            loss = step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with torch.no_grad():
            loss * loss
        return loss

    with lab.capture(model, out=tmp_path / "t", ops="all") as t:
        for _ in range(2):
            whole()
            optimizer.step()
            optimizer.zero_grad()
            t.step()
    found = named(calls(tmp_path / "t"))
    assert hooked and found == [*BLOCK, *MLP, "loss/cross_entropy"] * 2
    keys = list(observed(tmp_path / "t", 1))
    assert "result:loss/cross_entropy.out#1" in keys and "operand:attention/linear.x#3" in keys
    first = [k.partition(":")[0] for k in keys[keys.index("operand:norm/layer_norm.x") :]]
    assert "activation_grad" in first and "operand" not in first[first.index("parameter_grad") :]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_functions_are_recorded_once(tmp_path, reentrant):
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 12, 32, requires_grad=True)
    inner, outer = model.mlp, nn.Sequential(model.mlp, nn.Linear(32, 32))

    def step(again):
        y = checkpoint(inner, x, use_reentrant=reentrant) if again else inner(x)
        loss = outer[1](y).square().sum()
        loss.backward()
        return loss

    for again in (False, True):
        captured(tmp_path / str(again), lambda: step(again), outer)  # noqa: B023
    assert named(calls(tmp_path / "True")) == ["0.0/rms_norm", "0.1/linear", "0.2/gelu", "0.3/linear", "1/linear"]
    assert hashes(tmp_path / "True") == hashes(tmp_path / "False")


def test_a_pattern_of_sites_may_leave_operands_out(tmp_path):
    model, step = attention_and_step()
    with lab.capture(model, out=tmp_path / "t", ops="all", sites="mlp.*/linear.out") as t:
        step()
        t.step()
    found = observed(tmp_path / "t")
    assert list(found) == ["result:mlp.1/linear.out", "result:mlp.3/linear.out"]
    assert all(o.site.operation is None and o.site.inputs == () for o in found.values())


@pytest.mark.parametrize("cast", [False, True])
def test_autocast(tmp_path, cast):
    model, _ = attention_and_step()

    def low():
        with torch.autocast("cpu", torch.bfloat16):
            found = model(torch.ones(2, 12, 32, dtype=torch.bfloat16 if cast else torch.float32))
            mixed = torch.einsum("abc,cd->abd", found, model.mlp[1].weight.T)
        found.float().sum().backward()
        return mixed

    found = captured(tmp_path / "t", low, model)
    assert [c[2]["dtype"] for c in found if c[1] in ("linear", "matmul")] == ["bfloat16"] * 5
    assert assert_replays(tmp_path / "t") == len(found)


def test_modes_that_are_entered_around_a_step_stay(tmp_path):
    model, step = attention_and_step()
    with lab.capture(model, out=tmp_path / "t", ops="all") as t, torch.device("meta"):
        with torch.device("cpu"):
            step()
        t.step()
        assert torch.empty(1).is_meta
    assert not torch.empty(1).is_meta and torch.overrides._get_current_function_mode() is None
    assert named(calls(tmp_path / "t")) == [*BLOCK, *MLP, "loss/cross_entropy"]


def test_a_module_named_loss(tmp_path):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.loss = nn.Linear(8, 8), nn.CrossEntropyLoss()

        def forward(self, x):
            return self.loss(self.fc(x), torch.arange(4))

    model = Model()

    def step():
        loss = model(torch.ones(4, 8)) * torch.ones(1)
        loss.backward()
        return loss

    assert named(captured(tmp_path / "t", step, model)) == ["fc/linear", "loss/cross_entropy", "loss/mul"]


# --- compiled code ---


@pytest.mark.sampled
def test_compiled_code_is_not_recorded(tmp_path):
    model, step = attention_and_step()
    compiled = torch.compile(model, backend="eager")
    with (
        pytest.warns(CaptureWarning, match="functions of torch"),
        lab.capture(compiled, out=tmp_path / "t", ops="all") as t,
    ):
        step(compiled)
        t.step()
    assert calls(tmp_path / "t") == []


@pytest.mark.sampled
def test_a_compiled_function_in_a_module_is_compiled_as_a_whole(tmp_path):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def gated(x, y):
        return F.linear(x * F.silu(y), y)

    found = recorded_of(tmp_path, lambda w: gated(w, w + V) * V)
    assert (found[0][0], found[-1][0]) == ("add", "mul")
    assert all("silu" in str(g.graph) for g in graphs)
