"""Octavo behind Ray Serve: replicas of one engine, and Ray's own router, which knows who has seen a prompt's beginning.

    pip install octavo 'ray[serve]' && MODEL=Qwen/Qwen3-0.6B REPLICAS=2 serve run deploy.ray_serve:app
    curl localhost:8000/completions -H 'Content-Type: application/json' -d '{"prompt": "Octavo is"}'

A replica that dies is replaced. Requests that ran there end with an error, all others go on: `octavo serve
--data-parallel-size 2` does more on one machine, where they go on as well, with the whole API.
"""

import json
import os
from collections.abc import AsyncIterator

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from octavo import AsyncLLM, SamplingParams

# With `ray[llm]` it is also `ray.serve.llm.request_router.PrefixCacheAffinityRouter`.
ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
MODEL, REPLICAS = os.environ.get("MODEL", "demo"), int(os.environ.get("REPLICAS", "2"))
web = FastAPI()


class Completion(BaseModel):
    """A request. Ray's router reads `prompt`."""

    prompt: str
    max_tokens: int = 64
    temperature: float = 0.0


@serve.deployment(num_replicas=REPLICAS, request_router_config=RequestRouterConfig(request_router_class=ROUTER))
class Engine:  # noqa: D101 - the file is an example of sixty lines; its top says what it is
    async def __init__(self, model: str) -> None:
        self._llm = await AsyncLLM(model).__aenter__()

    async def stream(self, request: Completion) -> AsyncIterator[str]:
        params = SamplingParams(max_tokens=request.max_tokens, temperature=request.temperature)
        name = serve.get_replica_context().replica_id.unique_id
        async for output in self._llm.stream(request.prompt, params):
            yield f"data: {json.dumps({'text': output.text, 'replica': name})}\n\n"


@serve.deployment
@serve.ingress(web)
class Front:  # noqa: D101 - see above
    def __init__(self, engine: DeploymentHandle) -> None:
        self._engine = engine.options(stream=True)

    @web.post("/completions")
    async def completions(self, request: Completion) -> StreamingResponse:
        return StreamingResponse(self._engine.stream.remote(request), media_type="text/event-stream")


app = Front.bind(Engine.bind(MODEL))
