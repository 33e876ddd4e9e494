"""JSON records: writing them from a description, and reading them."""

import json
import random

from tools.demo_model.example import Example, exchange
from tools.demo_model.words import ADJECTIVES, CITIES, COLOURS, FIRST_NAMES, THINGS, made_up

Record = dict[str, str | int]


def name(rng: random.Random) -> str:
    """Return a first name, sometimes an invented one."""
    return rng.choice(FIRST_NAMES) if rng.random() < 0.85 else made_up(rng).capitalize()


def person(rng: random.Random) -> Record:
    """Return the fields of a person."""
    return {"name": name(rng), "age": rng.randint(1, 99), "city": rng.choice(CITIES)}


def book(rng: random.Random) -> Record:
    """Return the fields of a book."""
    title = f"The {rng.choice(ADJECTIVES)} {rng.choice(THINGS)}".title()
    return {"title": title, "author": name(rng), "year": rng.randint(1450, 2025)}


def product(rng: random.Random) -> Record:
    """Return the fields of a product."""
    return {"item": rng.choice(THINGS), "colour": rng.choice(COLOURS), "price": rng.randint(1, 999)}


KINDS = {"person": person, "book": book, "product": product}
ASKED = (
    "Write a JSON record for a {kind} with {fields}.",
    "Give me JSON for a {kind}: {fields}",
    "Make a JSON object with {fields}.",
    "Turn this into JSON: {fields}",
    "JSON please: {fields}",
)
READ = (
    "What is the {field} in {record}?",
    "Here is a record: {record}. What is the {field}?",
    "Read the {field} from {record}",
    "{record}\nWhat is the {field}?",
)


def some_fields(rng: random.Random, record: Record) -> Record:
    """Return two or all of the record's fields in random order."""
    names = rng.sample(list(record), rng.randint(2, len(record)))
    return {field: record[field] for field in names}


def json_writing(rng: random.Random) -> Example:
    """From fields in a sentence to a JSON object, in the given order."""
    kind, make = rng.choice(list(KINDS.items()))
    record = some_fields(rng, make(rng))
    joint = rng.choice((", ", ", ", " and "))
    fields = joint.join(f"{field} {value}" for field, value in record.items())
    answer = json.dumps(record)
    thought = f"The fields are {', '.join(record)}."
    return exchange("json", answer, rng.choice(ASKED).format(kind=kind, fields=fields), answer, thought)


def json_reading(rng: random.Random) -> Example:
    """One field of a JSON object, as a sentence."""
    record = some_fields(rng, rng.choice(list(KINDS.values()))(rng))
    field, value = rng.choice(list(record.items()))
    shown = json.dumps(record)
    question = rng.choice(READ).format(field=field, record=shown)
    return exchange("lookup", f"{field} {shown}", question, f"The {field} is {value}.", f"Look for the key {field}.")
