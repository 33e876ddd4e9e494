"""openai-python, unchanged: files and batches from the upload to the output, their lists, cancel and errors."""

import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tests.clients.words import GREEDY, QUESTION

CHAT = "/v1/chat/completions"


def lines(num_lines: int, **fields: Any) -> bytes:
    body = {**GREEDY, "messages": QUESTION, **fields}
    each = ({"custom_id": f"{n}", "method": "POST", "url": CHAT, "body": body} for n in range(num_lines))
    return "\n".join(map(json.dumps, each)).encode()


def test_a_batch_from_upload_to_output(client: OpenAI, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_bytes(lines(5))
    with (tmp_path / "in.jsonl").open("rb") as content:
        file = client.files.create(
            file=content, purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
    assert (file.filename, file.purpose, file.status, file.bytes) == ("in.jsonl", "batch", "processed", len(lines(5)))
    assert file.expires_at == file.created_at + 3600
    assert client.files.retrieve(file.id) == file
    assert file.id in [each.id for each in client.files.list(purpose="batch", limit=2)]
    assert client.files.wait_for_processing(file.id) == file
    batch = client.batches.create(
        input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"name": "first"}
    )
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.metadata, batch.errors, batch.error_file_id) == (
        "completed",
        {"name": "first"},
        None,
        None,
    )
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 5, "completed": 5, "failed": 0}
    assert batch.id in [each.id for each in client.batches.list(limit=1)]  # through all pages
    output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
    direct = client.chat.completions.create(**GREEDY, messages=QUESTION)
    assert [line["custom_id"] for line in output] == [f"{n}" for n in range(5)]
    for line in output:
        answer = openai.types.chat.ChatCompletion.model_validate(line["response"]["body"])
        assert answer.choices == direct.choices
    client.files.content(batch.output_file_id).write_to_file(tmp_path / "out.jsonl")
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 5
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)


async def test_a_batch_can_be_cancelled(async_client: AsyncOpenAI) -> None:
    content = lines(3, max_tokens=1500, ignore_eos=True, n=8)
    file = await async_client.files.create(file=("in.jsonl", content), purpose="batch")
    batch = await async_client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert (await async_client.batches.cancel(batch.id)).status == "cancelling"
    while batch.status not in ("cancelled", "completed"):
        batch = await async_client.batches.retrieve(batch.id)
    assert batch.status == "cancelled"


def test_mistakes_are_errors_of_their_kind(client: OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", b'{"custom_id": "a"}'), purpose="batch")
    with pytest.raises(openai.BadRequestError, match="this server keeps files for 'batch'"):
        client.files.create(file=("in.jsonl", b"{}"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match="endpoint="):
        client.batches.create(input_file_id=file.id, endpoint="/v1/responses", completion_window="24h")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    while batch.status == "validating":
        batch = client.batches.retrieve(batch.id)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(error.line, error.code) for error in batch.errors.data or ()] == [(1, "missing_required_parameter")]
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        client.batches.cancel(batch.id)
