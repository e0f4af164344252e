"""Filters for `convert`: kinds of layers by name, `head`, `adapters`, `small(...)`, `first_and_last_blocks(...)`.

`convert(model, filter=kind)` converts the layers of a kind. Kinds are combined with `~`, `|` and `&`, also with
functions of (module, name):

    convert(model, filter=~(filters.head | filters.first_and_last_blocks(1)))   # all layers but these
    convert(model, filter=filters.everything)                                   # adapters and small layers too

Adapters and layers with fewer than 16 features on a side are left, unless the filter names `adapters`, `small` or
`everything`: a filter that names a kind decides on it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.parameter import UninitializedParameter

from diptych.common.errors import ArgumentError

FEATURES = 16
"""Layers with fewer input or output features are left by default: FP8 tensor cores take extents in multiples of 16, and
a scale of NVFP4 or MXFP8 serves 16 or 32 elements."""

Matches = Callable[[nn.Module, str], bool]
Decides = Callable[[nn.Module, str], tuple[bool, str]]

__all__ = ["FEATURES", "Kind", "adapters", "everything", "first_and_last_blocks", "head", "small"]

# --- kinds and their combinations ------------------------------------------------------------------------------------


class Kind:
    """A kind of layers, which `convert` takes as its `filter`. It is combined by `~`, `|` and `&` with other kinds and
    with functions of (module, name) that return a bool."""

    def __init__(self, name: str, words: str, find: Callable[[nn.Module], Matches]) -> None:
        self.name, self.words, self._find = name, words, find

    def __invert__(self) -> Kind:
        return _Not(self)

    def __or__(self, other: Any) -> Kind:
        return _Pair("|", self, as_kind(other))

    def __and__(self, other: Any) -> Kind:
        return _Pair("&", self, as_kind(other))

    def __ror__(self, other: Any) -> Kind:
        return as_kind(other) | self

    def __rand__(self, other: Any) -> Kind:
        return as_kind(other) & self

    def __repr__(self) -> str:
        return f"filters.{self.name}"

    def leaves(self) -> Iterator[Kind]:
        """Yields the kinds of which this one is made."""
        yield self

    def decide(self, model: nn.Module) -> Decides:
        """Returns a function of a layer and its qualified name: whether the layer is of the kind, and in words what
        has decided.

        **Raises:** ValueError if the kind names a part that the model lacks.
        """
        matches = self._find(model)

        def decides(module: nn.Module, name: str) -> tuple[bool, str]:
            found = matches(module, name)
            return found, f"{'' if found else 'not '}{self.words} ({self!r})"

        return decides


class _Not(Kind):
    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def __repr__(self) -> str:
        return f"~{self.kind!r}"

    def leaves(self) -> Iterator[Kind]:
        yield from self.kind.leaves()

    def decide(self, model: nn.Module) -> Decides:
        inner = self.kind.decide(model)

        def decides(module: nn.Module, name: str) -> tuple[bool, str]:
            found, words = inner(module, name)
            return not found, words

        return decides


class _Pair(Kind):
    def __init__(self, sign: str, first: Kind, second: Kind) -> None:
        self.sign, self.first, self.second = sign, first, second

    def __repr__(self) -> str:
        return f"({self.first!r} {self.sign} {self.second!r})"

    def leaves(self) -> Iterator[Kind]:
        yield from self.first.leaves()
        yield from self.second.leaves()

    def decide(self, model: nn.Module) -> Decides:
        first, second = self.first.decide(model), self.second.decide(model)

        def decides(module: nn.Module, name: str) -> tuple[bool, str]:
            found, words = first(module, name)
            return (found, words) if found == (self.sign == "|") else second(module, name)

        return decides


class _Function(Kind):
    """A function of (module, name). **Raises** ArgumentError where it returns no bool."""

    def __init__(self, function: Matches) -> None:
        self.name, self.function = "", function

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)

    def decide(self, model: nn.Module) -> Decides:
        def decides(module: nn.Module, name: str) -> tuple[bool, str]:
            wanted = self.function(module, name)
            if not isinstance(wanted, bool):
                raise ArgumentError(f"convert: filter returned {wanted!r} for {name!r}; it must return True or False")
            return wanted, "the filter left it"

        return decides


def as_kind(given: Any) -> Kind:
    """Returns a kind as it is, and a function of (module, name) as a kind. **Raises** ArgumentError for others."""
    if isinstance(given, Kind):
        return given
    if given is small or given is first_and_last_blocks:
        raise ArgumentError(f"convert: filter is diptych.torch.filters.{given.__name__}, which must be called first")
    if not callable(given):
        raise ArgumentError(
            "convert: filter must be one of diptych.torch.filters or a function of (module, name), "
            f"got {type(given).__name__}"
        )
    function: Any = given
    return _Function(function)


# --- the kinds -------------------------------------------------------------------------------------------------------

_HEADS = {"classifier", "embed_out", "fc", "head", "heads", "lm_head", "output", "output_layer", "score"}


def _heads(model: nn.Module) -> Matches:
    """An output layer by what the model says, by a weight that it shares with an embedding, or by its name."""
    found: set[int] = set()
    for getter in ("get_output_embeddings", "get_classifier"):  # transformers', timm's
        said = getattr(model, getter, lambda: None)()
        found |= {id(m) for m in said.modules()} if isinstance(said, nn.Module) else set()
    embedded = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    numbered = tuple([f"{path}." if path else "" for path, _ in _stacks(model)])
    for path, module in model.named_modules():
        tied = not isinstance(module, nn.Embedding) and id(getattr(module, "weight", None)) in embedded
        named = not _HEADS.isdisjoint(path.split(".")) and not (numbered and path.startswith(numbered))
        if tied or named:
            found.add(id(module))
    layers = [m for m in model.modules() if id(m) in found and _extents(m)]
    if not layers:
        raise ValueError(
            "filters.head: the model has no output layer: none that get_output_embeddings() or get_classifier() "
            f"returns, that shares its weight with an embedding or is named {', '.join(sorted(_HEADS))}; give a "
            "function of (module, name)"
        )
    return lambda module, name: id(module) in found


def _stacks(model: nn.Module) -> list[tuple[str, list[nn.Module]]]:
    """Returns the outermost containers whose children are numbered blocks, each of several modules."""
    found: list[tuple[str, list[nn.Module]]] = []
    for path, module in model.named_modules():
        inner = [each for each, _ in found if not each or path.startswith(f"{each}.")]
        children = dict(module.named_children())
        blocks = len(children) > 1 and all(key.isdigit() for key in children)
        if not inner and blocks and all([any(True for _ in child.children()) for child in children.values()]):
            found.append((path, list(children.values())))
    return found


def first_and_last_blocks(count: int = 1) -> Kind:
    """The layers in the first and in the last `count` blocks of each stack. A stack is an outermost container with
    numbered children that are modules of several parts: `model.layers`, `transformer.h`, `encoder.layer`.

    **Raises:** ValueError for a count below 1; `convert` raises it for a model without such a stack.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"filters.first_and_last_blocks: count must be an int of 1 or more, got {count!r}")

    def find(model: nn.Module) -> Matches:
        stacks = _stacks(model)
        if not stacks:
            raise ValueError(
                f"filters.first_and_last_blocks({count}): the model has no stack of numbered blocks; give a function "
                "of (module, name)"
            )
        outer = {id(m) for _, blocks in stacks for block in blocks[:count] + blocks[-count:] for m in block.modules()}
        return lambda module, name: id(module) in outer

    words = "in the first or last block" if count == 1 else f"in the first or last {count} blocks"
    return Kind(f"first_and_last_blocks({count})", words, find)


