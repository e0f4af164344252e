import contextlib
import dataclasses

import numpy as np
import pytest
from lab_tools import TINY, job

from diptych.common import CheckpointError
from diptych.lab import checkpoint, train
from diptych.lab.frontend import require
from diptych.lab.job import OptimConfig, initial_weights
from diptych.lab.traces import Trace

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("compiled_once")]
SETTINGS = train.Settings(batch=2, eval_every=3, eval_batches=2, checkpoint_every=2)


def run(frontend, job_, data, **stretch):
    return train.run(frontend, job_, data, SETTINGS, train.Stretch(**stretch))


@pytest.mark.parametrize(
    "recipe", ["fp8-delayed", *[pytest.param(r, marks=pytest.mark.slow) for r in ("none", "nvfp4")]]
)
def test_resume_gives_the_losses_of_the_uninterrupted_run(frontend_, small, tmp_path, recipe):
    whole = run(frontend_, job(recipe), small)
    path = tmp_path / checkpoint.FILE_NAME
    part = run(frontend_, job(recipe), small, checkpoint=path, stop_after=4)
    assert len(part.losses) == 4
    rest = run(frontend_, job(recipe), small, checkpoint=path, resume=path)
    assert rest.steps_run == 2
    assert np.array_equal(whole.losses, rest.losses)
    assert whole.validation == rest.validation
    done = run(frontend_, job(recipe), small, resume=path)
    assert done.steps_run == 0 and np.array_equal(done.losses, whole.losses)


@pytest.mark.parametrize(
    ("recipe", "high_blocks"),
    [
        ("fp8-delayed", 0),
        ("nvfp4", 1),
        *[pytest.param(r, n, marks=pytest.mark.slow) for r, n in (("fp8-delayed", 1), ("mxfp8", 0), ("nvfp4", 0))],
    ],
)
def test_a_checkpoint_crosses_frameworks(small, tmp_path, recipe, high_blocks):
    """Written by one, read by the other and written again: the same bits, scales and random states included."""
    path, same = tmp_path / "c.npz", job(recipe, high_blocks=high_blocks)
    for one, other in (("torch", "jax"), ("jax", "torch")):
        run(require(one, "cpu"), same, small, checkpoint=path, stop_after=2)
        stored = checkpoint.load(path).state
        quantized = len(TINY.linears) // (1 + high_blocks)
        assert len(stored.quantizing) == quantized * (9 * (recipe == "fp8-delayed") + (recipe == "nvfp4"))
        trainer = require(other, "cpu").trainer(same, stored.weights)
        trainer.restore(stored)
        same_state(trainer.state(), stored)
        there = run(require(other, "cpu"), same, small, resume=path)
        straight = run(require(other, "cpu"), same, small)
        assert there.final == pytest.approx(straight.final, rel=0.01)


def same_state(a, b):
    assert a.step == b.step
    for section in ("weights", "first", "second", "quantizing"):
        x, y = getattr(a, section), getattr(b, section)
        assert x.keys() == y.keys(), section
        for key in x:
            assert x[key].dtype == y[key].dtype and np.array_equal(x[key], y[key]), (section, key)


def test_evaluation_leaves_the_quantizers_alone(frontend_, small):
    for recipe in ("fp8-delayed", "nvfp4"):
        trainer = frontend_.trainer(job(recipe), initial_weights(TINY, 0))
        batches = [small.batch(0, i, 2, TINY.seq) for i in range(3)]
        trainer.step(batches[0])
        before = trainer.state()
        losses = [trainer.evaluate(b) for b in batches]
        same_state(trainer.state(), before)
        assert [trainer.evaluate(b) for b in batches] == losses


def test_random_streams_are_those_of_the_seed_and_advance_with_the_steps(small):
    """Both frameworks: the seed, the linear's place, and 18 offsets a step."""
    kept = {}
    for name in ("torch", "jax"):
        trainer = require(name, "cpu").trainer(job("nvfp4", seed=2**33 + 5), initial_weights(TINY, 0))
        for i in range(2):
            trainer.step(small.batch(0, i, 2, TINY.seq))
        kept[name] = trainer.state().quantizing
    want = {f"{linear}.rng_state": [5, 2, 36, i] for i, linear in enumerate(TINY.linears)}
    for found in kept.values():
        assert {k: v.tolist() for k, v in found.items()} == want


