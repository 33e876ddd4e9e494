"""A scene and questions about it as one row of tokens, and the tokenizer whose texts these are."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tools.demo_model.bpe import token_id, train_bpe
from tools.demo_model.seeing.questions import PHRASINGS, Question, question
from tools.demo_model.seeing.scenes import BROAD, PLACES, Scene, random_scene

VOCAB_SIZE = 640
NUM_SCENES = 4000  # whose texts the tokenizer learns from

# Special tokens are removed when decoding.
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
NO_PICTURE = "Please show me a picture of coloured shapes or of a number."
GREETINGS = (
    "Hello",
    "Hello!",
    "Hi",
    "Hi!",
    "Hey",
    "Good morning!",
    "Who are you?",
    "What can you do?",
    "How are you?",
    "Help",
)


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What is asked about a picture."""

    shares: Mapping[str, float]  # how often a task is asked for
    count: int = 5  # questions about a picture
    # Whether no question sees those before it, as if each were the first. In a conversation, a description answers all
    # that is asked after it, so those answers teach nothing about pictures.
    apart: bool = False


# Answers that need the question compared with everything in the picture come last.
MIXED = Asking(
    shares={"count": 3, "exists": 3, "where": 2, "what": 4, "colour": 1, "shape": 1, "number": 2, "describe": 0.7}
)
APART = Asking(
    shares={"count": 4, "exists": 1, "where": 1, "what": 1, "colour": 4, "shape": 0.5, "number": 6, "describe": 8},
    count=4,
    apart=True,
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """Tokens of a conversation, or of several that begin with the same picture."""

    ids: list[int]
    answers: list[int]  # of each token: which answer it is in, from 1; 0: the model does not write it
    tasks: tuple[str, ...]  # of the answers
    branches: list[int]  # of each token: which of several conversations it is in, from 1; 0: all that follow
    places: list[int]  # of each token: its index in its conversation


def questions(scene: Scene, rng: random.Random, asking: Asking = MIXED) -> list[Question]:
    """Return some questions about a scene, in random order."""
    shares = [asking.shares[task] for task in scene.tasks]
    drawn = (question(scene, task, rng) for task in rng.choices(scene.tasks, shares, k=3 * asking.count))
    asked: dict[tuple[str, str], Question] = {}
    for each in drawn:
        if each is not None:
            asked.setdefault((each.task, each.subject), each)  # never the same twice: the first answer tells the second
    return list(asked.values())[: asking.count]


def blind_question(rng: random.Random) -> Question:
    """Return a question without a picture."""
    if rng.random() < 0.3:
        return Question(task="blind", subject="", text=rng.choice(GREETINGS), answer=NO_PICTURE)
    asked = questions(random_scene(rng, BROAD), rng)[0]
    return Question(task="blind", subject="", text=asked.text, answer=NO_PICTURE)


def row(tokenizer: Tokenizer, asked: Sequence[Question], num_image_tokens: int, *, apart: bool = False) -> Row:
    """Return a conversation whose first message has a picture of so many tokens (0: none) before its text.

    With `apart`, a conversation for each question, which share their beginning up to the end of the picture.
    """
    ids: list[int] = []
    answers: list[int] = []
    branches: list[int] = []
    places: list[int] = []
    start = "<|im_start|>user\n"
    if num_image_tokens:
        start += f"<|vision_start|>{'<|image_pad|>' * num_image_tokens}<|vision_end|>"
    shared = 0  # tokens before the branches
    for number, each in enumerate(asked, 1):
        place = shared if apart else len(ids)
        prompt = f"{each.text}<|im_end|>\n<|im_start|>assistant\n"
        for text, answer in ((start, 0), (prompt, 0), (f"{each.answer}<|im_end|>", number), ("\n", 0)):
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            ids += tokens
            answers += [answer] * len(tokens)
            branches += [number if apart and text is not start else 0] * len(tokens)
            places += range(place, place + len(tokens))
            place += len(tokens)
            if apart and text is start:
                shared = place
        start = "" if apart else "<|im_start|>user\n"
    return Row(ids=ids, answers=answers, tasks=tuple(each.task for each in asked), branches=branches, places=places)


def train_tokenizer(seed: int) -> Tokenizer:
    """Learn whole words of questions and answers; other texts are spelled in bytes."""
    return train_bpe(_texts(seed), VOCAB_SIZE, SPECIAL)


def _texts(seed: int) -> Iterator[str]:
    rng = random.Random(seed)
    yield from PLACES
    yield from GREETINGS
    yield from (text for of_task in PHRASINGS.values() for text in of_task)
    for _ in range(NUM_SCENES):
        for asked in questions(random_scene(rng, BROAD), rng):
            yield f"<|im_start|>user\n{asked.text}<|im_end|>\n<|im_start|>assistant\n{asked.answer}<|im_end|>\n"


def end_tokens(tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the ids of the end of a turn and of the end of the text."""
    return token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")
