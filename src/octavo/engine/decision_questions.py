"""Typed questions about a state, and answers made of probabilities: what a decision model is asked, without any model.

A `noul` is yes or no, a `choice` one of several options, a `score` a level on a scale, lowest first.
"""

import json
import math
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

from octavo.config.json_fields import JsonFields
from octavo.errors import CheckpointError, InvalidParameterError

Kind = Literal["noul", "choice", "score"]
KINDS: tuple[Kind, ...] = ("noul", "choice", "score")
MAX_OPTIONS = 255
_FIELDS = frozenset({"type", "instructions", "criteria"})
_YES_NO = ("Yes", "No")


@dataclass(frozen=True, kw_only=True, slots=True)
class DecisionFiles:
    """A checkpoint's `decision.json` and `decision_template.jinja`; the defaults without them."""

    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by kind
    temperature: Mapping[str, float] = field(default_factory=dict)  # by kind
    noul_options: tuple[str, ...] = ("true", "false")  # in the order of the template
    template: str | None = None

    @classmethod
    def read(cls, folder: Path) -> "DecisionFiles":
        """Read what is in a folder. Raises CheckpointError: a malformed file."""
        file, template = folder / "decision.json", folder / "decision_template.jinja"
        fields = JsonFields.read(file) if file.is_file() else JsonFields(str(file), {})
        order = tuple(fields.texts("noul_options")) if "noul_options" in fields else cls().noul_options
        if sorted(order) != ["false", "true"]:
            raise fields.fail("noul_options", "'true' and 'false' are expected, in any order")
        if fields.values.get("adapter"):
            raise fields.unsupported("adapter", "; serve a LoRA adapter by its name")
        labels, temperature = fields.nested("labels"), fields.nested("temperature")
        try:
            text = template.read_text(encoding="utf-8") if template.is_file() else None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{template}: cannot be read: {error}") from error
        return cls(
            labels={kind: labels.texts(kind) for kind in labels.values},
            temperature={kind: temperature.number(kind) for kind in temperature.values},
            noul_options=order,
            template=text,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """One question, its options in the order of the prompt."""

    name: str
    kind: Kind
    instructions: Any
    options: tuple[str, ...]  # keys of a choice, numbers of levels, true and false
    labels: tuple[str, ...]  # by which the model names them
    descriptions: tuple[Any, ...]

    @property
    def for_template(self) -> dict[str, Any]:
        """Return what a template reads."""
        shared = {name: getattr(self, name) for name in ("name", "instructions")}
        lists = {name: list(getattr(self, name)) for name in ("options", "labels", "descriptions")}
        return {**shared, "type": self.kind, **lists}

    @property
    def text(self) -> str:
        """The question as a prompt has it behind the state."""
        lines = [as_text(self.instructions)] if self.instructions is not None else []
        for option, label, description in zip(self.options, self.labels, self.descriptions, strict=True):
            said = as_text(description) if description is not None else ""
            if self.kind == "noul":
                lines += [f"{label}: {said or option}"] if said or self.labels != _YES_NO else []
            else:
                shown = ": ".join(filter(None, (option if self.kind == "choice" else "", said)))
                lines.append(f"{label}. {shown}")
        first, last = self.labels[0], self.labels[-1]
        if self.kind == "noul":
            return "\n".join([*lines, f"Reply with one word, {first} or {last}."])
        what = "option" if self.kind == "choice" else "level"
        return "\n".join([*lines, f"Reply with the label of the best {what}, {first} to {last}, and nothing else."])

    def answer(self, scores: Sequence[float]) -> "Decision":
        """Return the answer, given the score of each option: logarithms of probabilities up to a constant."""
        most = max(scores)
        weights = [math.exp(score - most) for score in scores]
        shares = [weight / math.fsum(weights) for weight in weights]
        return Decision(question=self, probabilities=shares)


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """An answer: the probability of each option."""

    question: Question
    probabilities: list[float]

    @property
    def yes(self) -> float:
        """Of a noul: the probability of true."""
        return self.probabilities[self.question.options.index("true")]

    @property
    def best(self) -> int:
        """The number of the likeliest option; of equals, the first."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def score(self) -> float:
        """The expected level."""
        return math.fsum(level * share for level, share in enumerate(self.probabilities))

    @property
    def confidence(self) -> float:
        """From 0, as good as a guess, to 1."""
        count, best = len(self.probabilities), self.best
        if count == 1:
            return 1.0
        if self.question.kind == "score":
            distance = math.fsum(share * abs(level - best) for level, share in enumerate(self.probabilities))
            of_guess = math.fsum(abs(level - (count - 1) / 2) for level in range(count)) / count
            return max(0.0, 1.0 - distance / of_guess)
        return max(0.0, (self.probabilities[best] - 1 / count) / (1 - 1 / count))

    @property
    def as_dict(self) -> dict[str, Any]:
        """The answer as `/v1/systemone` has it."""
        question, shares = self.question, dict(zip(self.question.options, self.probabilities, strict=True))
        if question.kind == "noul":
            return {"type": "noul", "noul": self.yes}
        if question.kind == "choice":
            best = question.options[self.best]
            return {"type": "choice", "choice": best, "confidence": self.confidence, "probabilities": shares}
        legend = dict(zip(question.options, question.descriptions, strict=True))
        answer = {"type": "score", "score": self.score, "legend": legend, "confidence": self.confidence}
        return {**answer, "probabilities": shares}


def as_text(value: object) -> str:
    """Return a text as it is, and anything else as JSON. Raises InvalidParameterError: JSON does not have it."""
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        limit = f"a text, or what JSON has, is expected: {error}"
        raise InvalidParameterError("state", type(value).__name__, limit) from None


def make_question(
    name: str, kind: Kind, instructions: Any, options: Sequence[str], descriptions: Sequence[Any], files: DecisionFiles
) -> Question:
    """Return a question with the labels of its options.

    Raises InvalidParameterError: more options than anybody asks for, or than the model has labels for.
    """
    count, given = len(options), files.labels.get(kind)
    if not 1 <= count <= MAX_OPTIONS:
        raise InvalidParameterError(name, f"{count} options", f"1 to {MAX_OPTIONS}")
    if given is not None and len(given) < count:
        raise InvalidParameterError(name, f"{count} options", f"at most {len(given)}, for which the model has labels")
    if given is not None:
        labels = tuple(given[:count])
    elif kind == "noul":
        labels = _YES_NO if options[0] == "true" else _YES_NO[::-1]
    else:  # none begins with another one, or its probability would contain the other's
        letters = 1 if count <= len(string.ascii_uppercase) else 2
        labels = tuple("".join(each) for each in product(string.ascii_uppercase, repeat=letters))[:count]
    return Question(
        name=name,
        kind=kind,
        instructions=instructions,
        options=tuple(options),
        labels=labels,
        descriptions=tuple(descriptions),
    )


def parse_questions(questions: object, files: DecisionFiles) -> list[Question]:
    """Return questions given as `/v1/systemone` has them: by name.

    Raises InvalidParameterError: names every question at fault, a line for each.
    """
    if not isinstance(questions, Mapping) or not questions:
        raise InvalidParameterError("questions", questions, "at least one question, by name")
    parsed, problems = [], []
    for name, question in questions.items():
        try:
            parsed.append(_parsed(str(name), question, files))
        except InvalidParameterError as error:
            problems.append(f"questions.{name}: {error.limit}")
    if problems:
        raise InvalidParameterError("questions", list(questions), "\n".join(problems))
    return parsed


def _parsed(name: str, question: object, files: DecisionFiles) -> Question:
    def wrong(limit: str) -> InvalidParameterError:
        return InvalidParameterError(name, question, limit)

    if not isinstance(question, Mapping):
        raise wrong("an object is expected")
    if unknown := sorted(set(map(str, question)) - _FIELDS):
        raise wrong(f"unknown field {unknown[0]!r}; known: {', '.join(sorted(_FIELDS))}")
    kind, criteria = question.get("type"), question.get("criteria")
    if kind not in KINDS:
        raise wrong(f"type={kind!r}: one of {', '.join(KINDS)}")
    if kind == "noul":
        if not isinstance(criteria, Mapping | None) or not set(criteria or ()) <= {"true", "false"}:
            raise wrong("criteria: descriptions of true and false, or nothing")
        options, descriptions = files.noul_options, [(criteria or {}).get(option) for option in files.noul_options]
    elif kind == "choice":
        if not isinstance(criteria, Mapping) or not criteria:
            raise wrong("criteria: options and their descriptions, or null")
        options, descriptions = tuple(map(str, criteria)), list(criteria.values())
    else:
        if not isinstance(criteria, Sequence) or isinstance(criteria, str) or not criteria:
            raise wrong("criteria: a list of levels, lowest first")
        options, descriptions = tuple(map(str, range(len(criteria)))), list(criteria)
    return make_question(name, kind, question.get("instructions"), options, descriptions, files)
