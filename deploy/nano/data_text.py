"""Questions with one right answer that can be worked out: sums, text operations, extraction to JSON, counting."""

from __future__ import annotations

import json
from collections.abc import Callable

from words import WORDS, Draw, Value, is_test, join

Turn = tuple[str, str]  # what the user says, what the assistant answers

TWO_DIGIT_SUM, ARITHMETIC, TEXT, EXTRACTION = "two_digit_addition", "arithmetic", "text_operations", "json_extraction"

LETTERS = "abcdefghijklmnopqrstuvwxyzaeiouaeiou"
QUESTIONS = (
    "What is {}?",
    "{}",
    "{} =",
    "{}?",
    "Compute {}.",
    "How much is {}?",
    "what's {}",
    "Calculate {}",
    "{} = ?",
)
SIGNS = {"+": ("+", "+", "plus"), "-": ("-", "-", "minus"), "*": ("*", "x", "times")}


def two_digit_sum(draw: Draw) -> Turn:
    """A sum of two numbers of two digits; the pair, not only its wording, is new in the examination."""
    return _sum(draw, 10, 99, 10, 99)


def arithmetic(draw: Draw) -> Turn:
    """Small sums, differences and products."""
    kind = draw.random.randrange(10)
    if kind < 2:
        return _sum(draw, 0, 9, 0, 9)
    if kind < 4:
        return _sum(draw, *draw.pick(((10, 99, 0, 9), (0, 9, 10, 99), (10, 99, 10, 99))))
    sign, low, high = ("-", 0, 99) if kind < 8 else ("*", 0, 10)
    while True:
        a, b = draw.random.randint(low, high), draw.random.randint(low, high)
        if kind == 4:
            a, b = a % 20, b % 10
        if sign == "-" and a < b:
            a, b = b, a
        if is_test(f"{a}{sign}{b}") == draw.test:
            return _question(draw, a, sign, b, a - b if sign == "-" else a * b)


def _sum(draw: Draw, low_a: int, high_a: int, low_b: int, high_b: int) -> Turn:
    while True:
        a, b = draw.random.randint(low_a, high_a), draw.random.randint(low_b, high_b)
        if is_test(f"{min(a, b)}+{max(a, b)}") == draw.test:
            return _question(draw, a, "+", b, a + b)


def _question(draw: Draw, a: int, sign: str, b: int, result: int) -> Turn:
    said = draw.pick(SIGNS[sign])
    problem = f"{a}{said}{b}" if said in "+-*" and draw.chance(0.2) else f"{a} {said} {b}"
    return draw.pick(QUESTIONS).format(problem), f"{a} {sign} {b} = {result}"


def thought(answer: str) -> str:
    """How the model thinks about a sum or a difference when asked to: units first, then tens. Empty for others."""
    problem = answer.split(" = ")[0].split(" ")
    if len(problem) != 3 or problem[1] != "+":
        return ""
    a, b = int(problem[0]), int(problem[2])
    units = a % 10 + b % 10
    tens = a // 10 + b // 10 + units // 10
    return f"Units: {a % 10} + {b % 10} = {units}. Tens: {a // 10} + {b // 10} + {units // 10} = {tens}."


def text_operation(draw: Draw) -> Turn:
    """One of the operations below, of words, numbers or letters."""
    return draw.pick(OPERATIONS)(draw)


def _quoted(draw: Draw, text: str) -> str:
    return draw.pick((text, f'"{text}"', f"'{text}'"))


def _reverse(draw: Draw) -> Turn:
    word = draw.word()
    ask = draw.pick(("Reverse the word {}", "Write {} backwards", "Spell {} backwards", "Reverse {}"))
    return ask.format(_quoted(draw, word)) + draw.pick((".", "")), word[::-1]


def _spell(draw: Draw) -> Turn:
    word = draw.word()
    return draw.pick(("Spell {}.", "Spell the word {}.", "How do you spell {}?")).format(_quoted(draw, word)), "-".join(
        word
    )


def _letters(draw: Draw) -> Turn:
    word = draw.word()
    ask = draw.pick(("How many letters are in {}?", "Count the letters of {}.", "How many letters does {} have?"))
    return ask.format(_quoted(draw, word)), str(len(word))


def _words(draw: Draw) -> Turn:
    words = [draw.random.choice(WORDS) for _ in range(draw.random.randint(1, 8))] + [draw.word()]
    ask = draw.pick(("How many words are in {}?", "Count the words: {}", "Count the words in {}."))
    return ask.format(f'"{" ".join(words)}"'), str(len(words))


