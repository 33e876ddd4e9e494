"""Decisions: typed questions about one state, answered by the probabilities of their options' labels.

Each question is a prompt of its own. All begin with the state, which is computed once: the prompts share its blocks. A
label of several tokens is scored token by token, by prompts that end in its first ones: what they ask for is exact.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.engine.decision_images import CLOSE, MARK, OPEN, DecisionImages, number_of
from octavo.engine.decision_questions import Decision, DecisionFiles, Question, as_text, parse_questions
from octavo.engine.front import EngineFront
from octavo.engine.ranking import answer_of
from octavo.errors import InvalidParameterError
from octavo.outputs import RequestOutput
from octavo.sampling_params import PoolingParams
from octavo.tokenizer.chat_template import ChatTemplate

_MARK, _SPLIT = "<|mark|>", "<|split|>"  # in templates: read before this; tokenize both sides apart
_TEXT = "\ue000"  # before the number of a text that is no control token
_PIECES = re.compile(f"({re.escape(_MARK)}|{re.escape(_SPLIT)}|{_TEXT}\\d+{CLOSE}|{MARK})")

Path_ = tuple[int, ...]  # tokens of a label so far
State = Any  # a text, or what JSON has
Prompt = tuple[list[int], list[int]]  # tokens with a place for each image, and which images these are


class Decisions:
    """The requests that answer questions about a state, and what their answers say.

    The state is a text, or anything that JSON has; or with `messages`, a conversation, whose last message each question
    follows. Whatever state and questions say, they write no control tokens. `images`, each by the placeholder that
    stands for it in any text, and parts of messages are seen where the model sees.

    Raises InvalidParameterError: names the question, its value and the limit. PromptTooLongError: it does not fit.
    """

    def __init__(
        self,
        front: EngineFront,
        state: State,
        questions: Sequence[Question],
        files: DecisionFiles,
        messages: Sequence[Mapping[str, Any]] | None = None,
        images: Mapping[str, object] | None = None,
    ) -> None:
        if not front.config.model.has_head or front.config.model.pooling.ranks:
            raise InvalidParameterError("model", front.config.model.model, "it does not write text: it cannot decide")
        self._front, self._tokenizer, self._files, self._questions = front, front.tokenizer, files, questions
        self._images = DecisionImages(front, images or {})
        control = sorted((front.tokenizer.token_text(each) for each in front.tokenizer.special_token_ids), key=len)
        special = [
            *sorted(self._images.marks, key=len, reverse=True),
            *filter(None, control[::-1]),
            _MARK,
            _SPLIT,
            _TEXT,
            OPEN,
            CLOSE,
        ]
        self._control = re.compile("|".join(map(re.escape, special)))
        self._texts: list[str] = []
        said = None if messages is None else [self._said(at, message) for at, message in enumerate(messages)]
        found = self._own_template(said, state) if files.template else self._prompts(state, said)
        self._images.check_all_used()
        prompts = [(self._images.prompt(token_ids, numbers)[1], numbers) for token_ids, numbers in found]
        self.num_tokens = _num_distinct([token_ids for token_ids, _ in prompts])  # the state's once, each question's
        self.prompts: list[object] = []
        self.params: list[PoolingParams] = []
        self._places: list[dict[Path_, tuple[int, dict[int, int]]]] = []  # of each question: see `_ask`
        self._labels = [[self._label(question, label) for label in question.labels] for question in questions]
        for (prompt, numbers), labels in zip(prompts, self._labels, strict=True):
            self._ask(prompt, numbers, labels)

    def answers(self, outputs: Sequence[RequestOutput]) -> list[Decision]:
        """Return the answers in the questions' order, given those to all prompts. Raises OctavoError: one failed."""
        found, answers = [answer_of(output) for output in outputs], []
        for question, labels, places in zip(self._questions, self._labels, self._places, strict=True):
            temperature = float(self._files.temperature.get(question.kind, 1.0))
            scores = []
            for label in labels:
                steps = (places[label[:at]] for at in range(len(label)))
                parts = [found[number][column[label[at]]] for at, (number, column) in enumerate(steps)]
                scores.append(sum(parts) / temperature)
            answers.append(question.answer(scores))
        return answers

    def num_cached(self, outputs: Sequence[RequestOutput]) -> int:
        """Return the tokens that were in the cache before: later prompts find what the first one has computed."""
        return outputs[0].metrics.num_cached_tokens

    def _ask(self, prompt: list[int], images: Sequence[int], labels: Sequence[Path_]) -> None:
        """Add the prompts of a question: itself, and one for each beginning of its labels' tokens."""
        following: dict[Path_, dict[int, int]] = {}
        for label in labels:
            for at, token_id in enumerate(label):
                column = following.setdefault(label[:at], {})
                column.setdefault(token_id, len(column))
        places: dict[Path_, tuple[int, dict[int, int]]] = {}
        for begun, column in following.items():
            self._front.inputs.limit.check(len(prompt) + len(begun), 0)
            places[begun] = len(self.prompts), column
            self.prompts.append(self._images.prompt([*prompt, *begun], images)[0])
            self.params.append(PoolingParams(label_token_ids=tuple(column)))
        self._places.append(places)

    def _label(self, question: Question, label: str) -> Path_:
        found = tuple(self._tokenizer.encode_plain(label))
        if not found:
            raise InvalidParameterError(question.name, label, "a label that has tokens in this model")
        return found

    def _said(self, at: int, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return a message whose content is one text."""
        content = self._images.text_of(message.get("content"), f"messages[{at}].content", self._escaped)
        return {**self._escaped({**message, "content": None}), "content": content}

    def _prompts(self, state: State, said: list[dict[str, Any]] | None) -> list[Prompt]:
        text = "" if said is not None else self._escaped(as_text(state))
        return [self._prompt(text, said or [], self._escaped(question.text)) for question in self._questions]

    def _prompt(self, state: str, messages: list[dict[str, Any]], asked: str) -> Prompt:
        if messages and messages[-1]["role"] == "user":
            *messages, last = messages
            state = last["content"]
        chat = [*messages, {"role": "user", "content": f"{state}\n\n{asked}" if state else asked}]
        contents = [str(message["content"]) for message in chat]
        if self._tokenizer.chat_template is None:
            token_ids, _, numbers = self._encoded("\n\n".join(contents) + "\n\nAnswer: ", adds_special_tokens=True)
            return token_ids, numbers
        shown = [{**each, "content": self._images.parts(text)} for each, text in zip(chat, contents, strict=True)]
        text = self._images.written(self._tokenizer.render_chat(shown, enable_thinking=False))
        return self._encoded(text)[0], [number for text in contents for number in self._images.numbers(text)]

    def _own_template(self, said: list[dict[str, Any]] | None, state: State) -> list[Prompt]:
        """Return the prompts of the checkpoint's own template: what is before the marks."""
        template = ChatTemplate(self._files.template or "", special_tokens=self._tokenizer.named_tokens)
        is_for_all = template.reads("questions", with_tools=False)
        shown = self._escaped(state) if said is None else said
        asked = [self._escaped(question.for_template) for question in self._questions]
        groups = [asked] if is_for_all else [[each] for each in asked]
        prompts: list[Prompt] = []
        for group in groups:
            text = template.render(
                [{"role": "user", "content": ""}],
                state=shown,
                question=group[0],
                questions=group,
                enable_thinking=False,
            )
            token_ids, marks, numbers = self._encoded(text)
            marks = marks or [len(token_ids)]
            if len(marks) < len(group):
                limit = f"decision_template.jinja marks {len(marks)} places for {len(group)} questions"
                raise InvalidParameterError("questions", f"{len(group)} questions", limit)
            parts = [token_ids[:mark] for mark in marks[: len(group)]]
            prompts += [(part, numbers[: self._images.num_in(part)]) for part in parts]
        return prompts

    def _escaped(self, value: Any) -> Any:
        """Return what JSON has with each control token in a text as a number, and marks in place of placeholders."""
        if isinstance(value, str):
            return self._control.sub(self._number, value)
        if isinstance(value, Mapping):
            return {self._escaped(str(key)): self._escaped(each) for key, each in value.items()}
        return [self._escaped(each) for each in value] if isinstance(value, list | tuple) else value

    def _number(self, found: re.Match[str]) -> str:
        if (mark := self._images.marks.get(found[0])) is not None:
            self._images.used.add(found[0])
            return mark
        self._texts.append(found[0])
        return f"{_TEXT}{len(self._texts) - 1}{CLOSE}"

    def _encoded(self, text: str, *, adds_special_tokens: bool = False) -> tuple[list[int], list[int], list[int]]:
        """Return the ids of a rendered prompt, how many of them are before each mark, and which images it marks."""
        token_ids: list[int] = []
        marks: list[int] = []
        numbers: list[int] = []
        for piece in _PIECES.split(text):
            if piece == _MARK:
                marks.append(len(token_ids))
            elif piece.startswith(OPEN):
                numbers.append(number_of(piece))
                token_ids += self._tokenizer.encode(self._images.text, add_special_tokens=False)
            elif piece.startswith(_TEXT):
                token_ids += self._tokenizer.encode_plain(self._texts[int(piece[1:-1])])
            elif piece and piece != _SPLIT:
                token_ids += self._tokenizer.encode(piece, adds_special_tokens and not token_ids)
        return token_ids, marks, numbers


def read_decision_files(front: EngineFront) -> DecisionFiles:
    """Return the files of an engine's model. Raises CheckpointError."""
    folder = Path(front.config.model.path)
    return DecisionFiles.read(folder) if folder.is_dir() else DecisionFiles()


def decisions_about(
    front: EngineFront, state: State, questions: object, images: Mapping[str, object] | None = None
) -> Decisions:
    """Return the requests of questions by name. Raises as `parse_questions` and `Decisions`."""
    files = read_decision_files(front)
    return Decisions(front, state, parse_questions(questions, files), files, images=images)


def _num_distinct(prompts: Sequence[Sequence[int]]) -> int:
    """Return the tokens of what all prompts begin with, and of what follows in each."""
    shared = min(map(len, prompts)) if len(prompts) > 1 else 0
    for other in prompts[1:]:
        shared = next((at for at in range(shared) if prompts[0][at] != other[at]), shared)
    return shared + sum(len(prompt) - shared for prompt in prompts)
