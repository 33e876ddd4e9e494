"""Who is loaded, and who waits, where a server has several models: without engines."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from octavo.config.args import EngineArgs
from octavo.server.args import ServerArgs
from octavo.server.engine_pool import EnginePool, ModelSlot, args_of
from octavo.server.http.errors import ApiError, unavailable
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.openai.models import ModelAliases


class FakeLifecycle:
    """Loads when a test says so."""

    def __init__(self, log: list[str], name: str) -> None:
        self._log, self._name = log, name
        self.status = "unloaded"
        self.failure: Exception | None = None
        self.may_load, self.may_end = asyncio.Event(), asyncio.Event()
        self.on_ready: Callable[[str], None] = lambda message: None
        self.on_end: Callable[[], None] = lambda: None

    def start_loading(self) -> None:
        self._log.append(f"load {self._name}")
        self.status = "loading"

    async def run(self) -> None:
        await self.may_load.wait()
        if self.failure is not None:
            self.status = "failed"
            self.on_end()
            return
        self.status = "ready"
        self.on_ready("ready")
        await self.may_end.wait()
        self.status = "dead"
        self.on_end()

    async def unload(self) -> None:
        self._log.append(f"unload {self._name}")
        await asyncio.sleep(0)
        self.status, self.failure = "unloaded", None
        self.may_end.clear()

    async def close(self) -> None:
        self.status = "unloaded"

    def refusal(self) -> ApiError | None:
        return None if self.status == "ready" else unavailable("loading the weights", "loading")

    def knows(self, name: str) -> bool:
        return name == f"adapter-of-{self._name}"

    @property
    def service(self) -> Any:
        class Anything:
            card = None
            models = property(lambda self: self)
            find = lambda self, name: self  # noqa: E731 - a stand-in

        return Anything()


class Scene:
    """A pool of models a, b, c."""

    def __init__(self, max_loaded: int = 1, idle_unload_s: float | None = None, names: str = "abc") -> None:
        self.log: list[str] = []
        self.fakes = {name: FakeLifecycle(self.log, name) for name in names}
        slots = [
            ModelSlot(names=(name,), args=EngineArgs(model_name=name), lifecycle=cast("EngineLifecycle", fake))
            for name, fake in self.fakes.items()
        ]
        self.slots = dict(zip(names, slots, strict=True))
        self.pool = EnginePool(slots, ModelAliases(("big=b", "x-*=c")), max_loaded, idle_unload_s)
        self.served: list[str] = []

    async def __aenter__(self) -> "Scene":
        for fake in self.fakes.values():
            fake.may_load.set()
        self._running = asyncio.create_task(self.pool.run())
        await self.settle()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._running.cancel()
        await asyncio.wait((self._running,))
        await self.pool.close()

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)

    async def use(self, name: str, until: asyncio.Event | None = None, mark: str = "") -> None:
        slot = self.slots[name]
        if not self.pool.acquire_now(slot):
            await self.pool.acquire(slot)
        assert slot.is_ready
        self.served.append(mark or name)
        if until is not None:
            await until.wait()
        self.pool.release(slot)


async def test_the_first_is_loaded_and_others_take_its_place_when_asked_for() -> None:
    async with Scene() as scene:
        assert scene.log == ["load a"]
        await scene.use("a")
        await scene.use("b")
        assert scene.log == ["load a", "unload a", "load b"]
        assert [slot.state for slot in scene.pool.slots] == ["unloaded", "loaded", "unloaded"]
        await scene.use("a")
        assert scene.log[3:] == ["unload b", "load a"]


async def test_as_many_are_loaded_as_may_be_and_the_least_recently_used_goes() -> None:
    async with Scene(max_loaded=2) as scene:
        await scene.use("a")
        await scene.use("b")
        await scene.use("a")
        await scene.use("c")
        assert scene.log == ["load a", "load b", "unload b", "load c"]


async def test_a_model_in_use_ends_its_requests_and_takes_no_new_ones() -> None:
    async with Scene() as scene:
        done = asyncio.Event()
        running = asyncio.create_task(scene.use("a", done, "first a"))
        await scene.settle()
        waiting = [asyncio.create_task(scene.use(name, mark=f"{name} in line")) for name in ("b", "a", "b")]
        await scene.settle()
        assert scene.served == ["first a"]
        assert "at most 1 loaded" in scene.pool.why_waiting(scene.slots["b"])
        done.set()
        await asyncio.gather(running, *waiting)
        assert scene.served == ["first a", "b in line", "b in line", "a in line"]
        assert scene.log == ["load a", "unload a", "load b", "unload b", "load a"]


async def test_those_that_give_up_leave_the_line() -> None:
    async with Scene() as scene:
        done = asyncio.Event()
        running = asyncio.create_task(scene.use("a", done))
        await scene.settle()
        waiting = asyncio.create_task(scene.use("b"))
        await scene.settle()
        waiting.cancel()
        await asyncio.wait((waiting,))
        done.set()
        await running
        await scene.settle()
        await scene.use("a")
        assert all(slot.num_users == 0 for slot in scene.pool.slots)


async def test_one_that_cannot_be_loaded_tells_those_in_line_and_is_tried_again() -> None:
    async with Scene() as scene:
        scene.fakes["b"].failure = ValueError("no such file")
        waiting = [asyncio.create_task(scene.use("b")) for _ in range(2)]
        for task in waiting:
            with pytest.raises(ApiError, match="no such file"):
                await task
        await scene.use("b")
        await scene.use("a")
        assert [slot.state for slot in scene.pool.slots] == ["loaded", "unloaded", "unloaded"]


async def test_one_that_has_died_is_loaded_again() -> None:
    async with Scene() as scene:
        scene.fakes["a"].may_end.set()
        await scene.settle()
        assert scene.slots["a"].state == "unloaded"
        await scene.use("a")
        assert scene.log == ["load a", "unload a", "load a"]


async def test_one_that_nobody_uses_goes() -> None:
    async with Scene(idle_unload_s=0.05) as scene:
        done = asyncio.Event()
        running = asyncio.create_task(scene.use("a", done))
        await asyncio.sleep(0.3)
        assert scene.slots["a"].state == "loaded"
        done.set()
        await running
        while scene.slots["a"].state != "unloaded":
            await asyncio.sleep(0.02)
        await scene.use("a")


async def test_names() -> None:
    async with Scene() as scene:
        find = scene.pool.find
        assert [find(name).name for name in (None, "", "A", "c:latest", "big", "x-1", "adapter-of-b")] == [
            "a", "a", "a", "c", "b", "c", "b",
        ]  # fmt: skip
        with pytest.raises(ApiError, match="Available: a, b, c"):
            find("d")


def test_each_model_has_its_own_aliases() -> None:
    args = ServerArgs(also_serve=("org/b", "c"), model_alias=("one=a", "two=B", "three=c", "four=adapter"))
    assert args_of(args).model_alias == ("one=a", "four=adapter")
    assert (args_of(args, "org/b").model_alias, args_of(args, "c").model_alias) == (("two=B",), ("three=c",))