def small(features: int = FEATURES) -> Kind:
    """Layers with fewer than `features` input or output features; those of experts count for each expert.

    **Raises:** ValueError for features below 1.
    """
    if isinstance(features, bool) or not isinstance(features, int) or features < 1:
        raise ValueError(f"filters.small: features must be an int of 1 or more, got {features!r}")
    words = f"with fewer than {features} input or output features"
    return Kind(
        f"small({features})",
        words,
        lambda model: lambda module, name: min(_extents(module), default=features) < features,
    )


def _extents(module: nn.Module) -> list[int]:
    """Returns the extents of a layer's matrices; of stacks the extents of each matrix. Parameters that have no shape
    yet do not count, nor do vectors, which lie in stacks of matrices as [E, N]."""
    held = [p for p in module.parameters(recurse=False) if not isinstance(p, UninitializedParameter)]
    rank = max([2, *[p.dim() for p in held]])
    return [extent for p in held if p.dim() == rank for extent in p.shape[-2:]]


def _adapters(model: nn.Module) -> Matches:
    """Layers beside the `base_layer` of one module, as PEFT's adapters are; layers under a name that begins with
    "lora"; and pairs [r, K] and [N, r] below a module with a weight [N, K] of its own."""
    found: set[int] = set()
    for path, module in model.named_modules():
        if path.rpartition(".")[2].lower().startswith("lora"):
            found |= {id(m) for m in module.modules()}
        children = dict(module.named_children())
        if isinstance(base := children.get("base_layer"), nn.Module):
            found |= {id(m) for m in module.modules() if m is not module} - {id(m) for m in base.modules()}
        found |= _factors(module)
    return lambda module, name: id(module) in found


