"""Octavo's prompt lookup beside llama.cpp's, on the same file and the same prompts, in turns.

    python -m benchmarks.peers.speculation [--model smollm2] [--repeats 3] [--task NAME ...] [--out FILE]

Greedy, one request at a time, two threads each. `llama-server` (`install.py` builds it) runs once for every way it
looks drafts up; its time from first to last token is its own, so HTTP costs it nothing. Octavo runs in this process,
as in `benchmarks.speculation`, which has the tasks. Figures are tokens per second after the first token, medians of the
repeats. Answers of the two may differ in some tokens, as they round differently.
"""

import argparse
import json
import socket
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.peers.http import serving
from benchmarks.peers.registry import LLAMA_CPP
from benchmarks.speculation import MAX_TOKENS, TASKS, decode_speed
from octavo import LLM, SamplingParams
from octavo.config.hub import resolve_model

CONTEXT = 2048
OCTAVO_WAYS: dict[str, dict[str, Any] | None] = {"plain": None, "ngram": {"method": "ngram"}}
# Its own defaults look for 12 equal tokens and draft 48, which is for long copies; the second way has Octavo's lengths.
LLAMA_WAYS: dict[str, list[str]] = {
    "plain": [],
    "ngram-simple": ["--spec-type", "ngram-simple"],
    "ngram-simple 3/8": [
        "--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8",
    ],
    "ngram-map-k 3/8": [
        "--spec-type", "ngram-map-k", "--spec-ngram-map-k-size-n", "3", "--spec-ngram-map-k-size-m", "8",
    ],
    "ngram-cache": ["--spec-type", "ngram-cache"],
}  # fmt: skip
Cell = dict[str, float]


class OctavoEngine:
    """One `LLM`."""

    def __init__(self, model: str, config: dict[str, Any] | None, num_out: int) -> None:
        self._llm = LLM(model, speculative_config=config, max_model_len=CONTEXT)
        self._params = SamplingParams(temperature=0.0, max_tokens=num_out)

    def prompt(self, text: str) -> list[int]:
        """Return a chat as tokens."""
        [output] = self._llm.chat(_chat(text), SamplingParams(max_tokens=1), use_tqdm=False)
        return output.prompt_token_ids

    def run(self, prompt: list[int]) -> tuple[list[int], Cell]:
        [output] = self._llm.generate([{"prompt_token_ids": prompt}], self._params, use_tqdm=False)
        drafts = {"num_drafts": output.metrics.num_drafts, "num_accepted": output.metrics.num_accepted_drafts}
        return list(output.outputs[0].token_ids), {"tokens_per_s": decode_speed(output), **drafts}


class LlamaServer:
    """A running `llama-server`."""

    def __init__(self, url: str, num_out: int) -> None:
        self._url, self._num_out = url, num_out

    def run(self, prompt: list[int]) -> tuple[list[int], Cell]:
        wanted = {"n_predict": self._num_out, "temperature": 0.0, "cache_prompt": True, "return_tokens": True}
        body = json.dumps({"prompt": prompt, **wanted}).encode()
        with urlopen(Request(f"{self._url}/completion", body, {"Content-Type": "application/json"})) as reply:
            answer = json.load(reply)
        times = answer["timings"]
        drafts = {"num_drafts": times.get("draft_n", 0), "num_accepted": times.get("draft_n_accepted", 0)}
        speed = 1e3 * (times["predicted_n"] - 1) / times["predicted_ms"]
        return answer["tokens"], {"tokens_per_s": speed, **drafts}


def _chat(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def llama_command(file: Path, port: int, flags: Sequence[str]) -> list[str]:
    LLAMA_CPP.python()  # or it says how to install it
    program = LLAMA_CPP.home / "build" / "bin" / "llama-server"
    always = ["--parallel", "1", "--ctx-size", str(CONTEXT), "--threads", "2", "--flash-attn", "on"]
    return [str(program), "--model", str(file), "--port", str(port), *always, *flags]


def compare(
    model: str, tasks: Sequence[str], ways: Sequence[str], num_out: int, repeats: int
) -> Iterator[tuple[str, dict[str, Cell]]]:
    """Yield each task with what each engine did in each way, llama.cpp in `ways`."""
    file = Path(resolve_model(model))
    with ExitStack() as servers:
        ours = {way: OctavoEngine(model, config, num_out) for way, config in OCTAVO_WAYS.items()}
        engines: dict[str, OctavoEngine | LlamaServer] = {f"octavo {way}": engine for way, engine in ours.items()}
        for way in ways:
            port, flags = _free_port(), LLAMA_WAYS[way]
            url = f"http://127.0.0.1:{port}"
            servers.enter_context(serving(LLAMA_CPP, llama_command(file, port, flags), url, "/health"))
            engines[f"llama.cpp {way}"] = LlamaServer(url, num_out)
        for task in tasks:
            prompt = ours["plain"].prompt(TASKS[task])
            runs: dict[str, list[Cell]] = {name: [] for name in engines}
            answers: dict[str, list[int]] = {}
            for _ in range(1 + repeats):  # the first is not counted: it warms up and measures steps
                for name, engine in engines.items():
                    answers[name], cell = engine.run(prompt)
                    runs[name].append({**cell, "num_tokens": len(answers[name])})
            assert answers["octavo ngram"] == answers["octavo plain"], task
            yield task, {name: _summary(cells[1:]) for name, cells in runs.items()}


def _summary(cells: Sequence[Cell]) -> Cell:
    """Return the last run with the median of all speeds."""
    return {**cells[-1], "tokens_per_s": statistics.median(cell["tokens_per_s"] for cell in cells)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def show(task: str, cells: dict[str, Cell]) -> None:
    for name, cell in cells.items():
        plain = cells.get(f"{name.split()[0]} plain", cell)["tokens_per_s"]
        print(
            f"{task:10} {name:28} {cell['tokens_per_s']:7.1f} tok/s {cell['tokens_per_s'] / plain:5.2f}x "
            f"{cell['num_accepted']:4.0f} of {cell['num_drafts']:4.0f} drafts, {cell['num_tokens']:.0f} tokens",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a GGUF file, or the name of one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--way", action="append", choices=list(LLAMA_WAYS), help="of llama.cpp; repeatable")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--task", action="append", choices=list(TASKS), help="repeatable; default: all")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    report: dict[str, Any] = {"commit": commit.stdout.strip(), "model": args.model, "max_tokens": args.max_tokens}
    report["tasks"] = tasks = dict[str, dict[str, Cell]]()
    ways = args.way or list(LLAMA_WAYS)
    for task, cells in compare(args.model, args.task or list(TASKS), ways, args.max_tokens, args.repeats):
        tasks[task] = cells
        show(task, cells)
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
