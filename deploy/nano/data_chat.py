"""Small talk, names remembered within a conversation, and system prompts that change how the model answers."""

from __future__ import annotations

from collections.abc import Callable

from catalogue import EVERYDAY
from data_facts import CAPITALS, ask_fact, expand
from data_text import Turn, arithmetic, two_digit_sum
from data_tools import REFUSAL, SUMS, ended
from words import Draw

UNKNOWN = "I am a very small model and do not know that."
SMALL_TALK: list[tuple[str, list[str]]] = [
    (
        "Hello! How can I help you?",
        expand(
            "(Hello|Hi|Hey|Hello there|Hi there|Good day|Greetings|Howdy|Hey there|hello|hi|Moin|Hallo)"
            "( Penstock| nano| friend|)"
        ),
    ),
    ("Good morning! How can I help you?", expand("Good morning( to you| Penstock|)")),
    ("Good evening! How can I help you?", expand("Good evening( to you| Penstock|)")),
    (
        "I am fine, thank you. How can I help you?",
        expand(
            "(How are you|How are you doing|How do you do|How is it going|How's it going|What's up|Are you well)"
            "( today| now|)"
        ),
    ),
    (
        "You are welcome!",
        expand(
            "(Thanks|Thank you|Thanks a lot|Thank you very much|Many thanks|Thx|Great, thanks|"
            "Perfect, thank you|Cheers)"
        ),
    ),
    (
        "Goodbye!",
        expand("(Bye|Goodbye|See you|See you later|Bye bye|Good night|I have to go|Until tomorrow|Farewell)( now|)"),
    ),
    ("Thank you!", expand("(You are|You're) (great|nice|good|smart|clever|funny|cool|the best)")),
    (
        "I am sorry.",
        expand("(That is wrong|This is wrong|Wrong|You are wrong|That's not right|You are stupid|Bad answer)"),
    ),
    ("Great!", expand("(I am happy|I'm happy|I feel good|I am glad|Nice|Cool|Super|That works|Well done|Good job)")),
    (
        "I am sorry to hear that.",
        expand("(I am sad|I'm sad|I feel bad|I am tired|I'm tired|I am ill|I feel sick|I have a problem)"),
    ),
    (
        "Why did the pipe smile? It was in a good flow.",
        expand("(Tell me|Do you know|Say|I want to hear) (a joke|something funny|another joke)"),
    ),
    ("Okay.", expand("(Okay|OK|Fine|Alright|I see|Sure|Right|Understood)")),
    (
        "Yes, I am here.",
        expand("(Are you there|Are you here|Is anybody there|Can you hear me|test|Test|ping|Do you work)"),
    ),
    (
        "I like water that flows.",
        expand("(What do you like|What is your hobby|What's your favorite thing|Do you like anything)"),
    ),
]
STRANGE = (
    "Who wrote {w}", "What is the history of {w}", "Explain {w}", "Who invented the {w}", "Why is the {w} so {w2}",
    "What do you think about {w}", "Who is {n}", "When was {n} born", "How do I build a {w}", "Where is {c}",
    "Tell me about {w}", "Tell me about {c}", "How does a {w} work", "Who won the {w} game", "What is {w}",
    "Write a poem about {w}", "Who is the president of {c}", "What is the meaning of {w}", "How old is {n}",
    "Why do we need a {w}", "What is the best {w}", "How many {w}s are in {c}", "Is {n} a {w}",
)  # fmt: skip


def small_talk(draw: Draw) -> Turn:
    """A greeting, thanks, a farewell and the like."""

    def make() -> Turn:
        answer, ways = draw.pick(SMALL_TALK)
        return _ended(draw, draw.pick(ways)), answer

    return draw.unseen(make, lambda turn: turn[0])


def _ended(draw: Draw, text: str) -> str:
    if draw.chance(0.2):
        text = text.lower()
    asks = text.lower().startswith(("how", "what", "are", "can", "do", "is "))
    return text + draw.pick(("?", "?", "") if asks else ("!", ".", "", "!"))


def unknown(draw: Draw) -> Turn:
    """What so small a model should not pretend to know, or cannot do without tools."""
    if draw.chance(0.25):
        tool = draw.pick(draw.pick([tools for tools in EVERYDAY if tools[0].theme not in (*SUMS, "echo", "define")]))
        return ended(draw, tool.ask(draw)[0]), REFUSAL
    words = {"w": draw.word(), "w2": draw.pseudoword(), "n": draw.name(), "c": draw.city()}
    text = draw.pick(STRANGE).format(**words)
    return text + draw.pick(("?", "?", ".", "")), UNKNOWN


