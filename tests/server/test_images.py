"""Images over HTTP: the answer of the same images offline, and a 400 that says why for what is not a picture."""

import base64
import http.server
import ipaddress
import threading
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from typing import Any

import pytest
from tests.end_to_end.conftest import Checkpoint
from tests.multimodal.tiny import MAX_LEN, VISION_MODELS, picture
from tests.server.http_server import HttpServer

from octavo import LLM, SamplingParams
from octavo.errors import InvalidParameterError
from octavo.multimodal.pictures import MediaFile
from octavo.server.args import ServerArgs
from octavo.server.http.errors import ApiError
from octavo.server.openai.media import MediaReader, RemoteMedia, is_public
from octavo.server.openai.protocol import ChatMessage, ContentPart

OPTIONS = ("--dtype", "float32", "--block-size", "4", "--num-kv-blocks", "256")


@pytest.fixture(scope="module")
def sighted(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("sighted")
    return Checkpoint(folder=folder, reference=VISION_MODELS["qwen2-vl"].save(folder))


@pytest.fixture(scope="module")
def server(sighted: Checkpoint) -> Iterator[HttpServer]:
    with HttpServer(*OPTIONS, "--max-images", "3", "--max-image-pixels", "90000", model=str(sighted.folder)) as running:
        yield running


def png(width: int, height: int, seed: int = 0) -> bytes:
    buffer = BytesIO()
    picture(width, height, seed).save(buffer, "PNG")
    return buffer.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def image_part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def ask(server: HttpServer, *parts: dict[str, Any], **fields: Any) -> Any:
    body = {"messages": [{"role": "user", "content": list(parts)}], "max_tokens": 6, "temperature": 0, **fields}
    return server.client.post("/v1/chat/completions", json=body)


def test_the_answer_is_that_of_the_same_images_offline(server: HttpServer, sighted: Checkpoint) -> None:
    parts = [{"type": "text", "text": "Compare "}, image_part(data_url(png(30, 21))), image_part(data_url(png(9, 9)))]
    reply = ask(server, *parts).json()
    llm = LLM(str(sighted.folder), dtype="float32", max_model_len=MAX_LEN, block_size=4, num_kv_blocks=64)
    images = [{"type": "image", "image": png(*size)} for size in ((30, 21), (9, 9))]
    [offline] = llm.chat(
        [{"role": "user", "content": [parts[0], *images]}], SamplingParams(temperature=0, max_tokens=6)
    )
    llm.exit()
    assert reply["choices"][0]["message"]["content"] == offline.text
    assert reply["usage"]["prompt_tokens"] == len(offline.prompt_token_ids)
    body = {"messages": [{"role": "user", "content": parts}]}
    assert server.client.post("/tokenize", json=body).json()["tokens"] == offline.prompt_token_ids


def test_ollamas_images_are_those_before_the_text(server: HttpServer) -> None:
    image = base64.b64encode(png(30, 21)).decode()
    other = ask(server, image_part(data_url(png(30, 21))), {"type": "text", "text": "Describe it."}).json()
    said = {"role": "user", "content": "Describe it.", "images": [image]}
    options = {"temperature": 0, "num_predict": 6}
    reply = server.post("/api/chat", {"messages": [said], "stream": False, "options": options}).json()
    assert reply["message"]["content"] == other["choices"][0]["message"]["content"]
    assert reply["prompt_eval_count"] == other["usage"]["prompt_tokens"]
    prompted = {"prompt": "Describe it.", "images": [image], "stream": False, "options": options}
    assert server.post("/api/generate", prompted).json()["response"] == reply["message"]["content"]
    assert "vision" in server.post("/api/show", {}).json()["capabilities"]
    assert server.post("/api/generate", prompted | {"images": ["no base64!"]}).status_code == 400


def test_low_detail_takes_fewer_tokens_and_a_bare_url_is_one(server: HttpServer) -> None:
    url = data_url(png(300, 8))
    same = [
        ask(server, part).json()["usage"]["prompt_tokens"]
        for part in (image_part(url), image_part(url, detail="original"), {"type": "image_url", "image_url": url})
    ]
    assert len(set(same)) == 1
    wide = data_url(png(1200, 8))
    high, low = (
        ask(server, image_part(wide, detail=detail)).json()["usage"]["prompt_tokens"] for detail in ("high", "low")
    )
    assert low < high


def test_a_prompt_with_images_is_not_truncated(server: HttpServer) -> None:
    reply = ask(server, image_part(data_url(png(8, 8))), truncate_prompt_tokens=5)
    assert reply.json()["error"]["param"] == "truncate_prompt_tokens"


class Media(http.server.BaseHTTPRequestHandler):
    """A server of media, some of it hostile."""

    def do_GET(self) -> None:
        replies: dict[str, tuple[int, dict[str, str], bytes]] = {
            "/a.png": (200, {"Content-Type": "image/png"}, png(8, 8)),
            "/moved": (302, {"Location": "/a.png"}, b""),
            "/inside": (302, {"Location": "http://10.0.0.1/a.png"}, b""),
            "/file": (302, {"Location": "file:///etc/passwd"}, b""),
            "/round": (302, {"Location": "/round"}, b""),
            "/page": (200, {"Content-Type": "text/html"}, b"<html>"),
            "/large": (200, {"Content-Type": "image/png"}, bytes(10_001)),
            "/slow": (200, {"Content-Type": "image/png", "Content-Length": "9000"}, b"x"),
            "/short": (200, {"Content-Type": "image/png", "Content-Length": "9000"}, b"x"),
            "/open": (200, {"Content-Type": "image/png", "Connection": "close"}, b"x"),
            "/%C3%BC.png?a=%20": (200, {"Content-Type": "image/png"}, png(9, 9)),
        }
        status, headers, body = replies.get(self.path, (404, {}, b""))
        self.send_response(status)
        # A body without a length ends with the connection, which at the deadline is not its end.
        length = {} if self.path == "/open" else {"Content-Length": str(len(body))}
        for name, value in {**length, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
        if self.path in ("/slow", "/open"):
            STOP.wait(30)

    def log_message(self, *_: Any) -> None:
        """Be quiet."""


STOP = threading.Event()


@pytest.fixture(scope="module")
def media() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Media) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}"
        STOP.set()
        running.shutdown()


