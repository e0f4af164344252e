"""`_core.Program` called in any order and deleted at any time: it raises errors and uses no freed memory."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from core import runner
from diptych.core import _core


def op(x: torch.Tensor, out: torch.Tensor) -> None:
    _core.amax(x, out, None, 0)


def recorded() -> tuple[_core.Program, torch.Tensor, torch.Tensor]:
    x, out, program = torch.arange(12.0).reshape(3, 4), torch.empty(1), _core.Program()
    program.start()
    op(x, out)
    program.stop()
    return program, x, out


def seal(program: _core.Program, x: torch.Tensor, out: torch.Tensor) -> bool:
    return program.seal([x], [out], [], [], [(torch.empty(0).new_empty, (1,))], torch.empty(0).new_empty)


def test_a_sealed_program_runs():
    program, x, out = recorded()
    assert seal(program, x, out)
    assert program.run([x + 7])[0].item() == 18 and program.run([x[:2]]) is None and program.run([]) is None


def test_run_before_seal():
    for program in (_core.Program(), recorded()[0]):
        with pytest.raises(ValueError, match=r"Program.run: seal\(\) it first"):
            program.run([])
    program, x, _ = recorded()
    assert not seal(program, x, torch.empty(1))  # met another tensor
    with pytest.raises(ValueError, match=r"seal.. refused cannot run"):
        program.run([x])


def test_seal_too_early_or_twice():
    program, x, out = _core.Program(), torch.ones(3), torch.empty(1)
    with pytest.raises(ValueError, match=r"Program.seal: start\(\) and stop\(\) it first"):
        seal(program, x, out)
    program.start()
    with pytest.raises(ValueError, match=r"Program.seal"):
        seal(program, x, out)
    program.stop()
    program, x, out = recorded()
    assert seal(program, x, out)
    with pytest.raises(ValueError, match="seal it once"):
        seal(program, x, out)


def test_start_and_stop_out_of_order():
    first, second = _core.Program(), _core.Program()
    with pytest.raises(ValueError, match=r"Program.stop: it does not record"):
        first.stop()
    first.start()
    for program, message in ((first, "recorded already"), (second, "another program of this thread")):
        with pytest.raises(ValueError, match=f"Program.start: .*{message}"):
            program.start()
    with pytest.raises(ValueError, match=r"Program.stop: it does not record"):
        second.stop()
    found = []

    def elsewhere() -> None:
        with pytest.raises(ValueError, match="does not record on this thread"):
            first.stop()
        second.start()  # each thread records its own
        second.stop()
        found.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found
    first.stop()
    with pytest.raises(ValueError, match="recorded already"):
        first.start()


def test_a_program_that_is_deleted_while_it_records():
    x, out = torch.arange(6.0), torch.empty(1)
    for _ in range(50):
        program = _core.Program()
        program.start()
        op(x, out)
        del program
        gc.collect(0)
        junk = [bytes(200) for _ in range(100)]  # what would lie where it did
        op(x, out)
        assert out.item() == 5
        del junk
    program, x, out = recorded()  # nothing keeps this thread from recording
    assert seal(program, x, out)


def test_a_program_that_is_given_no_tensors():
    program, x, out = recorded()
    with pytest.raises(TypeError, match="views must hold tuples"):
        program.seal([x], [out], [], [3], [(torch.empty, (1,))], torch.empty)
    program, x, out = recorded()
    assert program.seal([x], [out], [], [], [(lambda n: object(), (1,))], torch.empty)
    with pytest.raises(TypeError, match="object has no DLPack exchange table"):
        program.run([x])


@pytest.mark.cuda
@pytest.mark.parametrize("dependent", [False, True])
def test_small_tensors_are_quantized_together(cuda, dependent: bool) -> None:
    """Unless one call reads what the other one writes: here the second takes the first one's inverse scale as scale."""
    check_joined("cuda", dependent)


