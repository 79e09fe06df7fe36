"""xgrammar without transformers, and without torch in a process that does nothing but compile grammars.

xgrammar imports both, to annotate its functions and for helpers that work on tensors. They take four seconds of a slow
processor, and 200 MiB.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ..text.tokenizer import Tokenizer


class FastTokenizer:
    """What xgrammar reads from transformers' class of tokenizers, for which this one stands in `import_alone`."""

    def __init__(self, own: Tokenizer) -> None:
        self._own = own
        self.backend_tokenizer = own.fast

    def get_vocab(self) -> dict[str, int]:
        return dict(self._own.vocabulary)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._own.encode(text, add_special_tokens=add_special_tokens)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        assert self.backend_tokenizer is not None
        return [self.backend_tokenizer.id_to_token(token) for token in ids]

    def __getattr__(self, name: str) -> Any:
        """What only another release of xgrammar reads, transformers' own tokenizer has."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._own.huggingface, name)


class _Stand(ModuleType):
    """Stands for a module that nothing is asked of but names."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *arguments, **named: None})


def import_alone() -> None:
    """Import xgrammar without transformers, and without torch unless it has been imported; others may import both
    afterwards.

    Only for a process with a single thread, in which nobody passes tensors to an xgrammar without torch.
    """
    absent = [name for name in ("torch", "transformers") if name not in sys.modules]
    try:
        for name in absent:
            sys.modules[name] = None  # type: ignore[assignment]  # as if it were not installed
        import tvm_ffi  # noqa: F401  (on which xgrammar is built: it goes without)

        for name in absent:
            stand = sys.modules[name] = _Stand(name)
            if name == "transformers":
                vars(stand)["PreTrainedTokenizerFast"] = FastTokenizer
        import xgrammar  # noqa: F401
    finally:
        for name in absent:
            del sys.modules[name]


def for_xgrammar(tokenizer: Tokenizer) -> Any:
    """What `xgrammar.TokenizerInfo.from_huggingface` takes for this tokenizer."""
    from xgrammar import tokenizer_info

    is_alone: bool = vars(tokenizer_info).get("PreTrainedTokenizerFast") is FastTokenizer
    return FastTokenizer(tokenizer) if is_alone and tokenizer.fast is not None else tokenizer.huggingface
