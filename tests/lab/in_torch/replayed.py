"""Models that are captured with all functions, and what their captures have of these."""

import torch
from torch import nn

from diptych.lab.replay import table
from diptych.lab.replay.op import Bits, Op
from diptych.lab.torch.adapter import frontend
from diptych.torch import lab
from in_torch.captured import observed


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
    """Returns the operations that a capture records of a model's functions, after it has checked that all give the same
    bits again."""
    model = Runs(function)

    def step():
        found = model()
        if found.is_floating_point() and found.requires_grad:
            found.float().sum().backward()
        return found

    found = captured(tmp_path / "t", step, model)
    assert {c[0] for c in found} <= {"(model)"}
    assert_replays(tmp_path / "t")
    return [c[1:] for c in found]


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float32).to(dtype)
