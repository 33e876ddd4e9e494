"""What the clients say to the demo model, which knows its answers by heart."""

from typing import Any

import pydantic

MODEL = "demo"
QUESTION: Any = [{"role": "user", "content": "What is a block?"}]
RECORD: Any = [{"role": "user", "content": "JSON please: name Ada, age 36, city Rome"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
WEATHER_TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FORECAST = '{"temperature": 21, "sky": "sunny"}'
GREEDY: Any = {"model": MODEL, "temperature": 0}


class Person(pydantic.BaseModel):
    """What RECORD asks for."""

    name: str
    age: int
    city: str


ADA = Person(name="Ada", age=36, city="Rome")
