"""`octavo embed`: the vectors of `LLM.embed`, as lines or an array; mistakes name the line."""

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

from octavo import LLM
from octavo.cli.main import app


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["embed", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_lines_and_arrays(tmp_path: Path) -> None:
    texts = ["Hello", "What is a block?"]
    plain, objects, array = tmp_path / "in.txt", tmp_path / "in.jsonl", tmp_path / "out.npy"
    plain.write_text("Hello\n\nWhat is a block?\n")
    objects.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    with LLM("demo") as llm:
        expected = [output.embedding for output in llm.embed(texts, use_tqdm=False)]
    code, said, _ = run(str(plain))
    assert code == 0
    assert [json.loads(line) for line in said.splitlines()] == [
        {"index": index, "embedding": vector} for index, vector in enumerate(expected)
    ]
    assert run(str(objects), "--field", "body", "-o", str(array))[0] == 0
    assert np.load(array).tolist() == np.array(expected, dtype=np.float32).tolist()


def test_mistakes_name_the_line(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('"Hello"\n{"other": "x"}\n')
    code, _, said = run(str(file))
    assert (code, "line 2" in said) == (2, True)
    file.write_text('"Hello"\n' + json.dumps("word " * 20_000) + "\n")
    code, _, said = run(str(file))
    assert (code, "line 2" in said, "--truncate" in said) == (2, True, True)
    assert run(str(file), "--truncate")[0] == 0
    assert run(str(tmp_path / "none"))[0] == 2
