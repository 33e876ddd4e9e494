"""mistral.rs, from its wheel: a GGUF file, chat requests with streamed answers, one thread of Python per request.

    python -m benchmarks.peers.mistral_rs_peer MODEL --precision q8_0 --cells decode:8:128 prefill:1024

It takes prompts as text. So it gets a tokenizer of its own, whose words are the file's tokens, and a template that adds
nothing. Its cache of prompts is off, as each prompt comes twice.
"""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mistralrs import ChatCompletionRequest, Runner, Which

from benchmarks.peers.cells import Arrivals, Capacity, vocabulary
from benchmarks.peers.registry import MISTRAL_RS_FORMS
from benchmarks.peers.runner import run

TOKENIZER, TEMPLATE = "tokenizer.json", "template.jinja"


class MistralRs:
    """A model and its own threads, fed from as many threads of Python as there are requests."""

    def __init__(self, model: Path, precision: str, capacity: Capacity, threads: int) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)  # read when its first product is computed
        folder = make_folder(model, precision)
        file = Which.GGUF(
            quantized_model_id=str(folder),
            quantized_filename=f"{precision}.gguf",
            tokenizer_json=str(folder / TOKENIZER),
        )
        self._runner = Runner(
            which=file,
            max_seqs=capacity.num_requests,
            prefix_cache_n=0,
            jinja_explicit=str(folder / TEMPLATE),
            token_source="none",
        )

    def generate(self, prompts: list[list[int]], num_out: int) -> Arrivals:
        """See `cells.Engine`."""
        begun_s = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(lambda prompt: self._arrivals(prompt, num_out, begun_s), prompts))

    def _arrivals(self, prompt: list[int], num_out: int, begun_s: float) -> list[float]:
        content = " ".join(f"w{token}" for token in prompt)
        request = ChatCompletionRequest(
            model="default",
            messages=[{"role": "user", "content": content}],
            max_tokens=num_out,
            temperature=0.0,
            stream=True,
            ignore_eos=True,
        )
        times, usage = [], None
        for chunk in self._runner.send_chat_completion_request(request):
            times.append(time.perf_counter() - begun_s)
            usage = chunk.usage or usage
        found = usage and (usage.prompt_tokens, usage.completion_tokens)
        if found != (len(prompt), num_out) or len(times) != num_out:
            raise RuntimeError(f"{len(prompt)} tokens in and {num_out} out: {found} counted, {len(times)} pieces came")
        return times


def make_folder(model: Path, precision: str) -> Path:
    """Return a folder of the file alone, as it would misread config.json, with a tokenizer of words and a template."""
    folder = model / "mistral.rs"
    folder.mkdir(exist_ok=True)
    if not (folder / f"{precision}.gguf").exists():
        (folder / f"{precision}.gguf").symlink_to((model / f"{precision}.gguf").resolve())
    tokens = vocabulary(json.loads((model / "config.json").read_text())["vocab_size"])
    words = {"type": "WordLevel", "vocab": {token: index for index, token in enumerate(tokens)}, "unk_token": tokens[0]}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor"))
    decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    parts = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}}
    parts |= {"model": words, "decoder": decoder}
    (folder / TOKENIZER).write_text(json.dumps(parts | nothing))
    (folder / TEMPLATE).write_text("{{ messages[0]['content'] }}")
    return folder


if __name__ == "__main__":
    run(__doc__ or "", list(MISTRAL_RS_FORMS), MistralRs)
