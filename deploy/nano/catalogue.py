"""The tools that training offers: some everyday ones with their own wording, and thousands put together from words.

A `Tool` knows its definition as an OpenAI client would send it, how a user asks for it, and what it may answer. Tools
put together from a verb and a noun belong, as pairs, to one of the two splits of `words.py`: the examination asks for
tools that training never saw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from words import Draw, Value, join

JSON_TYPES = {"integer": "integer", "number": "integer", "decimal": "number", "boolean": "boolean"}


@dataclass(frozen=True)
class Parameter:
    """One argument. `spoken` is how users name it, `kind` says what values it takes, see `Draw.value`."""

    name: str
    spoken: str
    kind: str
    required: bool = True
    options: tuple[str, ...] = ()

    def schema(self) -> dict[str, Any]:
        """Its JSON schema, without a description."""
        schema: dict[str, Any] = {"type": JSON_TYPES.get(self.kind, "string")}
        return schema | {"enum": list(self.options)} if self.options else schema

    def value(self, draw: Draw) -> Value:
        """One it would take."""
        return draw.pick(self.options) if self.options else draw.value(self.kind)


@dataclass(frozen=True)
class Tool:
    """A function. `phrases` ask for it, with its parameters' names in braces; `result` says what comes back."""

    name: str
    description: str
    parameters: tuple[Parameter, ...]
    phrases: tuple[str, ...]
    result: tuple[Parameter, ...] = ()
    theme: str = field(default="", compare=False)

    def definition(self, draw: Draw) -> dict[str, Any]:
        """What a client sends: mostly OpenAI's own form, now and then with the variations of common libraries."""
        properties: dict[str, Any] = {}
        described, titled = draw.chance(0.25), draw.chance(0.12)
        for parameter in self.parameters:
            schema = parameter.schema()
            if titled:
                schema = {"title": parameter.name.replace("_", " ").title(), **schema}
            elif described:
                schema["description"] = f"The {parameter.spoken}"
            properties[parameter.name] = schema
        required = [parameter.name for parameter in self.parameters if parameter.required]
        parameters: dict[str, Any] = {"type": "object", "properties": properties}
        if titled:
            parameters = {"properties": properties, "required": required, "title": f"{self.name}Arguments"}
            parameters["type"] = "object"
        elif required or draw.chance(0.5):
            parameters["required"] = required
        if draw.chance(0.1):
            parameters["additionalProperties"] = False
        function: dict[str, Any] = {"name": self.name, "description": self.description, "parameters": parameters}
        if draw.chance(0.1):
            del function["description"]
        return {"type": "function", "function": function}

    def ask(self, draw: Draw) -> tuple[str, dict[str, Value]]:
        """What a user says, without an end, and the arguments that are meant."""
        phrase = draw.pick(self.phrases)
        arguments: dict[str, Value] = {}
        for parameter in self.parameters:
            if f"{{{parameter.name}}}" in phrase:
                arguments[parameter.name] = parameter.value(draw)
        return fill(phrase, arguments), arguments

    def ask_often(self, draw: Draw, times: int) -> tuple[str, list[dict[str, Value]]] | None:
        """One wish for several calls that differ in one argument; None where the tool has no argument for it."""
        phrase = draw.pick(self.phrases)
        used = [one for one in self.parameters if f"{{{one.name}}}" in phrase]
        varied = [one for one in used if one.kind not in ("boolean", "phrase") and not one.options]
        if not varied:
            return None
        arguments = {one.name: one.value(draw) for one in used}
        chosen = draw.pick(varied)
        values = list(dict.fromkeys([arguments[chosen.name], *(chosen.value(draw) for _ in range(times * 3))]))[:times]
        text = fill(phrase, {**arguments, chosen.name: join(values)})
        return text, [{**arguments, chosen.name: value} for value in values]

    def answer(self, draw: Draw) -> dict[str, Value]:
        """What a call gives back."""
        return {one.name: one.value(draw) for one in self.result} or {"status": "ok"}


def fill(phrase: str, values: dict[str, Value]) -> str:
    """`phrase` with its braces filled; booleans and floats are written as in JSON."""
    for name, value in values.items():
        phrase = phrase.replace(f"{{{name}}}", str(value).lower() if isinstance(value, bool) else str(value))
    return phrase