def test_delayed_scales_follow_the_amaxes(frontend_, small):
    result = run(frontend_, job("fp8-delayed"), small)
    assert sorted(result.scales) == [1, 2, 3, 4, 5, 6]
    assert set(result.scales[1].values()) == {1.0}  # nothing had been seen
    assert all(v != 1 for v in result.scales[2].values())
    assert len(result.scales[6]) == 3 * len(TINY.linears)


def test_state_comes_back_as_it_was_written(frontend_, small, tmp_path):
    path = tmp_path / "c.npz"
    run(frontend_, job(), small, checkpoint=path)
    stored = checkpoint.load(path)
    trainer = frontend_.trainer(job(), initial_weights(TINY, 1))
    trainer.restore(stored.state)
    same_state(trainer.state(), stored.state)
    assert stored.state.step == 6
    assert set(stored.state.weights) == set(stored.state.first) == set(TINY.shapes())
    assert any(np.abs(v).max() > 0 for v in stored.state.second.values())


@pytest.fixture
def saved(small, tmp_path):
    path = tmp_path / "c.npz"
    run(require("torch", "cpu"), job(), small, checkpoint=path, stop_after=2)
    return path


@pytest.mark.parametrize("where", ["header", "middle", "truncated", "empty", "text"])
def test_damage_is_named_and_nothing_is_written(saved, small, where):
    blob = bytearray(saved.read_bytes())
    if where == "truncated":
        blob = blob[: len(blob) // 2]
    elif where == "empty":
        blob = bytearray()
    elif where == "text":
        blob = bytearray(b"not a checkpoint")
    else:
        at = 0 if where == "header" else len(blob) // 2
        blob[at : at + 8] = bytes(b ^ 0xFF for b in blob[at : at + 8])
    saved.write_bytes(blob)
    with pytest.raises(CheckpointError, match=r"c\.npz: damaged"):
        run(require("torch", "cpu"), job(), small, checkpoint=saved, resume=saved)
    assert saved.read_bytes() == blob
    assert [p.name for p in saved.parent.iterdir()] == ["c.npz"]


def test_a_consistent_forgery_fails_the_digest(saved):
    with np.load(saved) as f:
        arrays = dict(f)
    arrays["weights/head.weight"] = arrays["weights/head.weight"] + 1
    np.savez(saved, **arrays)
    with pytest.raises(CheckpointError, match="digest"):
        checkpoint.load(saved)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda j: dataclasses.replace(j, recipe=None), "recipe is 'MXFP8BlockScaling"),
        (
            lambda j: dataclasses.replace(j, model=dataclasses.replace(TINY, layers=3)),
            "model.layers is 2 there, 3 here",
        ),
        (lambda j: dataclasses.replace(j, optim=OptimConfig(steps=7, warmup=2)), "optimizer.steps is 6 there, 7 here"),
    ],
)
def test_another_runs_checkpoint_is_refused(saved, small, change, named):
    with pytest.raises(CheckpointError, match=named):
        run(require("torch", "cpu"), change(job()), small, resume=saved)


def test_missing_checkpoint(small, tmp_path):
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        run(require("torch", "cpu"), job(), small, resume=tmp_path)


