"""`octavo embed`: a file of texts to vectors, as lines of JSON or an array of NumPy."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from octavo.cli.options import EngineOptions, with_derived_flags
from octavo.cli.terminal import print_json_line
from octavo.errors import InvalidParameterError, UserError

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput

_PART = 2048  # texts at once


@with_derived_flags
def embed(
    file: Annotated[
        Path,
        typer.Argument(help="a text per line; of .jsonl, a string per line, or an object with --field", metavar="FILE"),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="file for the vectors: .npy, or lines of JSON [default: standard output]"),
    ] = None,
    field: Annotated[str, typer.Option("--field", help="of a line's object: the text", metavar="<str>")] = "text",
    dimensions: Annotated[
        int | None, typer.Option("--dimensions", help="only the first numbers, of models trained for it", min=1)
    ] = None,
    pooling: Annotated[
        str | None, typer.Option("--pooling", help="last, mean or cls [default: the model's]", metavar="<str>")
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", help="to length 1 [default: the model's]", show_default=False),
    ] = None,
    truncate: Annotated[
        bool, typer.Option("--truncate", help="cut texts that are too long instead of naming the first")
    ] = False,
    *,
    engine: EngineOptions,
) -> None:
    """Turn the texts of FILE into vectors, in order, with a bar of progress on a terminal.

    A line of output is `{"index": 0, "embedding": [...]}`; an array is [texts, numbers] of float32.
    """
    from octavo import LLM, PoolingParams

    params = PoolingParams(dimensions=dimensions, pooling=pooling, normalize=normalize)
    texts = read_texts(file, field)
    if output is not None and output.exists() and output.samefile(file):
        raise InvalidParameterError("output", str(output), "must not be the input")
    kind: Literal["npy", "jsonl"] = "npy" if output is not None and output.suffix == ".npy" else "jsonl"
    with LLM(**engine) as llm:
        outputs = _embed(llm, texts, params, truncates=truncate)
    vectors = [found.embedding or [] for found in outputs]
    if kind == "npy":
        import numpy as np

        assert output is not None, "by its ending"
        np.save(output, np.array(vectors, dtype=np.float32))
        return
    lines = (json.dumps({"index": index, "embedding": vector}) for index, vector in enumerate(vectors))
    if output is None:
        for line in lines:
            print_json_line(line)
    else:
        with output.open("w", encoding="utf-8") as opened:
            opened.writelines(f"{line}\n" for line in lines)


def _embed(llm: "LLM", texts: list[str], params: object, *, truncates: bool) -> "list[RequestOutput]":
    """Return the outputs of all texts. Raises UserError: names the line at fault."""
    from tqdm import tqdm

    from octavo.errors import RequestError
    from octavo.sampling_params import PoolingParams

    assert isinstance(params, PoolingParams)
    front, outputs = llm.engine.front, list["RequestOutput"]()
    if not front.inputs.pooling_rules.makes_vectors:
        raise InvalidParameterError("model", front.config.model.model, "it scores pairs of texts: it makes no vectors")
    most, prompt = front.inputs.limit.max_prompt_tokens, front.inputs.pooling_rules.prompt
    with tqdm(total=len(texts), unit=" texts", disable=None) as progress:
        for start in range(0, len(texts), _PART):
            part: list[object] = []
            for number, text in enumerate(texts[start : start + _PART], start + 1):
                token_ids = front.tokenizer.encode(prompt + text)
                if len(token_ids) > most and truncates:
                    token_ids = front.tokenizer.encode_cut(prompt + text, most)
                try:
                    front.inputs.limit.check(len(token_ids), 0)
                except UserError as error:
                    raise InvalidParameterError("file", f"line {number}", f"{error}; --truncate cuts it") from error
                part.append({"prompt_token_ids": token_ids})
            found = llm.engine.embed(part, params)
            for number, each in enumerate(found, start + 1):
                if each.embedding is None:
                    raise RequestError(f"line {number}: {each.outputs[0].error or 'aborted'}")
            outputs += found
            progress.update(len(found))
    return outputs


def read_texts(file: Path, field: str) -> list[str]:
    """Return the texts of a file. Raises InvalidParameterError: it cannot be read, or names the line at fault."""
    try:
        lines = (sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8-sig")).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidParameterError("file", str(file), f"cannot be read: {error}") from error
    texts = [_text(line, number, file, field) for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise InvalidParameterError("file", str(file), "at least one text")
    return texts


def _text(line: str, number: int, file: Path, field: str) -> str:
    if file.suffix not in (".jsonl", ".ndjson"):
        return line
    try:
        value = json.loads(line)
    except ValueError as error:
        raise InvalidParameterError("file", f"line {number}", f"not valid JSON: {error}") from error
    text = value.get(field) if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        raise InvalidParameterError("file", f"line {number}", f"a string, or an object with one under {field!r}")
    return text