def _sort_words(draw: Draw) -> Turn:
    words = list(dict.fromkeys([draw.word(), *draw.some(WORDS, 2, 4)]))
    draw.random.shuffle(words)
    ask = draw.pick(
        ("Sort these words: {}", "Sort the words {}.", "Put in alphabetical order: {}", "Sort alphabetically: {}")
    )
    return ask.format(", ".join(words)), ", ".join(sorted(words))


def _sort_numbers(draw: Draw) -> Turn:
    numbers = list(
        dict.fromkeys([draw.number(), *(draw.random.randint(1, 99) for _ in range(draw.random.randint(2, 4)))])
    )
    draw.random.shuffle(numbers)
    down = draw.chance(0.25)
    asks = ["Sort these numbers: {}", "Sort the numbers {}.", "Put in ascending order: {}", "Sort {}"]
    asks = ["Sort from largest to smallest: {}", "Put in descending order: {}"] if down else asks
    said = ", ".join(str(number) for number in numbers)
    return draw.pick(asks).format(said), ", ".join(str(number) for number in sorted(numbers, reverse=down))


def _largest(draw: Draw) -> Turn:
    numbers = list(
        dict.fromkeys([draw.number(), *(draw.random.randint(1, 99) for _ in range(draw.random.randint(1, 3)))])
    )
    draw.random.shuffle(numbers)
    ask, choose = draw.pick((("largest", max), ("smallest", min), ("biggest", max)))
    return f"Which number is the {ask}: {join(numbers, 'or')}?", str(choose(numbers))


def _case(draw: Draw) -> Turn:
    text = " ".join([draw.word(), *draw.some(WORDS, 0, 3)])
    if draw.chance(0.3):
        return draw.pick(("Lowercase: {}", "Write in lowercase: {}")).format(text.upper()), text
    ask = draw.pick(("Uppercase: {}", "Write in capitals: {}", "Make this uppercase: {}", "Write {} in uppercase."))
    return ask.format(text), text.upper()


def _repeat(draw: Draw) -> Turn:
    text = draw.pick(
        (draw.phrase(), draw.identifier(), draw.pseudoword(), draw.email(), f"{draw.phrase()} {draw.digits(2)}")
    )
    ask = draw.pick(
        ("Say {}", "Repeat: {}", "Repeat after me: {}", "Say exactly: {}", "Echo: {}", "Write this again: {}")
    )
    return ask.format(text), text


def copy(draw: Draw) -> Turn:
    """One or two values of any kind, or letters without sense, to be said again: what all exact arguments rest on."""
    letters = draw.unseen(lambda: "".join(draw.pick(LETTERS) for _ in range(draw.random.randint(2, 8))))
    kinds = ("name", "city", "identifier", "email", "path", "phrase", "date", "decimal", "address")
    made = [
        draw.pick((letters, letters.capitalize(), str(draw.value(draw.pick(kinds)))))
        for _ in range(draw.pick((1, 1, 2)))
    ]
    text = " ".join(made)
    return draw.pick(("Say {}", "Repeat: {}", "Say exactly: {}", "{}\nSay that again.")).format(text), text


def _part(draw: Draw) -> Turn:
    words = [draw.word(), *draw.some(WORDS, 1, 5)]
    draw.random.shuffle(words)
    which, chosen = draw.pick((("first", words[0]), ("last", words[-1])))
    return draw.pick(("What is the {} word of: {}?", "Give me the {} word of: {}")).format(
        which, " ".join(words)
    ), chosen


def _count_up(draw: Draw) -> Turn:
    def make() -> tuple[int, int]:
        start = draw.pick((1, 1, draw.random.randint(2, 60)))
        return start, start + draw.random.randint(3, 19)

    low, high = draw.unseen(make)
    numbers = [str(number) for number in range(low, high + 1)]
    if draw.chance(0.3):
        numbers.reverse()
        return draw.pick((f"Count down from {high} to {low}.", f"Count from {high} down to {low}.")), ", ".join(numbers)
    asks = [f"Count from {low} to {high}.", f"Write the numbers from {low} to {high}.", f"count from {low} to {high}"]
    return draw.pick([*asks, f"Count to {high}."] if low == 1 else asks), ", ".join(numbers)


OPERATIONS: tuple[Callable[[Draw], Turn], ...] = (
    *(
        _reverse,
        _reverse,
        _spell,
        _letters,
        _words,
        _sort_words,
        _sort_numbers,
        _largest,
        _case,
        _repeat,
        _repeat,
        _part,
    ),
    _count_up,
)

