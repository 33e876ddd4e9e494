"""Kill processes of a real server at random while it streams, and compare every answer with an undisturbed run.

    python -m tests.chaos.storm --requests 1000 --every 5 15 --out storm.json -- --tensor-parallel-size 2

What follows `--` are flags of `octavo serve`. Victims are all processes below the server: engine cores and ranks.
"""

import argparse
import asyncio
import base64
import json
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx2 as httpx
import numpy as np
import psutil
from safetensors.numpy import save_file
from tests.server.http_server import HttpServer, numbers

CHAT = "/v1/chat/completions"
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "shape.png"
DEMO_SHAPES = {"q_proj": (256, 256), "v_proj": (256, 128), "down_proj": (768, 256)}  # inputs, outputs
SIGNALS = [signal.SIGKILL, signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT]
_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 60}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_FREE: dict[str, Any] = {"max_tokens": 220, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {**_FREE, "temperature": 0.0},
    "sampled": {**_FREE, "temperature": 0.9, "top_p": 0.95},
    "logprobs": {**_FREE, "temperature": 0.7, "logprobs": True, "top_logprobs": 3},
    "three samples": {**_FREE, "n": 3, "frequency_penalty": 0.4},
    "penalties": {**_FREE, "repetition_penalty": 1.2, "presence_penalty": 0.6, "min_tokens": 40},
    "JSON schema": {
        "max_tokens": 120,
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": _SCHEMA}},
    },
    "tool": {"max_tokens": 120, "tools": [_WEATHER], "tool_choice": "required"},
    "stop strings": {"max_tokens": 220, "stop": ["the ", "\n\n"], "temperature": 1.2},
    "adapter": {**_FREE, "model": "odd", "temperature": 0.8},
    "reasoning": {"max_tokens": 200, "chat_template_kwargs": {"enable_thinking": True}},
}


