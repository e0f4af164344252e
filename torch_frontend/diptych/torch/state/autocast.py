"""`autocast`: the region in which `diptych.torch.Linear` runs in low precision; `dry_run`: one that leaves no trace.

The state is thread-local, as that of `torch.amp.autocast`: a region entered in one thread is not seen by another. It is
one object that lives as long as the process, so that a compiled function guards on the recipe's value alone: a recipe
that is built anew each step and equals the last one compiles nothing anew.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from diptych.common.arguments import require_recipe, require_switches
from diptych.common.errors import HighPrecisionWarning
from diptych.common.recipes import DEFAULT_RECIPE, Recipe
from diptych.torch.graph.eager_only import outside
from diptych.torch.graph.engine import run_part
from diptych.torch.primitives import constants  # registers recipes, before any of them is traced  # noqa: F401
from diptych.torch.private.autograd import backward_pass
from diptych.torch.private.functorch import hide_transforms, transforms_active
from diptych.torch.private.graphs import exporting
from diptych.torch.private.sharding import INFERENCE, STAGE_CLASSES, STAGES

F = TypeVar("F", bound=Callable[..., Any])


class _State(threading.local):
    # Set per thread in __init__: torch 2.11 does not guard on a class attribute that a thread's own value shadows.
    def __init__(self) -> None:
        self.recipe: Recipe | None = None
        self.calibrating: Recipe | None = None
        self.amax_groups: Mapping[str, Any] = {}
        self.dry = False  # inside of `dry_run`
        # True inside of a checkpoint that was entered where calls record. Grad mode does not tell, since the reentrant
        # kind of checkpoint runs its forward without it.
        self.taped = False
        self.inside = False  # True inside of any region, also of one with enabled=False
        self.played = False  # True while a recomputation runs, which is in a region only if its forward was in one
        self.depth = 0  # the number of regions around a call that quantize or calibrate
        # Delayed scales are updated once in each outermost region. Eager code compares the region's number; graphs,
        # which cannot guard on a value that each step changes, compare a counter, int64 [1] on each device.
        self.region = 0
        self.steps: dict[str, Tensor] = {}


STATE = _State()
_regions = itertools.count(1)
_REGION = ("recipe", "calibrating", "amax_groups", "depth", "dry", "taped", "inside", "played", "steps")
# The values of `_REGION` that a call finds in a backward pass, until a region is entered there or a recomputation
# begins. A region that is entered in a backward pass begins no step of delayed scaling, so the depth is 1.
_IN_BACKWARD = (None, None, {}, 1, False, False, False, False)


def region() -> list[Any]:
    """Returns the values of this thread's region, all that a call reads, in the order of `_REGION`."""
    return [getattr(STATE, name) for name in _REGION]


def enter_region(held: list[Any]) -> None:
    """Restores the region of which `held` has the values, as `region` returned them, in this thread."""
    for name, value in zip(_REGION, held, strict=True):
        setattr(STATE, name, value)


def outside_of_regions(run: F) -> F:
    """Makes a function that runs a backward pass hide the regions around it from the code that the pass calls.

    Backward runs what forward recorded. On a GPU it runs in threads that see none of the caller's regions; so hooks,
    functions and recomputations find none on the CPU either.
    """

    @functools.wraps(run)
    def run_outside(
        tensors: Any, grads: Any, retain_graph: Any, create_graph: Any, inputs: Any, *args: Any, **how: Any
    ) -> Any:
        outer = None
        if STATE.inside or STATE.played or STATE.taped or STATE.dry:
            outer = region()
            enter_region([*_IN_BACKWARD, STATE.steps])
        try:
            if not inputs:
                return run(tensors, grads, retain_graph, create_graph, inputs, *args, **how)
            for asked in ASKED_OF_BACKWARD:
                inputs = asked(tensors, inputs, how.get("accumulate_grad", False))
            return run_part(run, tensors, grads, retain_graph, create_graph, inputs, *args, **how)
        finally:
            if outer is not None:
                enter_region(outer)

    return run_outside  # type: ignore[return-value]


# Functions that change which gradients a backward pass computes. Each gets the tensors at which the pass begins, the
# tensors whose gradients it is asked for (`inputs=`), and whether it accumulates these; it returns other `inputs`.
ASKED_OF_BACKWARD: list[Callable[[Any, Any, bool], Any]] = []


def unrecorded() -> bool:
    """Returns whether it is unknown which region a call belongs to: in a backward pass, outside of recomputations and
    of regions that were entered in the pass."""
    return not (STATE.inside or STATE.played) and backward_pass() != -1


class _Process:
    entered = False  # whether a region was entered in this process