def near() -> RemoteMedia:
    """Return a reader that takes this machine, and no other private address, for public."""
    return RemoteMedia(timeout_s=5.0, max_bytes=10_000, is_allowed=lambda address: address.is_loopback)


def test_media_are_fetched_over_redirects(media: str) -> None:
    assert near().fetch(f"{media}/moved", "image") == png(8, 8)
    assert near().fetch(f"{media}/\N{LATIN SMALL LETTER U WITH DIAERESIS}.png?a=%20", "image") == png(9, 9)


def test_parts_that_are_elsewhere_are_fetched_before_requests_are_prepared(media: str) -> None:
    """So the threads that prepare requests, few as they are, never wait for another server."""
    kinds = MediaReader.of(ServerArgs(max_images=2)).kinds
    reader = MediaReader({**kinds, "image_url": replace(kinds["image_url"], remote=near())})
    parts = [ContentPart(type="image_url", image_url=url) for url in (data_url(png(8, 8)), f"{media}/moved")]
    message = ChatMessage(role="user", content=parts)
    fetched = {path: fetch() for path, fetch in reader.remote_parts([message])}
    assert fetched == {"messages[0].content[1].image_url": png(8, 8)}
    files = [
        replace(reader, fetched=fetched).read(part, f"messages[0].content[{at}]")["image"]
        for at, part in enumerate(parts)
    ]
    assert [isinstance(file, MediaFile) and file.data for file in files] == [png(8, 8)] * 2
    with pytest.raises(ApiError, match="3 images: at most 2"):
        next(reader.remote_parts([ChatMessage(role="user", content=parts[:1] * 3)]))


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("/inside", "no public address"),
        ("/file", "http:// or https://"),
        ("/round", "more than 3 redirects"),
        ("/page", "its server sends text/html"),
        ("/large", "at most 10000 bytes"),
        ("/short", "cannot be fetched: IncompleteRead"),
        ("/none", "answers 404"),
    ],
)
def test_hostile_media_are_refused(path: str, names: str, media: str) -> None:
    with pytest.raises(InvalidParameterError, match=names):
        near().fetch(media + path, "image")


