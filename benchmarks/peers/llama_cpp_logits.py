"""Logits of texts by llama.cpp, for comparing what quantization costs: every position's, as a numpy file.

    python -m benchmarks.peers.llama_cpp_logits FOLDER TOKENS.json OUT.npz --precision q8_0

TOKENS.json holds a list of lists of token ids; OUT.npz an array [T, V] float32 for each of them, in order. Runs in
llama.cpp's environment.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from llama_cpp import Llama

from benchmarks.peers import gguf_file
from benchmarks.peers.llama_cpp_peer import silence


def logits(file: Path, texts: list[list[int]]) -> Iterator[np.ndarray]:
    """Yield what llama.cpp expects after each token of each text: [T, V] float32."""
    longest = max(len(text) for text in texts)
    model = Llama(str(file), logits_all=True, n_ctx=longest, n_batch=longest, n_threads=2, verbose=False)
    silence()
    for text in texts:
        model.reset()
        model.eval(text)
        yield np.array(model.scores[: len(text)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokens", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--precision", choices=gguf_file.PRECISIONS, default="bf16")
    options = parser.parse_args()
    texts = json.loads(options.tokens.read_text())
    np.savez(options.out, *logits(gguf_file.make(options.folder, options.precision), texts))


if __name__ == "__main__":
    main()
