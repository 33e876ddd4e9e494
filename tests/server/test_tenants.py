"""Keys with names: their limits, their shares, and what becomes of their requests."""

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from tests.server.http_server import HttpServer, numbers
from tests.server.test_admission import exchange, wait_for_requests
from tests.server.tiny import HELD, TinyServer, tiny_server

from octavo.contracts.engine import EngineCoreRequest
from octavo.errors import InvalidParameterError
from octavo.sampling_params import RequestPriority
from octavo.server.http.errors import ApiError
from octavo.server.policy import Admission
from octavo.server.tenants.claim import RequestNames, claim
from octavo.server.tenants.keys_file import TenantSpec, read_keys_file
from octavo.server.tenants.tenant import Place, Tenant

A = "  - {name: a, keys: [key-a]"
B = "  - {name: b, keys: [key-b, sha256:" + "0" * 64 + "]"


def keys_file(folder: Path, *lines: str) -> str:
    (folder / "keys.yaml").write_text("\n".join(["tenants:", *lines, ""]))
    return str(folder / "keys.yaml")


@pytest.mark.parametrize(
    ("lines", "wrong"),
    [
        (["  - {name: a}"], "keys"),
        (["  - {name: a, keys: []}"], "has no keys"),
        ([A + ", weight: 0}"], "weight"),
        ([A + ", max_running: -1}"], "max_running"),
        ([A + ", weight: .inf}"], "weight"),
        ([A + ", priority: soon}"], "one of critical"),
        ([A + ", wieght: 2}"], "wieght"),
        ([A + "}", A + "}"], "two tenants"),
        ([A + "}", "  - {name: b, keys: [key-a]}"], "also a key of a"),
        (["  - {name: 'a b', keys: [k]}"], "letters"),
        (["  - {name: a, keys: [' k']}"], "whitespace"),
        (["  - {name: a, keys: [k]"], "not YAML"),
        (["  []"], "has no tenants"),
    ],
)
def test_a_wrong_file_is_told_and_its_keys_are_not(tmp_path: Path, lines: list[str], wrong: str) -> None:
    with pytest.raises(InvalidParameterError, match=wrong) as caught:
        read_keys_file(keys_file(tmp_path, *lines))
    assert "key-a" not in str(caught.value)
    with pytest.raises(InvalidParameterError, match="cannot be read"):
        read_keys_file(str(tmp_path / "none"))


def wait(tiny: TinyServer, key: str, seconds: float = 0.0, **fields: Any) -> "asyncio.Task[httpx.Response]":
    body = {"seconds": seconds, **fields}
    return asyncio.create_task(tiny.client.post("/v1/wait", json=body, headers={"x-api-key": key}))


async def test_a_key_opens_the_door_and_may_use_its_models(tmp_path: Path) -> None:
    file = keys_file(tmp_path, A + ", models: [demo, 'x-*']}", B + "}")
    async with tiny_server(keys_file=file, api_key=("plain",)) as tiny:
        statuses = {key: (await wait(tiny, key)).status_code for key in ("key-a", "key-b", "plain", "key-c")}
        assert statuses == {"key-a": 200, "key-b": 200, "plain": 200, "key-c": 401}
        for model, status in {"demo": 200, "x-1": 200, "y": 403, None: 200}.items():
            assert (await wait(tiny, "key-a", model=model)).status_code == status
        refused = (await wait(tiny, "key-a", model="y")).json()["error"]
        assert (refused["code"], refused["param"]) == ("model_not_allowed", "model")
        assert (await wait(tiny, "key-b", model="y")).status_code == 200
        batches = {key: (await tiny.client.post("/v1/batches", json={}, headers={"x-api-key": key})).status_code
                   for key in ("key-a", "key-b")}  # fmt: skip
        assert batches == {"key-a": 403, "key-b": 200}
        usage = tiny.metrics.by_key["a"]
        assert (usage.requests, usage.refused, usage.output_tokens) == (6, 3, 16)


async def test_limits_of_requests_and_tokens_are_429_with_the_time(tmp_path: Path) -> None:
    file = keys_file(tmp_path, A + ", requests_per_minute: 2}", B + ", tokens_per_minute: 10}")
    async with tiny_server(keys_file=file) as tiny:
        for key in ("key-a", "key-b"):  # tokens are counted at the end: the second request takes more than there is
            assert [(await wait(tiny, key)).status_code for _ in range(2)] == [200, 200]
            refused = await wait(tiny, key)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert 20 <= int(refused.headers["retry-after"]) <= 30


async def test_a_flood_leaves_a_row_and_the_next_turn_to_others(tmp_path: Path) -> None:
    async with tiny_server(keys_file=keys_file(tmp_path, A + "}", B + "}"), max_num_seqs=2, max_waiting=3) as tiny:
        flood = [wait(tiny, "key-a", HELD) for _ in range(5)]
        await wait_for_requests(tiny, 5)
        assert (await wait(tiny, "key-a")).status_code == 429  # its own queue is full, and nobody else's
        assert (await wait(tiny, "key-b")).status_code == 200
        assert not any(request.done() for request in flood)
        one, other = wait(tiny, "key-b", HELD), wait(tiny, "key-b", HELD)  # two of its own: the second takes a turn
        await wait_for_requests(tiny, 7)
        for _ in range(4):  # both are among the next four
            tiny.released.release()
        assert (await one).status_code == (await other).status_code == 200
        for _ in range(3):
            tiny.released.release()
        assert [(await request).status_code for request in flood] == [200] * 5


