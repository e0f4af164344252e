"""Captures with ops="all" of whole models: what is recorded, under which names, and what is not."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from diptych.lab.capture import CaptureWarning
from diptych.lab.replay import table
from diptych.lab.traces import Trace
from diptych.torch import lab
from in_torch import replayed
from in_torch.captured import hashes, observed
from in_torch.replayed import Runs, assert_replays, calls, captured, draw, recorded_of

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


BLOCK = ["norm/layer_norm", "attention/linear", "attention/linear", "(model)/add"]
MLP = ["mlp.0/rms_norm", "mlp.1/linear", "mlp.2/gelu", "mlp.3/linear", "(model)/add"]


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
    settings = getattr(transformers, f"{config}Config")(attn_implementation="eager", use_cache=False, **options)
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
    rows = [c[1] for c in found if c[0] != "model.rotary_emb"]
    assert {row: rows.count(row) for row in table.TABLE if row in rows} == {
        "embedding": 1, "linear": 15, "rotary": 4, "matmul": 4, "add": 2 + 4, "softmax": 2, "silu": 2, "mul": 2 + 2 * 5,
        "cross_entropy": 1,
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


def narrow_rotary(q, k, cos, sin, unsqueeze_dim=1):
    """Rotates the first elements of each head, as many as `cos` and `sin` have, as GPT-NeoX does."""
    cos, sin, n = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim), cos.shape[-1]
    return tuple([torch.cat((x[..., :n] * cos + _halves(x[..., :n]) * sin, x[..., n:]), -1) for x in (q, k)])


def other_rotary(x, cos, sin):
    return x * cos + _halves(x) * sin, x


@pytest.mark.parametrize(
    ("function", "of_cos", "want"),
    [
        (plain_rotary, (2, 3, 8), [("rotary", {"interleaved": False})] * 2),
        (interleaved_rotary, (2, 4, 8), [("rotary", {"interleaved": True})] * 2),
        (partial_rotary, (2, 4, 3, 8), [("mul", {}), ("mul", {}), ("add", {})] * 2),
        (narrow_rotary, (2, 3, 4), [("mul", {}), ("mul", {}), ("add", {})] * 2),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_for_rotary_embeddings(tmp_path, monkeypatch, function, of_cos, want, dtype):
    monkeypatch.setattr(replayed, "apply_rotary_pos_emb", function, raising=False)
    q, k, angle = draw(2, 4, 3, 8, dtype=dtype), draw(2, 4, 3, 8, dtype=dtype), draw(*of_cos, dtype=dtype)
    cos, sin = angle.cos(), angle.sin()

    def run(w):
        first, second = replayed.apply_rotary_pos_emb(q, k, cos, sin=sin)
        return torch.stack((first, second)).float() - w.sum()

    assert [c[:2] for c in recorded_of(tmp_path, run)] == want
    assert replayed.apply_rotary_pos_emb is function


def test_a_function_with_other_arguments_is_not_rotary(tmp_path, monkeypatch):
    monkeypatch.setattr(replayed, "apply_rotary_pos_emb", other_rotary, raising=False)
    found = recorded_of(tmp_path, lambda w: replayed.apply_rotary_pos_emb(w, draw(48), w)[0])
    assert [c[0] for c in found] == ["mul", "mul", "add"]


def test_two_captures_leave_the_function_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(replayed, "apply_rotary_pos_emb", plain_rotary, raising=False)
    one, two = (lab.capture(Runs(lambda w: w), out=tmp_path / n, ops="all") for n in "ab")
    with pytest.warns(CaptureWarning, match="nothing is recorded"):
        one.__enter__(), two.__enter__()
        one._model(), two._model()
        one.__exit__()
        assert replayed.apply_rotary_pos_emb is not plain_rotary
        two.__exit__()
    assert replayed.apply_rotary_pos_emb is plain_rotary


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


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_rotary_embeddings_are_recorded_once(tmp_path, monkeypatch, reentrant):
    monkeypatch.setattr(replayed, "apply_rotary_pos_emb", plain_rotary, raising=False)
    x, angle = torch.ones(3, 48, requires_grad=True), draw(1, 48, 48)
    inner = Runs(
        lambda w: sum(replayed.apply_rotary_pos_emb(w[None, None], draw(1, 2, 48, 48), angle, angle.sin())).sum()
    )
    model = nn.Sequential(inner)

    def step():
        loss = checkpoint(lambda x: inner() * x, x, use_reentrant=reentrant).sum()
        loss.backward()
        return loss

    assert named(captured(tmp_path / "t", step, model)) == ["0/rotary", "0/rotary", "0/add", "loss/mul"]


def test_a_pattern_of_sites_may_leave_operands_out(tmp_path):
    model, step = attention_and_step()
    with lab.capture(model, out=tmp_path / "t", ops="all", sites="mlp.*/linear.out") as t:
        step()
        t.step()
    found = observed(tmp_path / "t")
    assert list(found) == ["result:mlp.1/linear.out", "result:mlp.3/linear.out"]
    assert all(o.site.operation is None and o.site.inputs == () for o in found.values())


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
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


def test_a_default_device_may_change_in_a_capture(tmp_path):
    model, step = attention_and_step()
    try:
        torch.set_default_device("cpu")
        with lab.capture(model, out=tmp_path / "t", ops="all") as t:
            for device in ("meta", "cpu"):
                step()
                t.step()
                torch.set_default_device(device)
                assert torch.empty(1).device.type == device
    finally:
        torch.set_default_device(None)
    assert torch.overrides._get_current_function_mode() is None
    assert named(calls(tmp_path / "t")) == [*BLOCK, *MLP, "loss/cross_entropy"]


@pytest.mark.parametrize("ops", ["own", "all"])
@pytest.mark.parametrize("first", ["teacher", "student"])
def test_a_model_that_another_capture_has_is_no_loss(tmp_path, first, ops):
    """Two models are captured at once. Functions that run after a model's call, outside of both, are recorded as its
    loss."""
    teacher, student = (nn.Sequential(nn.Linear(4, 4), nn.SiLU()) for _ in range(2))
    x, found = torch.randn(2, 4), {}
    with (
        lab.capture(teacher, out=tmp_path / "teacher", ops=ops) as t,
        lab.capture(student, out=tmp_path / "student", ops="all") as s,
    ):
        for name in ("teacher", "student") if first == "teacher" else ("student", "teacher"):
            with torch.set_grad_enabled(name == "student"):
                found[name] = {"teacher": teacher, "student": student}[name](x)
            if name == "teacher":
                wanted = found[name].softmax(-1)
        (found["student"].log_softmax(-1) * wanted).sum().backward()
        t.step()
        s.step()
    of_model, of_loss = ["0/linear", "1/silu"], ["loss/log_softmax", "loss/mul"]
    of_teacher = [*of_model, "loss/softmax", *of_loss]
    assert named(calls(tmp_path / "teacher")) == (of_teacher if ops == "all" else [])
    assert named(calls(tmp_path / "student")) == (of_teacher if first == "student" else [*of_model, *of_loss])


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

    found = recorded_of(tmp_path, lambda w: gated(w, w + w) * w)
    assert (found[0][0], found[-1][0]) == ("add", "mul")
    assert all("silu" in str(g.graph) for g in graphs)
