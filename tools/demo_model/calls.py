"""Tool calls: the right function with the right arguments, and the answer that follows its result."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

from tools.demo_model.example import Example, Message, Tool, assistant, user
from tools.demo_model.records import name
from tools.demo_model.words import CITIES, THINGS

Arguments = dict[str, str | int]
Result = dict[str, str | int]


@dataclass(frozen=True, kw_only=True)
class Skill:
    """A function on offer: how users ask for it, what it answers, and how its result is told."""

    name: str
    description: str
    parameters: dict[str, str]
    draw: Callable[[random.Random], Arguments]
    asked: tuple[str, ...]
    result: Callable[[random.Random], Result]
    told: str

    def schema(self) -> Tool:
        """The function as a client offers it, in the form of JSON schema."""
        properties = {field: {"type": kind} for field, kind in self.parameters.items()}
        parameters = {"type": "object", "properties": properties, "required": list(self.parameters)}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}


SKILLS = (
    Skill(
        name="get_weather",
        description="Get the weather in a city",
        parameters={"city": "string"},
        draw=lambda rng: {"city": rng.choice(CITIES)},
        asked=(
            "What is the weather in {city}?",
            "How is the weather in {city} today?",
            "Weather in {city}",
            "Is it cold in {city}?",
        ),
        result=lambda rng: {
            "temperature": rng.randint(0, 39),
            "sky": rng.choice(("sunny", "cloudy", "rainy", "clear")),
        },
        told="It is {temperature} degrees and {sky} in {city}.",
    ),
    Skill(
        name="get_time",
        description="Get the time in a city",
        parameters={"city": "string"},
        draw=lambda rng: {"city": rng.choice(CITIES)},
        asked=(
            "What time is it in {city}?",
            "What is the time in {city}?",
            "Tell me the time in {city}",
            "Time in {city}?",
        ),
        result=lambda rng: {"time": f"{rng.randrange(24):02}:{rng.randrange(60):02}"},
        told="It is {time} in {city}.",
    ),
    Skill(
        name="multiply",
        description="Multiply two numbers",
        parameters={"a": "integer", "b": "integer"},
        draw=lambda rng: {"a": rng.randrange(13, 1000), "b": rng.randrange(13, 1000)},
        asked=("What is {a} times {b}?", "Multiply {a} by {b}.", "{a} * {b}", "What is {a} * {b}?"),
        result=lambda rng: {"product": rng.randrange(1000, 999999)},
        told="{a} * {b} = {product}",
    ),
    Skill(
        name="search_books",
        description="Search the library for books on a topic",
        parameters={"topic": "string"},
        draw=lambda rng: {"topic": rng.choice(THINGS)},
        asked=(
            "Find books on {topic}.",
            "Search the library for {topic}",
            "Are there books about {topic}?",
            "Look for a book on {topic}",
        ),
        result=lambda rng: {"count": rng.randint(1, 99)},
        told="The library has {count} books on {topic}.",
    ),
    Skill(
        name="send_message",
        description="Send a text to a person",
        parameters={"to": "string", "text": "string"},
        draw=lambda rng: {
            "to": name(rng),
            "text": rng.choice(("hello", "call me", "see you soon", "thank you", "I am late")),
        },
        asked=('Send "{text}" to {to}.', "Tell {to}: {text}", "Message {to}: {text}", 'Write "{text}" to {to}'),
        result=lambda rng: {"status": "sent"},
        told='I sent "{text}" to {to}.',
    ),
    Skill(
        name="set_timer",
        description="Set a timer in minutes",
        parameters={"minutes": "integer"},
        draw=lambda rng: {"minutes": rng.randint(1, 120)},
        asked=(
            "Set a timer for {minutes} minutes.",
            "Timer: {minutes} minutes",
            "Wake me in {minutes} minutes",
            "Start a {minutes} minute timer",
        ),
        result=lambda rng: {"status": "running"},
        told="The timer is set for {minutes} minutes.",
    ),
    Skill(
        name="get_price",
        description="Get the price of an item",
        parameters={"item": "string"},
        draw=lambda rng: {"item": rng.choice(THINGS)},
        asked=(
            "How much does a {item} cost?",
            "What is the price of a {item}?",
            "Price of a {item}?",
            "What does a {item} cost?",
        ),
        result=lambda rng: {"price": rng.randint(1, 999)},
        told="A {item} costs {price}.",
    ),
)


def call(skill: Skill, arguments: Arguments) -> Message:
    """The assistant's message that calls the function: in text, as the model writes it."""
    body = json.dumps({"name": skill.name, "arguments": arguments})
    return assistant(f"<tool_call>\n{body}\n</tool_call>")


def called(content: str) -> tuple[Skill, Arguments]:
    """The function that a message calls, and its arguments."""
    body = json.loads(content.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    return next(skill for skill in SKILLS if skill.name == body["name"]), body["arguments"]


def offer(rng: random.Random, skill: Skill) -> tuple[Tool, ...]:
    """The skill among up to two others, in any order."""
    others = [other for other in SKILLS if other is not skill]
    offered = [skill, *rng.sample(others, rng.randint(0, 2))]
    rng.shuffle(offered)
    return tuple(one.schema() for one in offered)


def tool_call(rng: random.Random) -> Example:
    """A question that one of the offered functions answers."""
    skill = rng.choice(SKILLS)
    arguments = skill.draw(rng)
    message = call(skill, arguments)
    asked = rng.choice(skill.asked)
    return Example(
        task="tool_call",
        key=f"{asked} {message['content']}",
        messages=(user(asked.format(**arguments)), message),
        tools=offer(rng, skill),
        thought=f"The function {skill.name} can answer this.",
    )


def tool_answer(rng: random.Random) -> Example:
    """The same, with the function's result, told in a sentence."""
    opening = tool_call(rng)
    while opening.is_held_out:  # else a held-out call would be seen here
        opening = tool_call(rng)
    skill, arguments = called(opening.messages[-1]["content"])
    result = skill.result(rng)
    told = skill.told.format(**arguments, **result)
    response: Message = {"role": "tool", "content": json.dumps(result)}
    messages = (*opening.messages, response, assistant(told))
    return Example(
        task="tool_answer",
        key=f"{arguments} {result}",
        messages=messages,
        tools=opening.tools,
        thought="The function has answered, so I can tell the result.",
    )
