"""Captures of compiled models that nobody here wrote, whose graphs break."""

import pytest
import torch
import transformers

from diptych.lab.traces import Trace
from diptych.torch import lab


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_experts_in_a_loop(tmp_path, backend):
    """The loop over experts reads their counts, and code between graphs runs with the capture's modes in place."""
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=32, max_position_embeddings=32, num_local_experts=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config)
    ids, run = torch.randint(2, 50, (2, 9)), torch.compile(model, backend=backend)

    def step():
        model.zero_grad()
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach(), [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    plain = step()
    with lab.capture(model, out=tmp_path / "trace") as t:
        recorded = step()
        t.step()
    torch.testing.assert_close(recorded, plain, rtol=0, atol=0)
    names = {o.site.name for o in Trace.open(tmp_path / "trace").ranks[0].step(0)}
    assert {"model.layers.1.block_sparse_moe.gate", "lm_head", "model.layers.0.self_attn.q_proj.weight"} <= names
