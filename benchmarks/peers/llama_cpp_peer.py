"""llama.cpp through llama-cpp-python's low-level calls: many sequences in one batch, greedy.

    python -m benchmarks.peers.llama_cpp_peer MODEL --precision q8_0 --cells decode:8:128 prefill:1024

Its best settings here: flash attention, a micro-batch of 512, weights repacked for AMX where llama.cpp can.
Requests of one cell share the prompt's keys and values by copying (`seq_cp`), because computing 32 long prompts would
take minutes; each sequence then has its own memory and decodes alone, all that a decode cell measures. Those of
a prompt of thousands of tokens are computed once, by the first precision that needs them, and come from a file then.
"""

import ctypes
import time
from pathlib import Path

import llama_cpp as api
import numpy as np

from benchmarks.peers import gguf_file
from benchmarks.peers.cells import Arrivals, Capacity
from benchmarks.peers.runner import run

BATCH = 2048
LONG_PROMPT = 2048


class LlamaCpp:
    """A model, and a context of the size that the requests at hand need."""

    def __init__(self, file: Path, threads: int) -> None:
        self._folder = file.parent
        silence()
        api.llama_backend_init()
        model_params = api.llama_model_default_params()
        model_params.n_gpu_layers = 0
        self._model = api.llama_model_load_from_file(str(file).encode(), model_params)
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(BATCH, 0, 1)
        self._threads = threads
        self._context: api.llama_context_p | None = None
        self._shape = (0, 0)

    def generate(self, prompts: list[list[int]], num_out: int) -> Arrivals:
        """See `cells.Engine`; only the first prompt is computed, see above."""
        memory = self._empty_memory(len(prompts), len(prompts[0]) + num_out)
        begun_s = time.perf_counter()
        is_kept = num_out > 1 and len(prompts[0]) >= LONG_PROMPT
        token = self._restored(prompts[0]) if is_kept else self._prefill(prompts[0])
        for sequence in range(1, len(prompts)):
            api.llama_memory_seq_cp(memory, 0, sequence, -1, -1)
        tokens = [token] * len(prompts)
        times = [time.perf_counter() - begun_s]
        for position in range(len(prompts[0]), len(prompts[0]) + num_out - 1):
            rows = [(token, position, sequence, True) for sequence, token in enumerate(tokens)]
            tokens = self._step(rows, len(rows))
            times.append(time.perf_counter() - begun_s)
        return [times for _ in prompts]

    def _empty_memory(self, num_sequences: int, num_tokens: int) -> api.llama_memory_t:
        if self._shape != (num_sequences, num_tokens):
            if self._context:
                api.llama_free(self._context)
            self._context = api.llama_init_from_model(
                self._model, context_params(num_sequences, num_tokens, self._threads)
            )
            self._shape = (num_sequences, num_tokens)
        memory = api.llama_get_memory(self._context)
        api.llama_memory_clear(memory, False)
        return memory

    def _restored(self, prompt: list[int]) -> int:
        """Fill the first sequence with a prompt from a file, or compute it and write the file; return any next token.

        Raises:
            RuntimeError: when the file cannot be written, or is of another context.
        """
        file = str(self._folder / f"llama.cpp-prompt-{len(prompt)}.state").encode()
        tokens = (api.llama_token * len(prompt))(*prompt)
        if Path(file.decode()).exists():
            count = ctypes.c_size_t()
            if not api.llama_state_seq_load_file(self._context, file, 0, tokens, len(prompt), ctypes.byref(count)):
                raise RuntimeError(f"llama.cpp does not read {file.decode()}: delete it")
            return prompt[-1]
        token = self._prefill(prompt)
        if not api.llama_state_seq_save_file(self._context, file, 0, tokens, len(prompt)):
            raise RuntimeError(f"llama.cpp does not write {file.decode()}")
        return token

    def _prefill(self, prompt: list[int]) -> int:
        last = len(prompt) - 1
        rows = [(token, position, 0, position == last) for position, token in enumerate(prompt)]
        for begin in range(0, len(rows), BATCH):
            answers = self._step(rows[begin : begin + BATCH], 1 if begin + BATCH > last else 0)
        return answers[0]

    def _step(self, rows: list[tuple[int, int, int, bool]], num_answers: int) -> list[int]:
        """Compute (token, position, sequence, answer wanted); return the likeliest token of each wanted answer."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = is_wanted
        if (code := api.llama_decode(self._context, batch)) != 0:
            raise RuntimeError(f"llama_decode: code {code}")
        if num_answers == 0:
            return []
        logits = api.llama_get_logits(self._context)
        array = np.ctypeslib.as_array(logits, shape=(num_answers, self._vocab_size))
        return [int(token) for token in array.argmax(axis=1)]


def context_params(num_sequences: int, num_tokens: int, threads: int) -> api.llama_context_params:
    params = api.llama_context_default_params()
    params.n_ctx = num_sequences * -(-num_tokens // 256) * 256  # the share of each, in steps that llama.cpp likes
    params.n_seq_max = params.n_outputs_max = num_sequences
    params.n_batch, params.n_ubatch = BATCH, 512
    params.n_threads = params.n_threads_batch = threads
    params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.kv_unified = False  # each sequence a stream of its own: faster with many of them
    return params


@api.llama_log_callback
def _drop(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """Errors come as codes; the rest is chatter."""


def silence() -> None:
    api.llama_log_set(_drop, ctypes.c_void_p(0))


def open_engine(model: Path, precision: str, capacity: Capacity, threads: int) -> LlamaCpp:
    return LlamaCpp(gguf_file.make(model, precision), threads)


if __name__ == "__main__":
    run(__doc__, gguf_file.PRECISIONS, open_engine)
