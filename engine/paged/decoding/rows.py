"""Embeddings whose numbers are in no memory: their rows are read from blocks when they are looked up.

A module of embeddings keeps what reads them in the attribute `ROWS`. Its own code, whatever it does with the rows, runs
on a table of those alone that its tokens need.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...cpu.rows import Rows, Table

ROWS = "rows"
"""The attribute of a module whose weight is absent: what reads its rows."""

_IDS = {"input", "input_ids"}  # what the first argument of `forward` is called


def rows_of(module: nn.Module) -> Rows | None:
    """What reads the rows of a module of embeddings; None if they lie in memory as numbers."""
    found: Rows | None = vars(module).get(ROWS)
    return found


def look_up(ids: Tensor, weight: Tensor, rows: Rows | None) -> Tensor:
    """The embeddings [T, E] of tokens [T], by `rows` if there are any."""
    return functional.embedding(ids, weight) if rows is None else rows(ids)


def table_of(weight: Tensor, rows: Rows | None, dtype: torch.dtype, address: Callable[[Tensor], int]) -> Table:
    """The same for the compiled kernels. `address` keeps a tensor alive, and tells where it is."""
    return Table(address(weight.to(dtype).contiguous())) if rows is None else rows.compiled


def is_table(module: nn.Module) -> bool:
    """Whether a module looks up the tokens that it is given in a weight, which is all that it has."""
    if not isinstance(module, nn.Embedding) or [name for name, _ in module.named_parameters()] != ["weight"]:
        return False
    _, first, *_ = inspect.signature(type(module).forward).parameters
    return first in _IDS


def hold_rows(module: nn.Module, rows: Rows) -> None:
    """A table whose weight is absent computes with `rows` from now on."""
    vars(module)[ROWS] = rows
    hook_rows(module, lambda _, ids: rows(ids))


def hook_rows(module: Any, read: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
    """While it runs, the weight of a table is what `read` makes of it and of the tokens [N] that are looked up, [N, E].

    Returns what undoes this. A later hook runs inside of earlier ones.
    """
    before: list[tuple[Tensor, int | None]] = []

    def narrow(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        name = next((each for each in _IDS if each in named), None)
        ids, places = torch.unique(args[0] if name is None else named[name], return_inverse=True)
        before.append((module.weight.data, module.padding_idx))
        module.weight.data, module.padding_idx = read(module.weight.data, ids), None
        return ((places, *args[1:]), named) if name is None else (args, named | {name: places})

    def restore(*_: Any) -> None:
        module.weight.data, module.padding_idx = before.pop()

    hooks = (
        module.register_forward_pre_hook(narrow, with_kwargs=True),
        module.register_forward_hook(restore, prepend=True, always_call=True),
    )

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo
