"""What tools ask about a server, and what they hear about routes that it does not have."""

import pytest
from tests.server.http_server import HttpServer


def test_load_settings_and_tokenizer(server: HttpServer) -> None:
    assert server.client.get("/load").json() == {"server_load": 0}
    info = server.client.get("/server_info").json()
    assert info["settings"]["model_name"] == "demo"
    assert info["settings"]["max_waiting"] == 1024
    assert not {"api_key"} & info["settings"].keys()
    tokenizer = server.client.get("/tokenizer_info").json()
    assert tokenizer["eos_token"] in tokenizer["chat_template"]
    assert tokenizer["model_max_length"] == info["max_model_len"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_ping(server: HttpServer, method: str) -> None:
    assert server.client.request(method, "/ping").status_code == 200


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/images/generations"])
def test_routes_that_are_not_offered_yet_name_those_that_are(server: HttpServer, path: str) -> None:
    response = server.post(path, {"model": "demo", "input": "Hi"})
    assert response.status_code == 404
    assert "not offered yet" in response.json()["error"]["message"]
    assert "/v1/chat/completions" in response.json()["error"]["message"]