@dataclass(slots=True)
class Answer:
    """What a stream adds up to; how its tokens were spread over events does not count."""

    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    error: Any = None
    is_done: bool = False
    longest_pause_s: float = 0.0  # between two events, the first one not counted

    def add(self, event: dict[str, Any]) -> None:
        self.error = self.error or event.get("error")
        for choice in event.get("choices", []):
            known = self.choices.setdefault(choice["index"], {"logprobs": [], "finish_reason": None})
            known["finish_reason"] = known["finish_reason"] or choice["finish_reason"]
            known["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            delta = dict(choice["delta"])
            for call in delta.pop("tool_calls", None) or []:
                at = f"tool call {call['index']}"
                known[at] = known.get(at, "") + json.dumps(call["function"].get("name") or "")
                known[at] += call["function"].get("arguments") or ""
            for name, text in delta.items():
                if isinstance(text, str) and name != "role":
                    known[name] = known.get(name, "") + text

    @property
    def outcome(self) -> tuple[Any, ...]:
        return self.choices, self.error, self.is_done


def save_demo_adapter(folder: Path) -> None:
    """Write an adapter of the demo model with random weights."""
    rng = np.random.default_rng(1)
    tensors = {}
    for layer in range(6):
        for name, (num_inputs, num_outputs) in DEMO_SHAPES.items():
            part = "mlp" if name == "down_proj" else "self_attn"
            prefix = f"base_model.model.model.layers.{layer}.{part}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = rng.normal(0, 0.1, (4, num_inputs)).astype(np.float32)
            tensors[f"{prefix}.lora_B.weight"] = rng.normal(0, 0.1, (num_outputs, 4)).astype(np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": list(DEMO_SHAPES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def make_bodies(count: int, *, sees: bool, max_tokens: int = sys.maxsize) -> list[tuple[str, dict[str, Any]]]:
    """Return requests, each with its kind."""
    kinds = (
        {"image": {**_FREE, "max_tokens": 60}, "greedy": KINDS["greedy"], "sampled": KINDS["sampled"]}
        if sees
        else KINDS
    )
    bodies = []
    for at in range(count):
        kind = list(kinds)[at % len(kinds)]
        text: Any = f"Tell me about number {at}. What is {at} + {at * 7 % 100}?"
        if kind == "image":
            url = "data:image/png;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
            text = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
        message = {"role": "user", "content": text}
        body = {"messages": [message], "seed": at, "stream": True, "timeout": 3600, **kinds[kind]}
        bodies.append((kind, {**body, "max_tokens": min(body["max_tokens"], max_tokens)}))
    return bodies


async def stream(client: httpx.AsyncClient, body: dict[str, Any]) -> Answer:
    """Return the answer to one request."""
    answer, heard_s = Answer(), None
    async with client.stream("POST", CHAT, json=body) as response:
        if response.status_code != 200:
            answer.error = (await response.aread()).decode()
            return answer
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            now_s = time.monotonic()
            answer.longest_pause_s = max(answer.longest_pause_s, now_s - (heard_s or now_s))
            heard_s = now_s
            if line == "data: [DONE]":
                answer.is_done = True
            else:
                answer.add(json.loads(line.removeprefix("data: ")))
    return answer


async def stream_all(url: str, bodies: list[dict[str, Any]], concurrency: int) -> list[Answer]:
    """Return the answers to all requests, so many at a time."""
    turn = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any]) -> Answer:
        async with turn:
            return await stream(client, body)

    limits = httpx.Limits(max_connections=concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        return await asyncio.gather(*[one(body) for body in bodies])


async def kill_some(
    server: psutil.Process, every: tuple[float, float], seed: int, killed: Counter[str], most: int
) -> None:
    """Send a signal to a process below the server, again and again."""
    rng = random.Random(seed)
    while killed.total() < most:
        await asyncio.sleep(rng.uniform(*every))
        if victims := server.children(recursive=True):
            number = rng.choice(SIGNALS)
            rng.choice(victims).send_signal(number)
            killed[number.name] += 1


@dataclass(kw_only=True, slots=True)
class Report:
    """What came of it. Times in seconds."""

    flags: list[str]
    num_requests: int
    num_equal: int
    kills: dict[str, int]
    num_core_deaths: int
    differing: dict[str, int]  # by kind
    example: list[str]  # the first of them: as it should be, as it was
    undisturbed_s: float
    disturbed_s: float
    pause_p50_s: float  # the longest pause of each stream
    pause_p99_s: float
    pause_max_s: float
    num_left: int  # processes after the end


def run(
    flags: list[str],
    *,
    model: str,
    requests: int,
    every: tuple[float, float],
    concurrency: int = 64,
    seed: int = 1,
    most: int = sys.maxsize,
    max_tokens: int = sys.maxsize,
) -> Report:
    """Run all requests on a server that nobody disturbs, then again while its processes are killed, `most` at most."""
    kinds, bodies = zip(*make_bodies(requests, sees=model == "demo-vl", max_tokens=max_tokens), strict=True)
    killed: Counter[str] = Counter()

    async def disturbed(server: HttpServer) -> list[Answer]:
        killer = asyncio.create_task(kill_some(psutil.Process(server.process.pid), every, seed, killed, most))
        try:
            return await stream_all(server.url, list(bodies), concurrency)
        finally:
            killer.cancel()

    with TemporaryDirectory() as folder:
        if model == "demo":
            save_demo_adapter(Path(folder) / "odd")
            flags = [*flags, "--enable-lora", "--lora-modules", f"odd={folder}/odd"]
        with HttpServer(*flags, model=model) as server:
            start_s = time.monotonic()
            expected = asyncio.run(stream_all(server.url, list(bodies), concurrency))
            undisturbed_s = time.monotonic() - start_s
            start_s = time.monotonic()
            answers = asyncio.run(disturbed(server))
            disturbed_s = time.monotonic() - start_s
            num_core_deaths = int(numbers(server)["octavo_engine_deaths_total"])
            processes = psutil.Process(server.process.pid).children(recursive=True)
            server.process.terminate()
            server.process.wait(30)
    failed = {
        kind: answer.error for kind, answer in zip(kinds, expected, strict=True) if answer.error or not answer.is_done
    }
    assert not failed, f"the undisturbed run has failed: {failed}"
    pairs = [(kind, *each) for kind, *each in zip(kinds, expected, answers, strict=True)]
    differing = [(kind, one.outcome, other.outcome) for kind, one, other in pairs if one.outcome != other.outcome]
    pauses = sorted(answer.longest_pause_s for answer in answers)
    return Report(
        flags=[flag for flag in flags if "odd=" not in flag],
        num_requests=requests,
        num_equal=requests - len(differing),
        kills=dict(killed),
        num_core_deaths=num_core_deaths,
        differing=dict(Counter(kind for kind, *_ in differing)),
        example=[repr(outcome) for _, *outcomes in differing[:1] for outcome in outcomes],
        undisturbed_s=undisturbed_s,
        disturbed_s=disturbed_s,
        pause_p50_s=pauses[len(pauses) // 2],
        pause_p99_s=pauses[int(len(pauses) * 0.99)],
        pause_max_s=pauses[-1],
        num_left=len(psutil.wait_procs(processes, timeout=10)[1]),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, demo-vl (images), or any other")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--every", type=float, nargs=2, default=(5.0, 15.0), help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=1, help="of the kills")
    parser.add_argument("--out", type=Path, help="write the report there, as JSON")
    parser.add_argument("flags", nargs="*", help="of `octavo serve`")
    given = parser.parse_args()
    report = run(
        given.flags,
        model=given.model,
        requests=given.requests,
        every=tuple(given.every),
        concurrency=given.concurrency,
        seed=given.seed,
    )
    text = json.dumps(asdict(report), indent=2)
    sys.stdout.write(text + "\n")
    if given.out is not None:
        given.out.write_text(text + "\n")
    return int(report.num_equal < report.num_requests or report.num_left > 0)


if __name__ == "__main__":
    sys.exit(main())
