"""Adapters over HTTP: by name in requests, listed with their parent, loaded and unloaded below a root."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.server.http_server import HttpServer

from octavo.demo import demo_model_path


def write_adapter(folder: Path, *, rank: int = 4, seed: int = 0, width: int = 256) -> Path:
    """Write an adapter for the demo model's query projections."""
    folder.mkdir(parents=True)
    random, tensors = np.random.default_rng(seed), {}
    for layer in range(json.loads((demo_model_path() / "config.json").read_text())["num_hidden_layers"]):
        module = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors[f"{module}.lora_A.weight"] = random.standard_normal((rank, width), dtype=np.float32)
        tensors[f"{module}.lora_B.weight"] = random.standard_normal((256, rank), dtype=np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with adapters, one of them a link to a place outside."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two", "later")):
        write_adapter(folder / name, seed=seed)
    write_adapter(folder / "large", rank=64)
    write_adapter(folder / "misfit", width=128)
    outside = write_adapter(tmp_path_factory.mktemp("outside") / "secret")
    (folder / "link").symlink_to(outside)
    (folder / "half").mkdir()
    (folder / "half" / "adapter_config.json").write_bytes((folder / "one" / "adapter_config.json").read_bytes())
    (folder / "half" / "adapter_model.safetensors").symlink_to(outside / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[HttpServer]:
    two = json.dumps({"name": "two", "path": str(root / "two"), "base_model_name": "demo"})
    flags = ("--enable-lora", "--max-loras", "2", "--lora-modules", f"one={root / 'one'}", "--lora-modules", two)
    with HttpServer(*flags, "--allow-runtime-lora", "--lora-root", str(root), "--vllm-metrics") as running:
        yield running


def said(server: HttpServer, model: str, **options: Any) -> str:
    body = {"model": model, "prompt": "Hello", "max_tokens": 8, "temperature": 0, **options}
    reply = server.client.post("/v1/completions", json=body).raise_for_status().json()
    assert reply["model"] == model
    return str(reply["choices"][0]["text"])


def change(server: HttpServer, what: str, **body: Any) -> tuple[int, dict[str, Any]]:
    reply = server.client.post(f"/v1/{what}_lora_adapter", json=body)
    return reply.status_code, reply.json()


def test_a_name_chooses_the_adapter(server: HttpServer, root: Path) -> None:
    base, one, two = (said(server, name) for name in ("demo", "one", "two"))
    assert len({base, one, two}) == 3
    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda name: said(server, name), ("demo", "one", "two"))) == [base, one, two]
    chat = {"model": "one", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    assert server.client.post("/v1/chat/completions", json=chat).raise_for_status().json()["model"] == "one"
    cards = {card["id"]: card for card in server.client.get("/v1/models").json()["data"]}
    assert (cards["demo"]["parent"], cards["one"]["parent"], cards["two"]["parent"]) == (None, "demo", "demo")
    assert cards["one"]["root"] == str(root / "one")
    assert server.client.get("/v1/models/one").json() == cards["one"]


def test_adapters_come_and_go(server: HttpServer) -> None:
    status, reply = change(server, "load", lora_name="later", lora_path="later")
    assert (status, reply["lora_name"]) == (200, "later")
    first = said(server, "later")
    assert change(server, "load", lora_name="later", lora_path="one")[1]["error"]["code"] == "already_exists"
    assert change(server, "load", lora_name="later", lora_path="one", load_inplace=True)[0] == 200
    assert said(server, "later") == said(server, "one") != first
    assert change(server, "unload", lora_name="later")[0] == 200
    assert change(server, "unload", lora_name="later")[0] == 404
    gone = server.client.post("/v1/completions", json={"model": "later", "prompt": "x"})
    assert gone.json()["error"]["code"] == "model_not_found"
    text = server.client.get("/metrics").text
    assert 'octavo_adapter_loads_total{adapter="later"' in text
    assert 'vllm:lora_requests_info{max_lora="2"' in text


def test_unloading_waits_for_running_requests(server: HttpServer) -> None:
    assert change(server, "load", lora_name="busy", lora_path="two")[0] == 200
    body = {"model": "busy", "prompt": "Hello", "max_tokens": 150, "ignore_eos": True, "stream": True}
    with ThreadPoolExecutor(1) as thread, server.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        unloading = thread.submit(change, server, "unload", lora_name="busy")
        while server.client.get("/v1/models/busy").status_code == 200:
            next(lines)
        assert not unloading.done()
        assert list(lines)[-1] == "data: [DONE]"
        assert unloading.result()[0] == 200


@pytest.mark.parametrize("path", ["../outside", "/etc", "link", "half", "one/../../x", "a\0b", "x" * 5000])
def test_no_path_leads_out_of_the_root(server: HttpServer, path: str) -> None:
    status, reply = change(server, "load", lora_name="x", lora_path=path)
    assert (status, reply["error"]["param"]) == (400, "lora_path")
    assert "/etc" not in reply["error"]["message"]


@pytest.mark.parametrize("name", ["", "../x", "a b", "x\n", "-x", "y" * 200])
def test_odd_names_are_refused(server: HttpServer, name: str) -> None:
    assert change(server, "load", lora_name=name, lora_path="one")[1]["error"]["param"] == "lora_name"


@pytest.mark.parametrize(("path", "why"), [("large", "max_lora_rank"), ("misfit", "q_proj"), ("nowhere", "below the")])
def test_what_does_not_fit_is_refused_and_not_listed(server: HttpServer, path: str, why: str) -> None:
    status, reply = change(server, "load", lora_name=path, lora_path=path)
    assert status == 400
    assert why in reply["error"]["message"]
    assert str(Path("/tmp")) not in reply["error"]["message"]
    assert path not in {card["id"] for card in server.client.get("/v1/models").json()["data"]}
    assert said(server, "demo")


def test_names_of_the_model_are_taken(server: HttpServer) -> None:
    assert change(server, "load", lora_name="DEMO", lora_path="one")[1]["error"]["code"] == "already_exists"
