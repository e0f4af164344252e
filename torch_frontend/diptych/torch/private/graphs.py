"""Tracing of tensors: fake tensors, torch.export, and Dynamo as far as it need not be imported (`dynamo.py`)."""

from __future__ import annotations

from typing import Any

from diptych.torch.private.require import attribute, declare, flag, need

_FAKE = "to see fake tensors"
fake_mode = need(_FAKE, "torch._guards.detect_fake_mode")
FakeTensor = need(_FAKE, "torch._subclasses.fake_tensor.FakeTensor")
is_fake = need(_FAKE, "torch._subclasses.fake_tensor.is_fake")
FakeTensorMode = need("to count the operations of a node", "torch._subclasses.fake_tensor.FakeTensorMode")
# torch 2.11 wraps constants in it while Dynamo traces.
FakeScriptObject = need("to read constants while tracing", "torch._library.fake_class_registry.FakeScriptObject")

# torch 2.11 traces `torch.compiler.is_exporting()` as True.
exporting = flag("to see torch.export", "torch.compiler._is_exporting_flag")

# Makes Dynamo run a function eagerly, without importing Dynamo, which `torch.compiler.disable` does.
run_eagerly = need("to keep functions out of graphs", "torch._disable_dynamo")
DYNAMO = "torch._dynamo"  # by which it is found once it is imported
COMPILED = "_orig_mod"  # the name of the module that torch.compile wraps, in the wrapper
declare("to see through torch.compile's wrapper", "torch._dynamo.eval_frame.OptimizedModule", COMPILED)
compiled_call = attribute("to see what was compiled in place", "torch.nn.Module", "_compiled_call_impl")  # or None

# --- what Dynamo knows where it traces, by a context of `dynamo.comptime` ---------------------------------------------

_TRACING = "to make states while Dynamo traces"
_COMPTIME, _HATCH = "torch._dynamo.comptime", "_i_will_not_complain_if_bc_breaks_"
_variable = attribute(_TRACING, f"{_COMPTIME}.ComptimeVar", f"{_HATCH}VariableTracker")
_translator = attribute(_TRACING, f"{_COMPTIME}.ComptimeContext", f"{_HATCH}InstructionTranslator")


def variable(context: Any, local: str) -> Any:
    """Returns Dynamo's variable of a local of traced code."""
    return _variable(context.get_local(local))()


def output(context: Any) -> Any:
    """Returns the object that lives as long as Dynamo traces a graph, to which attributes may be added."""
    return _translator(context)().output


def forget(context: Any, held: Any) -> None:
    """Makes Dynamo read a dict of a module again that it has read before, unless the traced code has changed it."""
    graph = output(context)
    seen = graph.side_effects.id_to_variable.get(id(held))
    if seen is not None and not graph.side_effects.is_modified(seen):
        del graph.side_effects.id_to_variable[id(held)]
        graph.variable_tracker_cache.pop(seen.source, None)


def push_mode(context: Any, local: str) -> None:
    """Pushes a mode that sees functions, a local of traced code, for the trace alone."""
    _translator(context)().symbolic_torch_function_state.push_torch_function_mode(variable(context, local))


def pop_mode(context: Any) -> None:
    """Ends the mode that `push_mode` has begun last, for the trace alone."""
    _translator(context)().symbolic_torch_function_state.pop_torch_function_mode()
