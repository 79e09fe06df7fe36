"""What a model's layers do, as its own code shows in a first pass: which attend, with which rules, and which keep a
running state."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from ...schemas.errors import ModelLoadError
from ..plain.model import PlainModel
from .attention import Rules, attend_alone
from .decoding.linear import noting_reads
from .kv.kv_cache import LayerSpec

if TYPE_CHECKING:  # it imports transformers
    from .state.layer import StateLayer


_NOTHING = LayerSpec(None, 1, 8, 8)  # of a model that does not attend: no layer writes there


class Layers(NamedTuple):
    """`specs` and `rules` are those of the layers that attend, whose indices in the model `numbers` maps to theirs.

    A layer that attends to the keys and values of an earlier one, by the same rules, has the number of that one.
    `attention_flops` are for each key that a query attends to, in all layers; `logits` are what the pass returned.
    Of linear layers in `reads` the model's own code reads the weights, so they have to stay what they are.
    """

    specs: list[LayerSpec]
    rules: list[Rules]
    numbers: dict[int, int]
    stateful: list[StateLayer]
    attention_flops: int
    logits: Tensor
    reads: Set[nn.Module]


def observe(model: Any, name: str, run: Callable[[Callable[..., Tensor]], Tensor]) -> Layers:
    """Let `run` compute a few tokens, with an attention function that notes each call.

    Puts this backend's layers with a running state in the place of the model's. Raises `ModelLoadError`.
    """
    config = model.config.get_text_config()
    stateful: dict[int, Any] = {}
    feeding: set[int] = set()
    first_pass: AbstractContextManager[None] = nullcontext()
    if not isinstance(model, PlainModel):
        from .state.layers import find_states, layers_that_feed, replace_states, without_advice  # transformers is slow

        stateful, feeding, first_pass = find_states(model, name), layers_that_feed(config), without_advice()
    if not (stateful or model._supports_attention_backend):
        raise ModelLoadError(f"{name} does not support another attention function; use --backend hf")
    if "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ModelLoadError(f"{name} always computes the logits of all tokens; use --backend hf")
    seen: dict[int, LayerSpec] = {}
    rules_of: dict[int, Rules] = {}
    sources: dict[int, int] = {}  # of keys and values: the layer itself or an earlier one
    first_with: dict[tuple[int, int], tuple[int, Tensor, Tensor]] = {}  # kept alive, so that addresses stay theirs
    flops = 0

    def note(index: int, query: Tensor, key: Tensor, value: Tensor, rules: Rules, window: int | None) -> Tensor:
        nonlocal flops
        if index in seen:
            raise ModelLoadError(f"{name} attends twice in layer {index}; use --backend hf")
        if rules.choice is not None and query.is_cuda:
            raise ModelLoadError(
                f"{name} chooses the tokens that it attends to, which runs on a CPU alone; set device to cpu"
            )
        seen[index] = LayerSpec(window, key.shape[0], key.shape[2], value.shape[2])
        rules_of[index] = rules
        source, *_ = first_with.setdefault((key.data_ptr(), value.data_ptr()), (index, key, value))
        others = rules_of[source]
        is_same = seen[source] == seen[index] and others[:2] == rules[:2] and others.sinks is rules.sinks
        sources[index] = source if is_same else index
        flops += 2 * query.shape[0] * (key.shape[2] + value.shape[2])
        return attend_alone(query, key, value, rules)

    try:
        with first_pass, noting_reads(model) as reads:
            logits = run(note)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"the backend 'paged' cannot run {name} ({error}); use --backend hf") from error
    if {*seen, *stateful, *feeding} != set(range(config.num_hidden_layers)):
        raise ModelLoadError(
            f"{name} has {config.num_hidden_layers} layers, and only {len(seen)} of them attend; use --backend hf"
        )
    sliding = [kind == "sliding_attention" for kind in getattr(config, "layer_types", None) or ()]
    windows = {index for index, spec in seen.items() if spec.window is not None}
    if sliding and windows != {index for index, slides in enumerate(sliding) if slides}:
        raise ModelLoadError(f"{name} does not pass its windows to the attention function; use --backend hf")
    storing = sorted(index for index, source in sources.items() if index == source)
    numbers = {index: storing.index(source) for index, source in sources.items()}
    own = replace_states(model) if stateful else []
    reads -= {module for layer in own for module in layer.modules()}  # no longer theirs
    if not seen:  # a prefix is found by its blocks, which then hold nothing
        return Layers([_NOTHING], [Rules(1.0)], {}, own, 0, logits, reads)
    return Layers([seen[i] for i in storing], [rules_of[i] for i in storing], numbers, own, flops, logits, reads)
