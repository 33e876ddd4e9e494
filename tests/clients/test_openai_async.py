"""openai-python from async programs: many streams at once, and streams that nobody reads to the end."""

import asyncio

from openai import AsyncOpenAI
from tests.clients.words import GREEDY, MODEL, QUESTION
from tests.server.http_server import HttpServer

NUM_AT_ONCE = 32


async def test_many_streams_at_once_give_what_each_gives_alone(async_client: AsyncOpenAI) -> None:
    async def ask(seed: int) -> str:
        fields = {"model": MODEL, "messages": QUESTION, "temperature": 1.0, "seed": seed, "max_tokens": 40}
        async with async_client.chat.completions.stream(**fields) as stream:
            return str((await stream.get_final_completion()).choices[0].message.content)

    alone = [await ask(seed) for seed in range(4)]
    together = await asyncio.gather(*(ask(seed % 4) for seed in range(NUM_AT_ONCE)))
    assert together == [alone[number % 4] for number in range(NUM_AT_ONCE)]


async def test_leaving_a_stream_disturbs_nobody(async_client: AsyncOpenAI, server: HttpServer) -> None:
    fields = {**GREEDY, "messages": QUESTION, "max_tokens": 1500, "extra_body": {"ignore_eos": True}}

    async def leave() -> None:
        async with await async_client.chat.completions.create(**fields, stream=True) as stream:
            async for _ in stream:
                break

    whole = await async_client.chat.completions.create(**GREEDY, messages=QUESTION)
    *_, again = await asyncio.gather(
        *(leave() for _ in range(NUM_AT_ONCE)), async_client.chat.completions.create(**GREEDY, messages=QUESTION)
    )
    assert again.choices == whole.choices
    assert server.client.get("/health").json() == {"status": "ok"}