def _factors(module: nn.Module) -> set[int]:
    """Returns the ids of the layers [r, K] and [N, r] below a module with a weight [N, K] of its own."""
    weight, layers = getattr(module, "weight", None), [m for m in module.children() if isinstance(m, nn.Linear)]
    if not isinstance(weight, nn.Parameter) or isinstance(weight, UninitializedParameter) or weight.dim() != 2:
        return set()
    n, k = weight.shape
    downs = [m for m in layers if m.in_features == k and m.out_features < min(n, k)]
    pairs = [
        (down, up) for down in downs for up in layers if (up.out_features, up.in_features) == (n, down.out_features)
    ]
    return {id(m) for pair in pairs for m in pair}


head = Kind("head", "the model's output layer", _heads)
"""Output layers: what `get_output_embeddings()` or `get_classifier()` returns, layers that share their weight with an
embedding, and layers outside of blocks under a name such as `lm_head`, `head` or `classifier`."""

adapters = Kind("adapters", "an adapter's factor", _adapters)
"""Factors of adapters such as LoRA: layers beside a `base_layer`, under a name that begins with "lora", or in pairs of
low rank below a module with a weight of its own. They are left by default."""

everything = Kind("everything", "a layer", lambda model: lambda module, name: True)
"""All layers, adapters and small ones too."""

# --- for convert -----------------------------------------------------------------------------------------------------

Why = Callable[[nn.Module, str], str]


def left_by(filter: Any, model: nn.Module) -> tuple[Why, Why]:
    """Returns two functions of a layer and its qualified name, which return why the layer is left, or "". The first
    asks the filter, None for all layers; the second knows what is left because the filter does not name it.

    **Raises:** what `as_kind` and `Kind.decide` raise.
    """
    asked = everything if filter is None else as_kind(filter)
    named = set() if filter is None else {_base(leaf) for leaf in asked.leaves()}
    default = everything
    for kind in (small(), adapters):  # adapters are asked about first, since most of them are small too
        if named.isdisjoint((_base(everything), _base(kind))):
            default = ~kind & default
    return _why(asked.decide(model)), _why(default.decide(model))


def _base(kind: Kind) -> str:
    return kind.name.partition("(")[0]


def _why(decides: Decides) -> Why:
    def why(module: nn.Module, name: str) -> str:
        wanted, words = decides(module, name)
        return "" if wanted else words

    return why