async def test_who_leaves_while_waiting_frees_its_place(tmp_path: Path) -> None:
    async with tiny_server(keys_file=keys_file(tmp_path, A + ", max_running: 1}")) as tiny:
        first, second = wait(tiny, "key-a", HELD), wait(tiny, "key-a", HELD)
        await wait_for_requests(tiny, 2)
        second.cancel()
        while tiny.metrics.num_in_flight > 1:
            await asyncio.sleep(0.001)
        tiny.released.release()
        assert (await first).status_code == 200
        assert (await wait(tiny, "key-a")).status_code == 200


def test_the_fewest_tokens_by_weight_are_next_and_absence_saves_nothing() -> None:
    light, heavy = (Tenant(TenantSpec(name=str(weight), keys=["k"], weight=weight)) for weight in (1.0, 2.0))
    for tenant in (light, heavy):
        place = Place(exchange())
        place.exchange.count_tokens = lambda: (10, 5)
        tenant.running[place] = None
        tenant.settle(place)
    assert (light.virtual_tokens, heavy.virtual_tokens) == (20.0, 10.0)
    heavy.lift(15.0)
    light.lift(15.0)
    assert (light.virtual_tokens, heavy.virtual_tokens) == (20.0, 15.0)


class Samples:
    """A reply, as far as `claim` knows it."""

    core_ids = ("7",)

    def __init__(self, priority: int, cache_salt: str | None) -> None:
        self.priority, self.cache_salt = priority, cache_salt

    def change_samples(self, priority: int | None, cache_salt: str | None) -> None:
        self.priority, self.cache_salt = priority or self.priority, cache_salt or self.cache_salt


@pytest.mark.parametrize(
    ("own", "asked", "priority"),
    [("high", 2, 1), ("high", 0, 1), ("high", 3, 2), ("low", 2, 3), ("low", 1, 3), ("background", 4, 4)],
)
def test_samples_get_the_priority_of_their_key_and_no_better(own: str, asked: int, priority: int) -> None:
    one = exchange()
    one.tenant = Tenant(TenantSpec(name="a", keys=["k"], priority=own, own_prefix_cache=own == "high"))
    reply, names = Samples(asked, "mine"), RequestNames()
    claim(one, reply, names)  # type: ignore[arg-type]
    assert reply.priority == priority
    assert reply.cache_salt == ("tenant a mine" if own == "high" else "mine")
    assert names.get("7") == (one.request_id, "a")


def salted(salt: str | None) -> list[str]:
    message = EngineCoreRequest(
        request_id="1", prompt_token_ids=[1], sampling_params=None, priority=RequestPriority.NORMAL, arrival_time_s=0.0,
        cache_salt=salt,
    )  # fmt: skip
    return message.prefix_keys


def test_another_salt_is_another_prefix() -> None:
    assert salted("tenant a ") != salted("tenant b ") != salted(None)


def test_an_expected_wait_that_is_too_long_is_refused_at_once() -> None:
    async def admitted() -> None:
        admission = Admission(max_running=1, max_waiting=10)
        for _ in range(4):
            with admission.admit(exchange()):
                pass
        with admission.admit(exchange(), max_wait_s=1e-9):  # there is a free row
            with pytest.raises(ApiError) as caught, admission.admit(exchange(), max_wait_s=1e-9):
                pass
            assert (caught.value.status, caught.value.detail.code) == (429, "wait_too_long")
            assert int(caught.value.headers["Retry-After"]) >= 1
            with admission.admit(exchange(), max_wait_s=1e9), admission.admit(exchange()):
                assert len(admission) == 3

    asyncio.run(admitted())


def test_an_idle_hour_is_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]
    monkeypatch.setattr("octavo.server.policy.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    admission = Admission(max_running=1, max_waiting=10)
    for _ in range(3):
        with admission.admit(exchange()):
            now_s[0] += 1.0
    now_s[0] += 3600.0
    with admission.admit(exchange()):
        with admission.admit(exchange(), max_wait_s=1.5):
            assert len(admission) == 2
        with pytest.raises(ApiError, match=r"The expected wait is 1\.0 s"), admission.admit(exchange(), max_wait_s=0.5):
            pass


async def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    async with tiny_server(max_num_seqs=1, max_wait_s=100.0) as tiny:
        for _ in range(2):
            await tiny.client.post("/v1/wait", json={"seconds": 0.1})
        held = asyncio.create_task(tiny.client.post("/v1/wait", json={"seconds": 0.3}))
        await wait_for_requests(tiny, 1)
        body = {"seconds": 0.0}
        refused = await tiny.client.post("/v1/wait", json=body, headers={"x-request-timeout": "0.001"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "wait_too_long")
        assert (await tiny.client.post("/v1/wait", json=body)).status_code == 200
        assert (await held).status_code == 200


def test_keys_change_on_sighup_and_a_wrong_file_changes_nothing(tmp_path: Path) -> None:
    file = keys_file(tmp_path, A + "}")
    with HttpServer("--keys-file", file, has_model=False, headers={"x-api-key": "key-a"}) as server:
        body = {"model": "demo", "prompt": "x", "max_tokens": 2}
        assert server.post("/v1/completions", body).status_code == 200
        assert numbers(server)["octavo_key_requests_total"] == 1
        keys_file(tmp_path, A)
        server.process.send_signal(signal.SIGHUP)
        while "stay as they are" not in server.log:
            assert server.client.get("/v1/models").status_code == 200
        keys_file(tmp_path, B + "}")
        server.process.send_signal(signal.SIGHUP)
        while server.client.get("/v1/models").status_code != 401:
            assert server.process.poll() is None
        assert server.client.get("/v1/models", headers={"x-api-key": "key-b"}).status_code == 200
        assert "key-a" not in server.log
