"""Wire types of decisions: OpenAI's `/v1/decisions` and TypeSafe's `/v1/systemone`."""

from typing import Any

import msgspec

from octavo.server.openai.embeddings import VectorsRequest
from octavo.server.openai.token_usage import ResponseUsage

DECISIONS, SYSTEM_ONE = "/v1/decisions", "/v1/systemone"
MAX_QUESTIONS, MAX_NAMED_QUESTIONS, MIN_CHOICES = 400, 64, 2

Text = str | list[dict[str, Any]]  # a text, or its parts


class PredicateQuestion(msgspec.Struct, kw_only=True, tag="predicate"):
    """Is it so?"""

    instructions: Text
    name: str | None = None


class Choice(msgspec.Struct, kw_only=True):
    """One option. The text "true" and the boolean differ."""

    value: str | bool
    description: str | None = None


class ChoiceQuestion(msgspec.Struct, kw_only=True, tag="choice"):
    """Which is it?"""

    instructions: Text
    choices: list[Choice]
    name: str | None = None


class Level(msgspec.Struct, kw_only=True):
    """A step of a scale."""

    label: str
    description: str | None = None


class ScoreQuestion(msgspec.Struct, kw_only=True, tag="score"):
    """How much? Levels are ordered, the lowest first."""

    instructions: Text
    levels: list[Level]
    name: str | None = None


AnyQuestion = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionsRequest(VectorsRequest, kw_only=True):
    """`POST /v1/decisions`."""

    input: str | list[dict[str, Any]]
    questions: list[AnyQuestion]
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    safety_identifier: str | None = None

    @property
    def num_inputs(self) -> int:
        return max(1, min(len(self.questions), MAX_QUESTIONS))


class PredicateAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="predicate"):
    """How likely it is so."""

    name: str | None
    probability: float


class ChoiceShare(msgspec.Struct, frozen=True, kw_only=True):
    """Of one option."""

    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="choice"):
    """The likeliest option."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceShare]


class LevelShare(msgspec.Struct, frozen=True, kw_only=True):
    """Of one level."""

    label: str
    value: int
    probability: float


class ScoreAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    """The expected level."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelShare]


class DecisionsReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answers, in the questions' order."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: ResponseUsage  # the state's once, and each question's own


class SystemOneRequest(VectorsRequest, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/systemone`: questions by name; see `engine/decision_questions.py`."""

    state: str | dict[str, Any] | list[Any]
    questions: dict[str, Any]
    assets: dict[str, Any] | None = None

    @property
    def num_inputs(self) -> int:
        return max(1, min(len(self.questions), MAX_NAMED_QUESTIONS))


class SystemOneUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens: the state's once, and each question's own."""

    input_tokens: int
    output_tokens: int = 0

    def count_tokens(self) -> tuple[int, int]:
        return self.input_tokens, self.output_tokens


class SystemOneReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answers, by the questions' names."""

    model: str
    answers: dict[str, dict[str, Any]]
    usage: SystemOneUsage


class SystemOneError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every response other than 2xx."""

    detail: list[dict[str, Any]] | str
