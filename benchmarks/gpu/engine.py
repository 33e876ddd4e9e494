"""An engine core around a random model, driven by token ids: no tokenizer, no text, no other process."""

import gc
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.gpu.clock import synchronize, timing_event
from benchmarks.gpu.plan import Plan
from octavo.config.args import EngineArgs
from octavo.engine.core import EngineCore
from octavo.executor.uniproc import UniProcExecutor
from octavo.testing import make_request
from octavo.worker.decode_graphs import GraphKey
from octavo.worker.decode_step import GraphedDecoding


class BenchEngine:
    """A context manager; requests are prompts of random ids, so that nobody shares a block."""

    def __init__(self, plan: Plan, geometry: dict[str, Any], **options: Any) -> None:
        self._plan, self._vocab_size = plan, int(geometry["vocab_size"])
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        (folder / "config.json").write_text(json.dumps(geometry))
        config = EngineArgs.from_options(
            {
                "model_name": str(folder),
                "load_format": "dummy",
                "seed": 0,
                "device": plan.device,
                "dtype": plan.dtype,
                "max_num_seqs": max(plan.batches),
                "max_num_batched_tokens": plan.max_num_batched_tokens,
                "num_kv_blocks": plan.num_kv_blocks,
                "max_model_len": min(16384, int(geometry["max_position_embeddings"])),
                **options,
            }
        ).resolve()
        start_s = time.perf_counter()
        self._executor = UniProcExecutor(config)
        self.core = EngineCore(config, self._executor)
        self.core.warmup_model()
        self.start_s = time.perf_counter() - start_s
        self._random = random.Random(0)
        self._num_requests = 0
        self.tokens: dict[str, list[int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.core.close()
        self._folder.cleanup()
        del self.core, self._executor
        gc.collect()
        if self._plan.device == "cuda":
            torch.cuda.empty_cache()

    @property
    def device(self) -> torch.device:
        return self._executor.worker.devices.device

    @property
    def graphs(self) -> GraphedDecoding | None:
        """The graphs of decoding, where it is captured."""
        return self._executor.worker.runner.graphs

    @property
    def num_graphs(self) -> int:
        return len(self.graphs.captured) if self.graphs else 0

    def add(self, num_prompt_tokens: int, max_tokens: int, **params: Any) -> str:
        """Queue a request, greedy unless its sampling parameters say else; return its id."""
        prompt = [self._random.randrange(self._vocab_size) for _ in range(num_prompt_tokens)]
        return self.add_prompt(prompt, max_tokens, **params)

    def add_prompt(self, prompt: list[int], max_tokens: int, **params: Any) -> str:
        request_id = f"r{self._num_requests}"
        self._num_requests += 1
        self.tokens[request_id] = []
        options = {"seed": self._num_requests, "max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        request = make_request(request_id, prompt, **{**options, **params})
        self.core.add_request(request)
        return request_id

    def step(self) -> int:
        """Do one step; return how many tokens came.

        Raises:
            RuntimeError: a request failed.
        """
        outputs = self.core.step()
        for request_id, report in outputs.finished.items():
            if report.error is not None:
                raise RuntimeError(f"{request_id}: {report.error}")
        for request_id, token_id in zip(outputs.req_ids, outputs.new_token_ids, strict=True):
            self.tokens[request_id].append(token_id)
        return len(outputs.req_ids)

    def finish(self) -> int:
        """Step until nobody is left; return how many tokens came."""
        num_tokens = 0
        while self.core.has_work():
            num_tokens += self.step()
        return num_tokens

    def drop_all(self) -> None:
        """End all requests."""
        self.core.abort(list(self.tokens))
        self.finish()

    def decode_s(self, num_requests: int, **params: Any) -> tuple[float, float | None]:
        """Return the time of a step in which so many requests decode, and the share of it that the device is idle.

        None where no graph is replayed: only those are timed on the device.
        """
        plan = self._plan
        ids = [self.add(plan.context, 4 * plan.decode_steps + 16, **params) for _ in range(num_requests)]
        while not all(len(self.tokens[request_id]) > 3 for request_id in ids):
            self.step()
        busy = _BusyTime(self.graphs) if self.device.type == "cuda" and self.graphs else None
        synchronize(self.device)
        start_s = time.perf_counter()
        for _ in range(plan.decode_steps):
            if self.step() != num_requests:
                raise RuntimeError("not every request decodes: there is too little KV memory for this batch")
        took_s = time.perf_counter() - start_s
        idle = busy.idle_share(took_s, plan.decode_steps) if busy else None
        self.drop_all()
        return took_s / plan.decode_steps, idle


class _BusyTime:
    """Times replays of graphs on the device, by events around each."""

    def __init__(self, graphs: GraphedDecoding) -> None:
        self._captured, self._pairs = graphs.captured, list[tuple[torch.cuda.Event, torch.cuda.Event]]()
        self._find = self._captured.find
        self._captured.find = self._timed  # type: ignore[method-assign]  # until `idle_share`

    def idle_share(self, took_s: float, num_steps: int) -> float | None:
        """Return 1 - busy / took, and take the timing off; None where not every step was a replay."""
        self._captured.find = self._find  # type: ignore[method-assign]  # as before
        synchronize(torch.device("cuda"))
        pairs = self._pairs[:num_steps]
        if len(pairs) < num_steps:
            return None
        busy_s = float(sum(start.elapsed_time(end) for start, end in pairs)) / 1e3
        return 1.0 - busy_s / took_s

    def _timed(self, key: GraphKey) -> Callable[[], None] | None:
        replay = self._find(key)
        if replay is None:
            return None
        start, end = timing_event(), timing_event()

        def run() -> None:
            start.record()
            replay()
            end.record()

        self._pairs.append((start, end))
        return run