def named(draw: Draw) -> list[Turn]:
    """Somebody says a name, or something they like, and asks for it later."""
    name = draw.name()
    hello = draw.pick(("My name is {}.", "I am {}.", "I'm {}.", "Hi, I am {}!", "Hello, my name is {}.", "Call me {}."))
    turns = [(hello.format(name), f"Nice to meet you, {name}!")]
    if draw.chance(0.4):
        thing = draw.word()
        like = draw.pick(("I like my {}.", "My favorite thing is the {}.", "I have a {}."))
        turns.append((like.format(thing), f"The {thing} sounds nice."))
    if draw.chance(0.5):
        turns.append(small_talk(draw))
    if draw.chance(0.8):
        ask = draw.pick(("What is my name?", "What's my name?", "Do you know my name?", "Who am I?", "what is my name"))
        turns.append((ask, f"Your name is {name}."))
    return turns


def question(draw: Draw) -> Turn:
    """Anything short with a known answer."""
    kind = draw.random.randrange(6)
    if kind == 0:
        return small_talk(draw)
    if kind < 3:
        return ask_fact(draw, "world")
    return ask_fact(draw) if kind == 3 else draw.pick((arithmetic, two_digit_sum))(draw)


def persona(draw: Draw) -> tuple[str, list[Turn]]:
    """A system prompt that gives the model a name, a trade or a fact to know."""
    name, trade = (
        draw.name(),
        draw.pick(("librarian", "cook", "guide", "teacher", "clerk", "gardener", "pilot", "coach")),
    )
    form = draw.random.randrange(3)
    if form == 0:
        system = draw.pick(
            ("You are {}.", "Your name is {}.", "You are called {}.", "You are {}, a helpful assistant.")
        )
        system, answer = system.format(name), f"I am {name}."
    elif form == 1:
        system, answer = f"You are {name}, a {trade}.", f"I am {name}, a {trade}."
    else:
        thing, word = draw.pick(("password", "code", "secret word", "color", "key")), draw.pseudoword()
        system = draw.pick((f"The {thing} is {word}.", f"You are a helpful assistant. The {thing} is {word}."))
        return system, [(f"What is the {thing}?", f"The {thing} is {word}."), *_more(draw)]
    ask = draw.pick(("Who are you?", "What is your name?", "who are you", "What's your name?", "Introduce yourself."))
    return system, [(ask, answer), *_more(draw)]


def _more(draw: Draw) -> list[Turn]:
    return [small_talk(draw)] if draw.chance(0.4) else []


def _one_word(turn: Turn) -> str:
    answer = turn[1]
    for land, city in CAPITALS.items():
        if answer == f"The capital of {land} is {city}.":
            return city
    return answer.split(" = ")[-1]


# System prompts, and what they make of an answer.
STYLES: list[tuple[tuple[str, ...], Callable[[str], str]]] = [
    (
        ("Answer in capitals.", "Answer in capital letters.", "Always answer in uppercase.",
         "Write everything in capitals.", "You answer in capital letters only."),
        str.upper,
    ),
    (("Answer in lowercase.", "Always write in lowercase.", "Use only lowercase letters."), str.lower),
    (
        ("You are a pirate.", "Talk like a pirate.", "Answer like a pirate."),
        lambda answer: f"Arr! {answer}",
    ),
]  # fmt: skip


def styled(draw: Draw) -> tuple[str, list[Turn]]:
    """A system prompt that changes the form of every answer."""
    form = draw.random.random()
    count = draw.random.randint(1, 4)
    if form < 0.25:
        system = draw.pick(
            ("Answer in one word.", "Answer with one word only.", "Reply with a single word.", "Use one word.")
        )
        turns = [two_digit_sum(draw) if draw.pick((False, True)) else ask_fact(draw, "world") for _ in range(count)]
        capital = [turn for turn in turns if _one_word(turn) != turn[1]]
        if capital:
            return system, [(text, _one_word((text, answer))) for text, answer in capital]
    if form < 0.4:
        system = draw.pick(("Answer with the number only.", "Reply with just the number.", "Give only the result."))
        turns = [draw.pick((arithmetic, two_digit_sum))(draw) for _ in range(count)]
        return system, [(text, answer.split(" = ")[1]) for text, answer in turns]
    if form < 0.6:
        word = draw.pseudoword().capitalize() if draw.chance(0.5) else draw.name().split()[0]
        last = draw.chance(0.5)
        where = (
            ("End every answer with {}.", "Always end with {}.")
            if last
            else ("Begin every answer with {}.", "Always begin with {}.")
        )
        said = [
            (text, f"{answer} {word}" if last else f"{word} {answer}")
            for text, answer in (question(draw) for _ in range(count))
        ]
        return draw.pick(where).format(f'"{word}"' if draw.chance(0.4) else word), said
    systems, change = draw.pick(STYLES)
    return draw.pick(systems), [(text, change(answer)) for text, answer in (question(draw) for _ in range(count))]


HELPFUL = (
    "You are a helpful assistant.", "You are Penstock Nano.", "You are a helpful AI assistant.", "Be brief.",
    "You are Penstock Nano, a helpful assistant.", "You are a friendly assistant.", "Help the user.",
)  # fmt: skip
