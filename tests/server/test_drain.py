"""The end: requests finish, newcomers are sent away, a second signal ends at once."""

import asyncio

from tests.server.test_admission import wait, wait_for_requests
from tests.server.tiny import tiny_server


async def test_running_requests_finish_and_new_ones_are_sent_away() -> None:
    async with tiny_server() as tiny:
        running = wait(tiny, 0.3)
        await wait_for_requests(tiny, 1)
        tiny.server.shut_down()
        await asyncio.sleep(0)
        refused = await tiny.client.post("/v1/wait", json={"seconds": 0})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "draining"
        for path in ("/health", "/ready"):
            answer = await tiny.client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, "draining")
        assert (await running).status_code == 200
        await asyncio.wait_for(tiny.running, 5.0)
        assert tiny.server.num_cut == 0


async def test_an_idle_server_ends_at_once() -> None:
    async with tiny_server() as tiny:
        assert (await wait(tiny, 0.0)).status_code == 200  # so that a connection is open
        tiny.server.shut_down()
        await asyncio.wait_for(tiny.running, 5.0)


async def test_what_does_not_finish_in_time_is_broken_off() -> None:
    async with tiny_server(drain_timeout_s=0.1) as tiny:
        waiting = wait(tiny, 60.0)
        streaming = asyncio.create_task(tiny.client.post("/v1/stream", json={}))
        await wait_for_requests(tiny, 2)
        tiny.server.shut_down()
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
        text = (await streaming).text
        assert '"code":"draining"' in text
        assert text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(tiny.running, 5.0)
        assert tiny.server.num_cut == 2


async def test_a_second_signal_does_not_wait() -> None:
    async with tiny_server(drain_timeout_s=600.0) as tiny:
        waiting = wait(tiny, 60.0)
        await wait_for_requests(tiny, 1)
        tiny.server.shut_down()
        await asyncio.sleep(0.05)
        assert not waiting.done()
        tiny.server.shut_down()
        assert (await waiting).status_code == 503
        await asyncio.wait_for(tiny.running, 5.0)
        assert tiny.server.num_cut == 1