def parse_parameters(text: str) -> tuple[Parameter, ...]:
    """Parameters from `name:kind`, `?` after optional ones, `kind` a method of `Draw` or options such as `low/high`."""
    parameters = []
    for item in text.split():
        name, kind = item.rstrip("?").split(":")
        options = tuple(kind.split("/")) if "/" in kind else ()
        spoken = name.replace("_", " ")
        parameters.append(Parameter(name, spoken, "word" if options else kind, not item.endswith("?"), options))
    return tuple(parameters)


def _everyday(names: str, theme: str, description: str, takes: str, gives: str, *phrases: str) -> list[Tool]:
    """The same tool under each of `names`."""
    parts = parse_parameters(takes), phrases, parse_parameters(gives), theme
    return [Tool(name, description, *parts) for name in names.split()]


EVERYDAY: list[list[Tool]] = [
    _everyday("get_weather weather get_current_weather", "weather", "Get the current weather in a city", "city:city",
        "temperature:number condition:sunny/cloudy/rainy/windy/foggy", "What is the weather in {city}",
        "How is the weather in {city}", "What's the weather like in {city}", "Is it warm in {city}",
        "Tell me the weather in {city}", "weather in {city}", "Get the weather for {city}", "Does it rain in {city}"),
    _everyday("get_weather get_forecast", "weather", "Get the weather for a location",
        "location:city unit:celsius/fahrenheit?", "temperature:number", "What is the weather in {location}",
        "How warm is it in {location} in {unit}", "Give me the weather of {location} in {unit}",
        "What's the temperature in {location}", "weather for {location}", "How is the weather in {location}"),
    _everyday("get_time current_time get_current_time", "time", "Get the current time in a city", "city:city",
        "time:time", "What time is it in {city}", "Tell me the time in {city}", "What is the time in {city}",
        "current time in {city}", "How late is it in {city}"),
    _everyday("add add_numbers sum", "sum", "Add two numbers", "a:integer b:integer", "result:integer",
        "Add {a} and {b}", "What is {a} plus {b}", "What is the sum of {a} and {b}", "Compute {a} + {b}",
        "What is {a} + {b}", "Use the tool to add {a} and {b}"),
    _everyday("multiply multiply_numbers", "product", "Multiply two numbers", "a:integer b:integer", "result:integer",
        "Multiply {a} by {b}", "What is {a} times {b}", "Multiply {a} and {b}", "Compute {a} * {b}",
        "What is the product of {a} and {b}"),
    _everyday("subtract", "difference", "Subtract b from a", "a:integer b:integer", "result:integer",
        "Subtract {b} from {a}", "What is {a} minus {b}", "Compute {a} - {b}"),
    _everyday("send_email send_mail", "mail", "Send an email", "to:email subject:phrase body:phrase?", "",
        'Send an email to {to} with the subject "{subject}"', 'Email {to} with subject "{subject}" and body "{body}"',
        'Write an email to {to}, subject "{subject}", body "{body}"', 'Send {to} an email about "{subject}"'),
    _everyday("send_message message", "message", "Send a message to a person", "recipient:name text:phrase", "",
        'Send {recipient} the message "{text}"', 'Tell {recipient} "{text}"', 'Message {recipient}: "{text}"',
        'Send a message to {recipient} saying "{text}"', 'Write to {recipient}: "{text}"'),
    _everyday("search search_web web_search", "search", "Search the web", "query:phrase", "title:phrase",
        "Search the web for {query}", "Search for {query}", 'Search for "{query}"', "Look for {query} on the web",
        "Google {query}"),
    _everyday("create_reminder set_reminder remind", "reminder", "Set a reminder", "text:phrase time:time", "",
        'Remind me at {time} of "{text}"', 'Set a reminder "{text}" at {time}', 'Remind me of "{text}" at {time}'),
    _everyday("set_alarm", "alarm", "Set an alarm", "time:time", "", "Set an alarm for {time}", "Wake me at {time}",
        "Wake me up at {time}", "alarm at {time}"),
    _everyday("set_timer start_timer", "timer", "Start a timer", "minutes:integer", "",
        "Set a timer for {minutes} minutes", "Start a timer of {minutes} minutes", "{minutes} minutes timer"),
    _everyday("translate translate_text", "translate", "Translate a text",
        "text:phrase language:French/German/Spanish/Italian/Polish/Dutch", "translation:pseudoword",
        'Translate "{text}" into {language}', 'How do you say "{text}" in {language}', 'Say "{text}" in {language}'),
    _everyday("convert_currency exchange", "currency", "Convert money", "amount:integer source:EUR/USD/GBP "
        "target:JPY/CHF/PLN", "amount:integer", "Convert {amount} {source} to {target}",
        "How much is {amount} {source} in {target}", "Change {amount} {source} into {target}"),
    _everyday("get_stock_price stock_price", "stock", "Get the price of a stock", "symbol:pseudoword", "price:decimal",
        "What is the stock price of {symbol}", "How is the stock {symbol} doing", "stock price of {symbol}"),
    _everyday("play_music play_song", "music", "Play a song", "title:phrase", "", 'Play "{title}"',
        'Play the song "{title}"', 'I want to hear "{title}"', "Play {title}"),
    _everyday("read_file get_file", "read", "Read a file", "path:path", "content:phrase", "Read the file {path}",
        "What is in {path}", "Show me the file {path}", "Read {path}", "Open {path} and read it"),
    _everyday("write_file save_file", "write", "Write text to a file", "path:path content:phrase", "",
        'Write "{content}" to {path}', 'Save "{content}" in {path}', 'Put "{content}" into the file {path}'),
    _everyday("list_files list_directory", "list", "List the files of a folder", "folder:pseudoword", "count:integer",
        "List the files in {folder}", "What files are in {folder}", "Show the folder {folder}"),
    _everyday("get_population", "population", "Get the population of a city", "city:city", "population:integer",
        "How many people live in {city}", "What is the population of {city}", "population of {city}"),
    _everyday("get_distance distance", "distance", "Get the distance between two cities", "origin:city "
        "destination:city", "distance:integer", "How far is it from {origin} to {destination}",
        "What is the distance between {origin} and {destination}", "distance from {origin} to {destination}"),
    _everyday("book_flight", "flight", "Book a flight", "origin:city destination:city date:date",
        "flight:identifier", "Book a flight from {origin} to {destination} on {date}",
        "I need a flight from {origin} to {destination} on {date}", "Fly me from {origin} to {destination} on {date}"),
    _everyday("book_hotel reserve_hotel", "hotel", "Book a hotel room", "city:city nights:integer guests:integer?",
        "room:identifier", "Book a hotel in {city} for {nights} nights", "I need a hotel in {city} for {nights} nights",
        "Book a room in {city} for {nights} nights and {guests} guests"),
    _everyday("set_light control_light", "light", "Switch the light of a room", "room:kitchen/bedroom/bathroom/garage "
        "state:on/off", "", "Turn the light in the {room} {state}", "Switch {state} the light in the {room}",
        "Turn {state} the {room} light", "{room} light {state}"),
    _everyday("set_temperature set_thermostat", "thermostat", "Set the temperature of a room", "room:kitchen/bedroom/"
        "bathroom/garage degrees:number", "", "Set the {room} to {degrees} degrees",
        "Make it {degrees} degrees in the {room}", "Heat the {room} to {degrees} degrees"),
    _everyday("get_date current_date", "date", "Get today's date", "", "date:date", "What is the date today",
        "What day is it", "What is today's date", "Tell me the date"),
    _everyday("get_random_number", "random", "Get a random number", "minimum:integer maximum:integer",
        "number:integer", "Give me a random number between {minimum} and {maximum}",
        "Pick a random number from {minimum} to {maximum}"),
    _everyday("get_user lookup_user", "user", "Get a user by id", "user_id:identifier", "name:name",
        "Who is user {user_id}", "Get the user {user_id}", "Look up user {user_id}", "Show user {user_id}"),
    _everyday("define define_word", "define", "Get the meaning of a word", "word:pseudoword", "meaning:phrase",
        "What does {word} mean", "Define {word}", 'What is the meaning of "{word}"'),
    _everyday("echo", "echo", "Echo a text", "text:phrase", "text:phrase", 'Echo "{text}"', "Echo {text}",
        'Use echo with the text "{text}"'),
]  # fmt: skip