# What a text may tell, as key and kind, and sentences that tell it. Integers keep their type in the JSON.
RECORDS: list[tuple[dict[str, str], tuple[str, ...]]] = [
    (
        {"name": "name", "age": "number", "city": "city"},
        (
            "{name} is {age} years old and lives in {city}.",
            "{name}, {age}, is from {city}.",
            "My name is {name}, I am {age} years old and I live in {city}.",
            "In {city} lives {name}, who is {age}.",
        ),
    ),
    (
        {"name": "name", "job": "baker/teacher/doctor/driver/painter/farmer/pilot/nurse", "city": "city"},
        ("{name} works as a {job} in {city}.", "{name} is a {job} from {city}.", "The {job} {name} lives in {city}."),
    ),
    (
        {"name": "name", "email": "email", "phone": "identifier"},
        (
            "You can reach {name} at {email} or by phone at {phone}.",
            "{name}'s email is {email} and the phone number is {phone}.",
            "Contact: {name}, {email}, phone {phone}.",
        ),
    ),
    (
        {"product": "word", "quantity": "number", "price": "decimal"},
        (
            "I would like {quantity} pieces of {product} at {price} each.",
            "The {product} costs {price} and we need {quantity}.",
            "Order: {quantity} x {product}, {price} euros each.",
        ),
    ),
    (
        {"customer": "name", "order_id": "identifier", "product": "word", "quantity": "number"},
        (
            "{customer} ordered {quantity} of the {product}; the order id is {order_id}.",
            "Order {order_id}: {customer} wants {quantity} x {product}.",
            "Order {order_id} by {customer} is for {quantity} pieces of {product}.",
        ),
    ),
    (
        {"event": "concert/meeting/party/lecture/workshop/dinner", "date": "date", "time": "time", "city": "city"},
        (
            "The {event} is on {date} at {time} in {city}.",
            "Join our {event} in {city} on {date}, {time}.",
            "On {date} there is a {event} in {city}; it starts at {time}.",
        ),
    ),
    (
        {"title": "phrase", "author": "name", "year": "year"},
        (
            'The book "{title}" was written by {author} in {year}.',
            '{author} published "{title}" in {year}.',
            'In {year}, {author} wrote "{title}".',
        ),
    ),
    (
        {"origin": "city", "destination": "city", "date": "date"},
        (
            "The train goes from {origin} to {destination} on {date}.",
            "On {date} we travel from {origin} to {destination}.",
            "{origin} to {destination}, {date}.",
        ),
    ),
    (
        {"animal": "dog/cat/horse/rabbit/owl/goat", "name": "name", "age": "number"},
        ("Our {animal} is called {name} and is {age} years old.", "{name} is a {animal} of {age} years."),
    ),
]
KEYS = ("color", "size", "code", "owner", "label", "status", "weight", "room", "level", "team", "model", "brand")


def extraction(draw: Draw) -> Turn:
    """A sentence, the keys that are wanted, and the JSON object."""
    if draw.chance(0.2):
        keys = draw.some(KEYS, 2, 4)
        makers: tuple[Callable[[], Value], ...] = (draw.word, draw.pseudoword, draw.number)
        values: dict[str, Value] = {key: draw.pick(makers)() for key in keys}
        joined = join([f"the {key} is {value}" for key, value in values.items()])
        listed = "; ".join(f"{key}: {value}" for key, value in values.items())
        sentence = draw.pick((f"{joined[0].upper()}{joined[1:]}.", listed, listed.replace("; ", "\n")))
    else:
        kinds, sentences = draw.pick(RECORDS)
        values = {key: _field(draw, kind) for key, kind in kinds.items()}
        sentence = draw.pick(sentences).format(**values)
    wanted = list(values)
    if draw.chance(0.5):
        wanted = draw.some(wanted, 1, len(wanted))
    ask = draw.pick(
        (
            "Extract {keys} as JSON: {text}",
            "Extract the {keys} as JSON from this sentence: {text}",
            "{text}\nReturn a JSON object with the keys {keys}.",
            "Return JSON with {keys}.\n\n{text}",
            "Give me {keys} as JSON. {text}",
            "Turn this into JSON with the keys {keys}: {text}",
        )
    )
    said = join(wanted) if draw.chance(0.8) else ", ".join(f'"{key}"' for key in wanted)
    return ask.format(keys=said, text=sentence), json.dumps({key: values[key] for key in wanted})


def _field(draw: Draw, kind: str) -> Value:
    if kind == "year":
        return draw.unseen(lambda: draw.random.randint(1900, 2030))
    return draw.pick(kind.split("/")) if "/" in kind else draw.value(kind)
