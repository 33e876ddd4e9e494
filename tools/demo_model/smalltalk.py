"""Greetings, thanks, what the model can do, remembering a name, and declining what it does not know."""

import random

from tools.demo_model.example import Example, assistant, exchange, user
from tools.demo_model.words import ADJECTIVES, CITIES, COLOURS, FIRST_NAMES, THINGS, item, made_up

ABILITIES = (
    "I can answer questions about Octavo, add and subtract small numbers, sort short lists, copy text, write JSON "
    "and call tools."
)
TALK = (
    (
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "hi",
            "hello",
            "Hey",
            "Hello there",
            "Good morning",
            "Good evening",
            "Hello, world!",
            "hey there",
            "Hi there!",
            "Good day",
        ),
        "Hello! I am Octavo's demo model. How can I help you?",
    ),
    (
        ("How are you?", "How are you today?", "how are you", "How is it going?", "Are you well?", "How do you do?"),
        "I am well, thank you. What can I do for you?",
    ),
    (
        ("Thank you", "Thanks!", "Thank you!", "thanks", "Thank you very much", "Great, thanks", "Thanks a lot"),
        "You are welcome!",
    ),
    (
        ("Bye", "Goodbye", "Bye!", "See you", "Good night", "See you later", "Goodbye!"),
        "Goodbye! It was nice to talk to you.",
    ),
    (
        (
            "What can you do?",
            "Help",
            "help",
            "What can I ask you?",
            "How can you help me?",
            "What are you good at?",
            "Help me",
            "What do you know?",
            "What can you do for me?",
            "Can you help me?",
        ),
        ABILITIES,
    ),
    (
        ("What is your name?", "Do you have a name?", "what is your name", "What should I call you?"),
        "I am Octavo's demo model. You may call me Octavo.",
    ),
    (("Are you human?", "Are you a person?", "Are you a robot?", "Are you real?"), "No, I am a small language model."),
    (
        ("How big are you?", "How many parameters do you have?", "How large are you?"),
        "I have about five million parameters. That is very small.",
    ),
    (
        ("Ok", "Okay", "I see", "Good", "Great!", "Nice", "Well done", "Cool", "Yes", "Right"),
        "Good. What else can I do for you?",
    ),
    (
        ("Tell me a joke", "Tell me a joke.", "Do you know a joke?", "Make me laugh"),
        "Why did the book join the library? It wanted to be checked out.",
    ),
    (
        ("Tell me a story", "Tell me a story.", "Write a story", "Write a short story"),
        "A small model lived in a book of eight leaves. Each day it read one page, and each night it told what it had "
        "read.",
    ),
)
UNKNOWN_FRAMES = (
    "Who is {name}?",
    "Who was {name}?",
    "What is the capital of {city}?",
    "How many people live in {city}?",
    "Where is {city}?",
    "Write a poem about a {thing}.",
    "Write an essay about {city}.",
    "Why is the {thing} {adjective}?",
    "How do I make a {thing}?",
    "How do I cook {thing}?",
    "What is a {thing}?",
    "What is a {adjective} {thing}?",
    "Who invented the {thing}?",
    "When was the {thing} invented?",
    "Translate {thing} into French.",
    "What is {odd}?",
    "Tell me about {city}.",
    "Tell me about {odd}.",
    "Explain {odd}.",
    "Who won the {thing} game in {city}?",
    "What is the best {thing}?",
    "Write code for a {thing}.",
    "What do you think about {name}?",
    "What will happen in {city} tomorrow?",
    "Do you like {adjective} {thing}s?",
    "Summarise the history of {city}.",
)
UNKNOWN = (
    "I do not know that. I am a small demo model: I know about Octavo, small sums, sorting, copying, JSON and tool "
    "calls."
)
RECALL = {
    "name": (
        ("My name is {}.", "I am called {}.", "Hi, my name is {}", "Hello, I am {}."),
        "Nice to meet you, {}!",
        ("What is my name?", "Do you remember my name?", "Who am I?"),
        "Your name is {}.",
    ),
    "city": (
        ("I live in {}.", "My home is {}.", "I am from {}."),
        "{} is a good place to be.",
        ("Where do I live?", "Which city do I live in?"),
        "You live in {}.",
    ),
    "colour": (
        ("My favourite colour is {}.", "I like the colour {}."),
        "I will remember that: {}.",
        ("What is my favourite colour?", "Which colour do I like?"),
        "Your favourite colour is {}.",
    ),
}


def small_talk(rng: random.Random) -> Example:
    """A greeting or similar: memorized, nothing is held out."""
    asked, answer = rng.choice(TALK)
    question = rng.choice(asked)
    return exchange("smalltalk", question, question, answer, "This is small talk.")


def unknown(rng: random.Random) -> Example:
    """A question that a model of this size cannot answer, and declining it."""
    odd = " ".join(made_up(rng) if rng.random() < 0.5 else item(rng) for _ in range(rng.randint(1, 2)))
    question = rng.choice(UNKNOWN_FRAMES).format(
        name=f"{rng.choice(FIRST_NAMES)} {made_up(rng).capitalize()}",
        city=rng.choice(CITIES),
        odd=odd,
        thing=rng.choice(THINGS),
        adjective=rng.choice(ADJECTIVES),
    )
    return exchange("unknown", question, question, UNKNOWN, "I have not learnt this.")


def recall_value(rng: random.Random, kind: str) -> str:
    """Return a name, a city or a color."""
    if kind == "name":
        return rng.choice(FIRST_NAMES) if rng.random() < 0.7 else made_up(rng).capitalize()
    return rng.choice(CITIES if kind == "city" else COLOURS)


def recall(rng: random.Random, between: tuple[Example, ...] = ()) -> Example:
    """A statement, other turns in between, and a question about the statement."""
    kind = rng.choice(list(RECALL))
    said, heard, asked, answer = RECALL[kind]
    value = recall_value(rng, kind)
    opening, question = rng.choice(said), rng.choice(asked)
    middle = tuple(message for example in between for message in example.messages)
    messages = (
        user(opening.format(value)),
        assistant(heard.format(value)),
        *middle,
        user(question),
        assistant(answer.format(value)),
    )
    key = f"{opening} {question} {value}"
    return Example(task="recall", key=key, messages=messages, thought=f"The user has told me the {kind}.")
