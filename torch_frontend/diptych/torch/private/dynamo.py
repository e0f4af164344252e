"""Names of torch._dynamo, which takes a second to import: import this file inside of functions, which Dynamo alone
runs or traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from diptych.torch.private.require import later, need

comptime = need("to run code where Dynamo traces", "torch._dynamo.comptime.comptime")
install_guard = need("to check a module before its graph runs", "torch._dynamo.guards.install_guard")
RestartAnalysis = need("to trace again what was traced without states", "torch._dynamo.exc.RestartAnalysis")
# CUDA graphs need memory that stays: buffers that are marked are not copied before each run.
static_address = need("to let graphs write to states in place", "torch._dynamo.mark_static_address")
skip_code = need("to keep regions out of graphs of their own", "torch._dynamo.eval_frame.skip_code")
_callbacks = need("to keep the seeds that are drawn while tracing", "torch._dynamo.callback.callback_handler")

# --- for captures -----------------------------------------------------------------------------------------------------

_CAPTURE = "to capture compiled models"
assume_constant_result = later(_CAPTURE, "torch._dynamo.assume_constant_result")
patch_config = later(_CAPTURE, "torch._dynamo.config.patch")
visit = later(_CAPTURE, "torch._dynamo.variables.base.VariableTracker.visit")
_current = later(_CAPTURE, "torch._dynamo.symbolic_convert.InstructionTranslator.current_tx")


def current_tracer() -> Any:
    """Returns what makes the graph, or the part of one, that is being traced."""
    return _current().output.current_tracer


# --- the end of a trace -----------------------------------------------------------------------------------------------


def after_tracing(run: Callable[[], object]) -> None:
    """Calls `run` once, when the frame that is being traced has been."""

    def once(_: Any) -> None:
        run()
        _callbacks.end_callbacks = [c for c in _callbacks.end_callbacks if c is not once]

    _callbacks.register_end_callback(once)