def warn_without_regions(module: str) -> None:
    """Warns, once, that a module without a recipe trains in high precision, if this process never entered a region.
    Modules call this when they train outside of regions."""
    if not _Process.entered:
        _Process.entered = True
        warnings.warn(
            f"{module} runs in high precision: enter diptych.torch.autocast(recipe=...), or give the module a recipe "
            "(no region was entered in this process so far; reported once)",
            HighPrecisionWarning,
            stacklevel=4,
        )


def make_step_counter(device: torch.device) -> Tensor:
    """Returns this thread's count of outermost regions, a tensor int64 [1] on a device. The first call makes it."""
    key = str(device)
    if key not in STATE.steps:
        with torch.inference_mode(False):
            STATE.steps[key] = torch.ones(1, dtype=torch.int64, device=device)
    return STATE.steps[key]


def _count_step() -> None:
    """Counts a region on each device."""
    for step in STATE.steps.values():
        step.add_(1)


def _at_entry() -> None:
    _Process.entered = True
    for name in AT_ENTRY:
        if name in sys.modules and not _is_being_imported(sys.modules[name]):
            AT_ENTRY.pop(name)()
            return _at_entry()


def _is_being_imported(module: Any) -> bool:
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


def _before_steps_are_traced(context: Any) -> None:
    """Makes the step counters while Dynamo traces the entry of a region: it does not see a counter made later."""
    _at_entry()
    made = [make_step_counter(torch.device("cpu"))]
    if torch.cuda.is_initialized():
        made.append(make_step_counter(torch.device("cuda", torch.cuda.current_device())))
    from diptych.torch.private.dynamo import static_address

    for step in made:
        static_address(step, guard=False)


def is_autocast_enabled() -> bool:
    """Returns whether this thread is inside an enabled `autocast` region."""
    return STATE.recipe is not None


def get_autocast_recipe() -> Recipe | None:
    """Returns the recipe of this thread's innermost region; None outside of regions and in a disabled one."""
    return STATE.recipe


def amax_group(recipe: Recipe, groups: Mapping[str, Any], delayed: bool = False) -> Any:
    """Returns the process group of a region that a recipe names; None if the recipe names none.

    `delayed`: the amaxes are those of delayed scaling, which the region may reduce though the recipe names no group.

    **Raises** ValueError if the region does not name the recipe's group.
    """
    if not recipe.amax_group:
        return groups.get("") if delayed else None
    group = groups.get(recipe.amax_group)
    if group is None:
        raise ValueError(
            f"{type(recipe).__name__}(amax_group={recipe.amax_group!r}): the region names no such group; "
            f"enter autocast(recipe=..., amax_groups={{{recipe.amax_group!r}: process_group}})"
        )
    return group


class autocast:
    """Region whose `Linear` modules quantize by a recipe; a context manager and a decorator, free to nest.

    **Arguments:** `enabled`: False runs the region in high precision, also inside an enabled one. `recipe`: None is
    `DEFAULT_RECIPE`, Float8CurrentScaling(). A module's own recipe goes before that of the region, and applies outside
    of regions too. `amax_groups`: process groups by the names that recipes give in `Recipe.amax_group`; None keeps
    those of the region around. `amax_reduction_group`: a process group that delayed scales' amaxes are reduced over
    where the recipe names none. `calibrating`: with `enabled=False`, modules run in high precision and collect the
    amaxes that `recipe`'s delayed scales come from.

    Each outermost region is one step to delayed scaling: a module's scales are updated when it first runs in one.

    **Raises:** ArgumentError, a TypeError, for a `recipe` that is none and for an `enabled` or `calibrating` that is no
    bool, such as a recipe that is given without its name; TypeError if what is decorated is a generator or a coroutine,
    whose body would run outside of the region.

    What runs in backward is fixed when forward runs, so `backward()` may stand inside or outside of the region, and a
    region around it changes nothing. Recomputations under `diptych.torch.checkpoint` and every kind of
    `torch.utils.checkpoint` run in the region of their forward; a region that is entered inside of what runs again goes
    before it. On torch 2.11 a region that is entered inside of compiled code stays entered if the running graph raises.
    """

    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
        *,
        amax_groups: Mapping[str, Any] | None = None,
    ) -> None:
        if amax_reduction_group is not None:
            amax_groups = {**(amax_groups or {}), "": amax_reduction_group}
        # While Dynamo traces with torch 2.11, isinstance sees a wrapper in place of a recipe. A recipe that is wrong
        # makes `Linear` fail then.
        if not torch.compiler.is_compiling():
            require_switches("autocast", enabled=enabled, calibrating=calibrating)
            require_recipe("autocast", recipe)
        self.enabled = bool(enabled)
        self.recipe = DEFAULT_RECIPE if recipe is None else recipe
        self.amax_groups = amax_groups
        self.calibrating = bool(calibrating) and not self.enabled
        self._outer: list[tuple[Recipe | None, Recipe | None, bool]] = []
        self._outer_groups: list[Mapping[str, Any]] = []

    def __enter__(self) -> autocast:
        compiling = torch.compiler.is_compiling()
        if not compiling:
            _at_entry()
        counted = self.enabled or self.calibrating
        # Neither an exported program nor a backward pass counts steps.
        if counted and STATE.depth == 0 and not exporting():
            if compiling:
                if transforms_active():  # a transform of torch.func cannot write to the counters
                    return outside(self.__enter__)
                from diptych.torch.private.dynamo import comptime  # importing torch._dynamo takes a second

                comptime(_before_steps_are_traced)
                _count_step()
            elif backward_pass() == -1:
                if transforms_active():
                    with hide_transforms():
                        _count_step()
                else:
                    _count_step()
                STATE.region = next(_regions)
        # The state is set last: if the entry raises, even by Ctrl-C, `__exit__` does not run.
        if self.amax_groups is not None:
            self._outer_groups.append(STATE.amax_groups)
        self._outer.append((STATE.recipe, STATE.calibrating, STATE.inside))
        STATE.inside = True
        STATE.recipe = self.recipe if self.enabled else None
        STATE.calibrating = self.recipe if self.calibrating else None
        if self.amax_groups is not None:
            STATE.amax_groups = self.amax_groups
        if counted:
            STATE.depth += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        STATE.recipe, STATE.calibrating, STATE.inside = self._outer.pop()
        if self.amax_groups is not None:
            STATE.amax_groups = self._outer_groups.pop()
        if self.enabled or self.calibrating:
            STATE.depth -= 1

    def __call__(self, fn: F) -> F:
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
            raise TypeError(
                f"autocast cannot decorate the generator or coroutine {getattr(fn, '__name__', fn)!r}: its body runs "
                "after the region has ended; enter the region inside of it"
            )
        enabled, recipe, groups, calibrating = self.enabled, self.recipe, self.amax_groups, self.calibrating

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            # Each call enters its own region: calls may recurse and run in threads.
            with autocast(enabled, calibrating, recipe, amax_groups=groups):
                return fn(*args, **kwargs)

        return wrapped  # type: ignore[return-value]