def test_a_failed_write_keeps_the_old_checkpoint(saved, monkeypatch):
    before, stored = saved.read_bytes(), checkpoint.load(saved)
    monkeypatch.setattr(checkpoint.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        checkpoint.save(saved, stored)
    assert saved.read_bytes() == before


@pytest.mark.parametrize("high_blocks", [0, 1])
def test_both_frameworks_start_alike_and_count_their_kernels(small, high_blocks):
    for recipe in ("fp8-block", "fp8-delayed"):
        both = [require(name, "cpu") for name in ("torch", "jax")]
        results = [run(frontend, job(recipe, high_blocks=high_blocks), small) for frontend in both]
        assert results[0].losses == pytest.approx(results[1].losses, rel=1e-3)
        linears, steps, evaluated = len(TINY.linears) // (1 + high_blocks), 6, 4
        for frontend, r in zip(both, results, strict=True):
            assert r.evaluations_run == evaluated
            assert r.calls["gemm"] == r.calls["cpu.gemm"] == linears * (3 * steps + evaluated)
            assert r.calls["quantize"] == linears * (3 * steps + 2 * evaluated)
            assert r.calls["bias_grad"] == linears * steps
            updates = linears * steps * (recipe == "fp8-delayed")
            assert r.calls["scale_update"] == (0 if frontend.updates_together else 3 * updates)
            assert r.calls["scale_update_many"] == (updates if frontend.updates_together else 0)


def test_a_loss_that_is_not_finite_stops_the_run(frontend_, small):
    wild = dataclasses.replace(job("none"), optim=OptimConfig(steps=5, lr=1e30, warmup=1))
    with pytest.raises(train.TrainingError, match="try a smaller --lr"):
        run(frontend_, wild, small)


def test_a_validation_loss_that_is_not_finite_stops_the_run(frontend_, small, monkeypatch):
    trainer = frontend_.trainer(job("none"), initial_weights(TINY, 0))
    monkeypatch.setattr(type(trainer), "evaluate", lambda self, batch: float("nan"))
    with pytest.raises(train.TrainingError, match=r"the validation loss after .* steps is nan"):
        run(frontend_, job("none"), small)


def gradients_in(folder):
    """The parameters' gradients that a trace's first step has, in float64."""
    found = Trace.open(folder).ranks[0].step(0)
    of = [o for o in found if o.site.kind == "parameter_grad" and o.site.name in TINY.shapes()]
    return {o.site.name: o.values.tensor.bits.view(np.float32).astype(np.float64) for o in of}


@pytest.mark.parametrize("clip", [0.25, 1e6])
def test_both_frameworks_clip_gradients_by_the_same_formula(frontend_, small, clip, tmp_path):
    """After one step, AdamW's first moment is 0.1 of the gradient that it got. A large norm leaves every bit alone."""
    batch = small.batch(0, 0, 2, TINY.seq)
    weights = initial_weights(TINY, 0)
    free = frontend_.trainer(job("none"), weights)
    with free.captured(tmp_path / "free") as step:
        step(batch)
    gradients = gradients_in(tmp_path / "free")
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    assert 0.5 < norm < 100
    clipped = dataclasses.replace(job("none"), optim=OptimConfig(steps=6, warmup=2, clip=clip))
    for captured in (False, True):
        trainer = frontend_.trainer(clipped, weights)
        with trainer.captured(tmp_path / "clipped") if captured else contextlib.nullcontext(trainer.step) as step:
            step(batch)
        for name, first in trainer.state().first.items():
            want = 0.1 * gradients[name] * min(1, clip / (norm + 1e-6))
            np.testing.assert_allclose(first, want, rtol=1e-4, atol=1e-5 * np.abs(want).max(), err_msg=name)
            if clip > norm and captured:
                assert np.array_equal(first, free.state().first[name]), name


@pytest.mark.parametrize(
    ("wrong", "named"),
    [({"warmup": -1}, "warmup must be at least 0"), *(({"clip": c}, "clip must be") for c in (0.0, -1.0, np.inf))],
)
def test_wrong_options_of_the_optimizer_are_named(wrong, named):
    with pytest.raises(ValueError, match=named):
        OptimConfig(**wrong)


def test_a_checkpoint_without_clip_in_its_settings_is_of_a_run_without_clipping(small, tmp_path):
    """Checkpoints that were written before the option existed resume, but not with clipping."""
    path = tmp_path / checkpoint.FILE_NAME
    run(require("torch", "cpu"), job(), small, checkpoint=path, stop_after=4)
    stored = checkpoint.load(path)
    del stored.identity["optimizer"]["clip"]
    checkpoint.save(path, stored)
    rest = run(require("torch", "cpu"), job(), small, resume=path)
    assert np.array_equal(rest.losses, run(require("torch", "cpu"), job(), small).losses)
    clipped = dataclasses.replace(job(), optim=dataclasses.replace(job().optim, clip=1.0))
    with pytest.raises(CheckpointError, match=r"optimizer\.clip is None there, 1\.0 here"):
        run(require("torch", "cpu"), clipped, small, resume=path)


def test_learning_rates_warm_up_and_decay_to_a_tenth():
    rates = OptimConfig(lr=1.0, steps=100, warmup=10).learning_rates()
    assert rates[0] == pytest.approx(0.1) and rates[10] == pytest.approx(1.0)
    assert rates.argmax() in (9, 10) and rates[-1] == pytest.approx(0.1, abs=1e-2)
    assert OptimConfig(lr=1.0, steps=4, warmup=10**400).learning_rates().tolist() == [0.25, 0.5, 0.75, 1]
    assert OptimConfig(lr=1.0, steps=4, warmup=0).learning_rates()[0] == 1