@pytest.mark.parametrize("path", ["/slow", "/open"])
def test_a_server_that_never_ends_is_left(path: str, media: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"not within 0.2 s"):
        replace(near(), timeout_s=0.2).fetch(f"{media}{path}", "image")


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "10.1.2.3", "169.254.169.254", "0.0.0.0", "[::ffff:127.0.0.1]", "0x7f.1"],
)
def test_hosts_that_are_not_public_are_not_asked(host: str) -> None:
    with pytest.raises(InvalidParameterError, match=r"no public address|cannot be fetched"):
        RemoteMedia(timeout_s=2.0, max_bytes=10).fetch(f"http://{host}:1/", "image")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("224.0.0.1", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("::ffff:10.0.0.1", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is expected


def film() -> bytes:
    buffer = BytesIO()
    first, *others = (picture(16, 16, seed) for seed in range(6))
    first.save(buffer, "GIF", save_all=True, append_images=others, duration=100)
    return buffer.getvalue()


def video_part(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url, **fields}}


def test_the_answer_is_that_of_the_same_video_offline(server: HttpServer, sighted: Checkpoint) -> None:
    reply = ask(server, video_part(data_url(film()), num_frames=2), {"type": "text", "text": "?"}).json()
    llm = LLM(str(sighted.folder), dtype="float32", max_model_len=MAX_LEN, block_size=4, num_kv_blocks=64)
    content = [{"type": "video", "video": film(), "num_frames": 2}, {"type": "text", "text": "?"}]
    [offline] = llm.chat([{"role": "user", "content": content}], SamplingParams(temperature=0, max_tokens=6))
    llm.exit()
    assert reply["choices"][0]["message"]["content"] == offline.text
    assert reply["usage"]["prompt_tokens"] == len(offline.prompt_token_ids)


@pytest.mark.parametrize(
    ("parts", "names", "param"),
    [
        ([image_part(data_url(b"nothing"))], "not a picture", "messages[0].content[0].image_url"),
        ([image_part(data_url(png(50, 50)[:-200]))], "damaged", "messages[0].content[0].image_url"),
        ([image_part(data_url(png(301, 300)))], "301 x 300 pixels", "messages[0].content[0].image_url"),
        ([image_part("http://127.0.0.1:1/a.png")], "--allow-remote-media", "messages[0].content[0].image_url"),
        ([image_part("file:///etc/passwd")], "a data: URL", "messages[0].content[0].image_url"),
        ([image_part("/etc/passwd")], "a data: URL", "messages[0].content[0].image_url"),
        ([image_part(data_url(png(8, 8)), detail="huge")], "Unknown detail", "messages[0].content[0].image_url.detail"),
        ([{"type": "image_url"}], "Missing required", "messages[0].content[0].image_url"),
        ([image_part(data_url(png(8, 8)))] * 4, "4 images: at most 3", "messages"),
        (
            [{"type": "input_audio"}],
            "accepts text, image_url and video_url, not 'input_audio'",
            "messages[0].content[0].type",
        ),
        ([video_part(data_url(b"nothing"))], "a video is expected", "messages[0].content[0]"),
        ([video_part(data_url(film()), fps=0)], "a finite number above 0", "messages[0].content[0].fps"),
        ([video_part(data_url(film()), num_frames=99)], "1 to 6", "messages[0].content[0].num_frames"),
        ([video_part("/etc/passwd")], "a data: URL", "messages[0].content[0].video_url"),
        ([video_part("http://127.0.0.1:1/a.mp4")], "--allow-remote-media", "messages[0].content[0].video_url"),
        ([video_part(data_url(film()))] * 5, "5 videos: at most 4", "messages"),
    ],
)
def test_what_is_no_medium_is_a_400_that_says_why(
    parts: list[dict[str, Any]], names: str, param: str, server: HttpServer
) -> None:
    reply = ask(server, *parts)
    assert reply.status_code == 400
    assert names in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"] == param


def test_decisions_see_images_on_both_routes(server: HttpServer) -> None:
    asked = {"type": "noul", "instructions": "Is it so?"}
    first, second = png(30, 21), png(24, 24, seed=2)

    def about(state: str, **images: bytes) -> Any:
        assets = {
            f"<{name}>": {"type": "image", "format": "png", "data_base64": base64.b64encode(data).decode()}
            for name, data in images.items()
        }
        body = {"state": state, "questions": {"q": asked}, "assets": assets}
        return server.client.post("/v1/systemone", json=body)

    named = about("See <a><b>!", a=first, b=second)
    assert named.status_code == 200, named.text
    content = [{"type": "input_text", "text": "See "}, {"type": "input_image", "image_url": data_url(first)},
               image_part(data_url(second)), {"type": "input_text", "text": "!"}]  # fmt: skip
    question = {"type": "predicate", "instructions": "Is it so?"}

    def over(parts: list[dict[str, Any]]) -> Any:
        body = {"input": [{"role": "user", "content": parts}], "questions": [question]}
        return server.client.post("/v1/decisions", json=body)

    reply = over(content)
    assert reply.status_code == 200, reply.text
    assert reply.json()["answers"][0]["probability"] == named.json()["answers"]["q"]["noul"]
    assert reply.json()["usage"]["input_tokens"] == named.json()["usage"]["input_tokens"]
    assert about("See <b><a>!", a=first, b=second).json()["answers"] != named.json()["answers"]
    for answer, status, text in (
        (about("no place", a=first), 422, "no text of the state"),
        (about("<a>", a=b"no picture"), 422, "assets.<a>.data_base64"),
        (server.client.post("/v1/systemone", json={"state": "<a>", "questions": {"q": asked}, "assets": {"<a>": 1}}),
         422, "data_base64"),
        (over([image_part("https://example.com/a.png")]), 400, "reads nothing from elsewhere"),
        (over([image_part(data_url(first))] * 4), 400, "at most 3"),
        (over([image_part(data_url(png(400, 400)))]), 400, "pixels"),
    ):  # fmt: skip
        assert answer.status_code == status, answer.text
        assert text in answer.text
