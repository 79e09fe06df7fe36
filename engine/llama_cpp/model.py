"""A GGUF file in llama.cpp's hands, through the C interface of the package llama-cpp-python.

Each sequence has a part of the cache of its own, so that what one computes cannot depend on where others lie. Keys and
values are bfloat16, for which llama.cpp attends row by row: in its kernels for other types the bits of a row depend on
how many are computed together, or on the number of threads. Its products may round one row otherwise than several, or a
few rows otherwise than many; that depends on the types of the weights, and the model finds it out when it loads.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from ...schemas.errors import ModelLoadError
from ..backend import ProgressCallback
from .piece import Logits, Piece

_log = logging.getLogger(__name__)

_BFLOAT16 = 30  # GGML_TYPE_BF16
_ERROR = 3  # the level of llama.cpp's log from which a line says why something failed
_PROBED, _ALONE = 40, 12  # tokens whose logits are compared, and how many of them are computed one by one
_FEW = 3  # rows that have the bits of one row where many have others: Q4_K and Q6_K are computed by fours
_UNITS = 1000  # steps of the progress of loading


class LlamaModel:
    """A loaded model with `num_sequences` sequences of at most `length` tokens each. Use it from one thread.

    Pieces of up to `steady` tokens have the bits that their tokens have one by one, beside any others; larger ones have
    the same bits whenever they are computed. It is 0 if not even pieces of a few tokens have them.
    """

    def __init__(
        self,
        path: Path,
        num_sequences: int,
        length: int,
        most_tokens: int,
        threads: int,
        progress: ProgressCallback | None = None,
    ) -> None:
        """`most_tokens` is the largest number of tokens of a call. Raises `ModelLoadError`."""
        self._length, self._num_sequences = length, num_sequences
        self._lines: list[str] = []  # llama.cpp's own errors while it loads
        self._on_log = llama_cpp.llama_log_callback(self._take_line)  # kept: llama.cpp calls it later
        llama_cpp.llama_log_set(self._on_log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = self._load(path, progress)
        self._vocabulary_size = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))
        self._context = self._open(path, most_tokens, threads)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(most_tokens, 0, 1)
        self._most_tokens = most_tokens
        self._needs_neighbour = False
        self.steady = 0  # set by `_probe`
        self._probe()

    def compute(self, piece: Piece) -> Logits:
        """Compute a piece; returns the logits of all of its tokens if they are wanted, else of the last one, [N, V].

        Raises `RuntimeError` if llama.cpp fails; then the sequence must be cleared.
        """
        if len(piece.tokens) == 1:
            return self.advance([piece])
        wanted = len(piece.tokens) if piece.wanted else 2  # two: see `advance`
        first = len(piece.tokens) - wanted
        logits = self._decode([piece], [index >= first for index in range(len(piece.tokens))])
        return logits if piece.wanted else logits[1:]

    def advance(self, pieces: Sequence[Piece]) -> Logits:
        """Compute pieces of one token, each of another sequence; returns their logits [N, V], in their order.

        Raises `RuntimeError` if llama.cpp fails; then the sequences must be cleared.
        """
        found: Logits = np.empty((len(pieces), self._vocabulary_size), np.float32)
        at = {piece.sequence: index for index, piece in enumerate(pieces)}
        for run in _runs(sorted(at), self.steady or self._most_tokens):  # llama.cpp computes no others together
            rows = [pieces[at[sequence]] for sequence in run]
            neighbour = self._neighbour(run[0]) if len(run) == 1 and self._needs_neighbour else None
            if neighbour is None:
                logits = self._decode(rows, [True] * len(rows))
            else:
                both = sorted([*rows, neighbour])
                logits = self._decode(both, [True, True])[[both.index(rows[0])]]
                llama_cpp.llama_memory_seq_rm(self._memory, neighbour.sequence, neighbour.position, -1)
            found[[at[sequence] for sequence in run]] = logits
        return found

    def clear(self, sequence: int) -> None:
        """Forget the tokens of a sequence."""
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def close(self) -> None:
        """Free everything."""
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def _load(self, path: Path, progress: ProgressCallback | None) -> Any:
        def report(share: float, _: Any) -> bool:
            if progress is not None:
                progress(round(share * _UNITS), _UNITS)
            return True

        on_progress = llama_cpp.llama_progress_callback(report)
        params = llama_cpp.llama_model_default_params()
        params.n_gpu_layers = 0
        none = (ctypes.c_void_p * 1)(None)  # no device besides the CPU, whatever llama.cpp was built for
        params.devices = ctypes.cast(none, ctypes.c_void_p)
        params.progress_callback = on_progress
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        if not model:
            raise self._failed(path)
        return model

    def _open(self, path: Path, most_tokens: int, threads: int) -> Any:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self._num_sequences * self._length
        params.n_batch = params.n_ubatch = most_tokens
        params.n_seq_max = self._num_sequences
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        params.type_k = params.type_v = _BFLOAT16
        params.offload_kqv = params.op_offload = False
        params.swa_full = False
        params.kv_unified = False
        context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            llama_cpp.llama_model_free(self._model)
            raise self._failed(path)
        return context

    def _failed(self, path: Path) -> ModelLoadError:
        reason = "; ".join(self._lines[-2:]) or "it gives no reason"
        return ModelLoadError(f"llama.cpp cannot load {path}: {reason}; use another file or the backend 'paged'")

    def _take_line(self, level: int, text: bytes, _: Any) -> None:
        line = text.decode("utf-8", errors="replace").strip()
        if level == _ERROR and line:
            self._lines.append(line)
            _log.warning("llama.cpp: %s", line)

    def _probe(self) -> None:
        """Find out how many tokens have together the bits of one, and whether that one needs a neighbour."""
        tokens = [(7 * index + 1) % self._vocabulary_size for index in range(min(_PROBED, self._most_tokens))]
        together = [Piece(0, 0, tokens, wanted=True)]
        few = [Piece(0, at, tokens[at : min(at + _FEW, _ALONE)], wanted=True) for at in range(0, _ALONE, _FEW)]
        alone = [Piece(0, index, [token]) for index, token in enumerate(tokens[:_ALONE])]
        rest = [Piece(0, _ALONE, tokens[_ALONE:], wanted=True)]
        for steady, those, others in ((self._most_tokens, together, alone + rest), (_FEW, few, alone)):
            expected = self._try(those)
            for self._needs_neighbour in (False, True):
                if np.array_equal(self._try(others), expected):
                    self.steady = steady
                    return
        self._needs_neighbour = False

    def _try(self, pieces: Iterable[Piece]) -> Logits:
        logits = np.concatenate([self.compute(piece) for piece in pieces])
        self.clear(0)
        return logits

    def _neighbour(self, sequence: int) -> Piece | None:
        """A token to compute and forget beside a sequence that would be alone; None if there is no room for one."""
        for other in (sequence + 1, sequence - 1):
            if 0 <= other < self._num_sequences:
                position = int(llama_cpp.llama_memory_seq_pos_max(self._memory, other)) + 1
                if position < self._length:
                    return Piece(other, position, [0])
        return None

    def _decode(self, pieces: Sequence[Piece], wanted: Sequence[bool]) -> Logits:
        """Compute pieces in one call; `wanted` says for each token whether its logits are returned."""
        batch = self._batch
        entries = [(p.sequence, p.position + index, token) for p in pieces for index, token in enumerate(p.tokens)]
        batch.n_tokens = len(entries)
        for index, ((sequence, position, token), is_wanted) in enumerate(zip(entries, wanted, strict=True)):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = is_wanted
        if code := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {code} for {len(entries)} tokens of {len(pieces)} sequences")
        found = llama_cpp.llama_get_logits(self._context)
        return np.ctypeslib.as_array(found, (sum(wanted), self._vocabulary_size)).copy()


def _runs(sequences: Sequence[int], most: int) -> list[list[int]]:
    """Ascending numbers, split wherever one is left out, and after `most` of them."""
    runs: list[list[int]] = []
    for sequence in sequences:
        if runs and runs[-1][-1] == sequence - 1 and len(runs[-1]) < most:
            runs[-1].append(sequence)
        else:
            runs.append([sequence])
    return runs