def check_joined(device: str, dependent: bool) -> None:
    def quantized(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        for x, scale in ((xs[0], xs[2]), (xs[1], xs[2])):
            amax, inverse = (torch.full((1,), 7.0, device=device) for _ in range(2))
            data = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=device)
            scale = made[1] if made and dependent else scale
            more = {name: None for name in ("columnwise_amax", "rng", "columnwise_data", "columnwise_scale_inv")}
            of_amax = {"amax": amax, "scale": scale, "rowwise_data": data, "rowwise_scale_inv": inverse}
            _core.quantize(x, runner.IDS["fp8_e4m3_tensor"], 0, 0.0, runner.COMPUTE, **of_amax, **more)
            made += [amax, inverse, data]
        return made

    def inputs(factor: float) -> list[torch.Tensor]:
        shapes = (16, 72), (130, 40)
        return [*(torch.randn(s, device=device) * factor for s in shapes), torch.full((1,), factor, device=device)]

    program, xs = _core.Program(), inputs(1.0)
    program.start()
    outputs = quantized(xs)
    program.stop()
    makers = [(torch.empty(0, dtype=t.dtype, device=device).new_empty, tuple(t.shape)) for t in outputs]
    assert program.seal(xs, outputs, [], [], makers, torch.empty(0).new_empty)
    xs = inputs(3.0)
    before = runner.want_calls(f"{device}.quantize_many")
    got = program.run(xs)
    assert runner.want_calls(f"{device}.quantize_many") == before + (not dependent)
    for a, b in zip(got, quantized(xs), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


F32, NUMBERS = torch.float32, _core.number_table()
X, STACK, MX = (8, 64), (3, 8, 64), runner.IDS["mxfp8_e4m3"]
# Ops that no node of a graph runs: shapes of the float32 inputs, those of the outputs with their dtypes, and the call.
OTHERS = {
    "log_amax": ([(5,)], [((5, 4), F32), ((1,), torch.int64)], _core.log_amax),
    "norm": (
        [X, (64,)], [((8,), F32), (X, F32)],
        lambda x, g, r, y: _core.norm(x, g, None, None, r, y, 1, 1e-5, False),
    ),
    "norm_grad": (
        [X, X, (64,), (8,)], [(X, F32), ((64,), F32)],
        lambda dy, x, g, r, dx, dg: _core.norm_grad(dy, x, g, None, r, dx, dg, None, None, 1, False),
    ),
    "activation": ([X], [(X, F32)], lambda x, y: _core.activation(x, y, 0, False)),
    "activation_grad": ([X, X], [(X, F32)], lambda dy, x, dx: _core.activation_grad(dy, x, dx, 0, False)),
    "hash": ([X], [((4,), torch.int32)], _core.hash),
    "statistics": (
        [X], [((14,), torch.int32)],
        lambda x, out: _core.statistics(x, None, None, out, None, NUMBERS["float32"], 1.0),
    ),
    "quantize_stack": (
        [STACK], [(STACK, torch.float8_e4m3fn), ((3, 8, 2), torch.float8_e8m0fnu)],
        lambda x, q, s: _core.quantize(x, MX, 0, 0.0, 0, None, None, None, None, q, s, None, None, stack=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", OTHERS)
def test_every_op_is_recorded(op):
    """A program of an op that no graph's node runs gives the bits of the op's call."""
    shapes, results, call = OTHERS[op]

    def made() -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in results]

    first, outputs, program = [torch.rand(s) for s in shapes], made(), _core.Program()
    program.start()
    call(*first, *outputs)
    program.stop()
    makers = [(torch.zeros(0, dtype=dtype).new_zeros, tuple(shape)) for shape, dtype in results]
    assert program.seal(first, outputs, [], [], makers, torch.empty(0).new_empty)
    other, want = [torch.rand(s) for s in shapes], made()
    before = sum(r["calls"] for r in _core.kernel_table() if r["op"] == op)
    got = program.run(other)
    assert sum(r["calls"] for r in _core.kernel_table() if r["op"] == op) == before + 1
    call(*other, *want)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)) and b.view(torch.uint8).any()
