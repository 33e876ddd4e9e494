"""The flags of the command line are the fields of `EngineArgs`, `ServerArgs`, `SamplingParams`, and no others."""

from dataclasses import fields
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from octavo.cli import main
from octavo.cli.options import (
    SAMPLING_HELP,
    TYPER_SETTINGS,
    EngineOptions,
    SamplingOptions,
    ServerOptions,
    with_derived_flags,
)
from octavo.config.args import EngineArgs
from octavo.sampling_params import SamplingParams
from octavo.server.args import ServerArgs


def run(*arguments: str, with_sampling: bool = True) -> tuple[int, dict[str, Any], str]:
    """Run a command that has every derived flag; return exit code, what it received, and what was printed."""
    app = typer.Typer(**TYPER_SETTINGS)
    seen: dict[str, Any] = {}
    if with_sampling:

        @app.command()
        @with_derived_flags
        def both(word: str = "", *, sampling: SamplingOptions, engine: EngineOptions) -> None:
            """Take everything."""
            seen.update(word=word, sampling=sampling, engine=engine)

    else:

        @app.command()
        @with_derived_flags
        def engine_only(engine: EngineOptions) -> None:
            """Take engine options."""
            seen.update(engine=engine)

    result = CliRunner().invoke(app, arguments)
    return result.exit_code, seen, result.output


def test_nothing_given_is_nothing_passed_on() -> None:
    assert run()[1] == {"word": "", "sampling": {}, "engine": {}}


def test_what_is_given_arrives_under_the_names_of_the_fields() -> None:
    code, seen, _ = run(
        *("--word", "w", "--model", "m", "--max-num-seqs", "3", "--no-enable-prefix-caching", "--dtype", "bfloat16"),
        *("--temperature", "0", "--stop", "a", "--stop", "b", "--ignore-eos", "--seed", "7", "--engine-seed", "8"),
    )
    assert code == 0
    assert seen["engine"] == {
        "model_name": "m", "max_num_seqs": 3, "enable_prefix_caching": False, "dtype": "bfloat16", "seed": 8
    }  # fmt: skip
    assert seen["sampling"] == {"temperature": 0.0, "stop": ["a", "b"], "ignore_eos": True, "seed": 7}
    EngineArgs.from_options(seen["engine"])
    SamplingParams.from_options(seen["sampling"])


def test_seed_is_the_engines_where_there_are_no_sampling_flags() -> None:
    assert run("--seed", "5", with_sampling=False)[1] == {"engine": {"seed": 5}}


def test_every_engine_option_has_a_flag_and_its_help() -> None:
    code, _, text = run("--help", with_sampling=False)
    assert code == 0
    words = "".join(text.split())  # lines are broken after hyphens, too
    for spec in fields(EngineArgs):
        flag = "--model" if spec.name == "model_name" else f"--{spec.name.replace('_', '-')}"
        assert f"{flag} " in text
        assert "".join(spec.metadata["help"].split()) in words


def test_sampling_flags_are_fields_with_help() -> None:
    assert set(SAMPLING_HELP) <= {spec.name for spec in fields(SamplingParams)}
    text = run("--help")[2]
    assert all(f"--{name.replace('_', '-')} " in text for name in SAMPLING_HELP)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--max-num-seq", "1"], "--max-num-seqs"),
        (["--temprature", "1"], "--temperature"),
        (["--dtype", "float8"], "bfloat16"),
        (["--top-k", "many"], "integer"),
    ],
)
def test_a_mistake_is_named_with_what_would_be_right(arguments: list[str], hint: str) -> None:
    code, _, text = run(*arguments)
    assert code == 2
    assert hint in text


@pytest.mark.parametrize("flag", ["--n", "--logprobs"])
def test_chat_has_no_flag_whose_effect_it_could_not_show(flag: str) -> None:
    assert CliRunner().invoke(main.app, ["chat", flag, "2"]).exit_code == 2


def serve(*arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run a command with the flags of a server."""
    app = typer.Typer(**TYPER_SETTINGS)
    seen: dict[str, Any] = {}

    @app.command()
    @with_derived_flags
    def serve(*, server: ServerOptions, engine: EngineOptions) -> None:
        """Take the options of server and engine."""
        seen.update(server=server, engine=engine)

    result = CliRunner().invoke(app, arguments)
    return result.exit_code, seen, result.output


def test_server_flags_arrive_beside_the_engines() -> None:
    code, seen, _ = serve(
        "--port", "0", "--api-key", "a", "--api-key", "b", "--no-auth", "--seed", "3", "--no-access-log"
    )
    assert code == 0
    assert seen == {
        "server": {"port": 0, "api_key": ["a", "b"], "auth": False, "access_log": False},
        "engine": {"seed": 3},
    }


def test_every_server_option_has_a_flag_and_its_help() -> None:
    words = " ".join(serve("--help")[2].split())
    for spec in fields(ServerArgs):
        assert f"--{spec.name.replace('_', '-')} " in words
        assert " ".join(spec.metadata["help"].split()) in words