# --- calls that leave no trace ---------------------------------------------------------------------------------------


def recording() -> bool:
    """Returns whether a call that begins now, of a module in training, records amaxes, counts as a step and uses up
    random offsets. It does in grad mode, or in a checkpoint that was entered in grad mode, but not in a dry run."""
    return not STATE.dry and (torch.is_grad_enabled() or STATE.taped)


class dry_run:
    """Region whose calls leave no trace in states: a context manager and a decorator, free to nest.

    Modules quantize as usual, by the present scales. They record no amax, update no scale, count as no step and use up
    no offset of a random generator. The same holds for their backwards, wherever these run; they also drop weight
    gradients that would go to `main_grad` or wait for `backward_dw`. In a calibrating region nothing is collected.
    Calls in evaluation or without grad mode leave no trace in states without `dry_run`. Use it for calls in training
    mode on data that is not trained on: shape inference, warm-ups, profiling. The shape inference of
    torch.distributed.pipelining is a dry run by itself.
    """

    def __init__(self) -> None:
        self._outer: list[bool] = []

    def __enter__(self) -> dry_run:
        self._outer.append(STATE.dry)
        STATE.dry = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        STATE.dry = self._outer.pop()

    def __call__(self, fn: F) -> F:
        if inspect.isgeneratorfunction(fn) or inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
            raise TypeError(
                f"dry_run cannot decorate the generator or coroutine {getattr(fn, '__name__', fn)!r}: its body runs "
                "after the region has ended; enter the region inside of it"
            )

        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with dry_run():
                return fn(*args, **kwargs)

        return wrapped  # type: ignore[return-value]


# Functions that wrap methods of torch's pipeline stages, by the method's name. A version of torch may lack a method.
STAGE_METHODS: dict[str, Callable[[Any], Any]] = dict.fromkeys(INFERENCE, dry_run())
_recognized: dict[tuple[str, str], Any] = {}


def recognize_pipelines() -> None:
    """Wraps methods of the stages of torch.distributed.pipelining, if that module is imported, so that their shape
    inference becomes a dry run.

    Shape inference may run in grad mode on uninitialised memory, where neither a module nor a graph's guards can tell
    it from training.
    """
    for kind in STAGE_CLASSES:
        stage: Any = getattr(sys.modules.get(STAGES), kind, None)
        for name, wrap in STAGE_METHODS.items():
            method = getattr(stage, name, None)
            if method is not None and method is not _recognized.get((kind, name)):
                _recognized[kind, name] = wrap(method)
                setattr(stage, name, _recognized[kind, name])


AT_ENTRY: dict[str, Callable[[], None]] = {STAGES: recognize_pipelines}
"""Functions by the name of a module of torch, which may be imported late. The first region that is entered after the
module was imported runs its function, once."""
