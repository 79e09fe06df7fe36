"""Tools nobody wrote: a verb, a noun and a few arguments, put together at random, and chains of them.

They teach a model to read definitions instead of remembering tools. Each pair of verb and noun belongs to one split.
"""

from __future__ import annotations

from dataclasses import dataclass

from catalogue import Parameter, Tool
from words import Draw, is_test, join

# What a tool calls it, and how users say it; no wish word belongs to two verbs.
VERBS: dict[str, tuple[str, ...]] = {
    "get": ("Get", "Fetch", "Show me", "Look up", "Give me"),
    "create": ("Create", "Make", "Add"),
    "delete": ("Delete", "Remove", "Erase"),
    "update": ("Update", "Change", "Edit"),
    "cancel": ("Cancel", "Call off"),
    "find": ("Find", "Search for", "Look for"),
    "send": ("Send", "Mail"),
    "close": ("Close", "Shut"),
    "open": ("Open",),
    "start": ("Start", "Begin", "Launch"),
    "stop": ("Stop", "Halt", "End"),
    "book": ("Book", "Reserve"),
    "print": ("Print",),
    "archive": ("Archive", "Store away"),
    "check": ("Check", "Verify", "Test"),
    "pay": ("Pay",),
    "copy": ("Copy", "Duplicate", "Clone"),
    "share": ("Share",),
    "lock": ("Lock",),
    "rename": ("Rename",),
    "move": ("Move",),
    "download": ("Download",),
    "approve": ("Approve", "Accept"),
    "reject": ("Reject", "Decline"),
    "schedule": ("Schedule", "Plan"),
    "count": ("Count", "How many are there of"),
}
NOUNS = [
    *("order", "invoice", "ticket", "user", "customer", "account", "product", "item", "task", "project", "meeting"),
    *("event", "note", "document", "report", "message", "contact", "room", "table", "car", "bike", "trip", "flight"),
    *("payment", "refund", "coupon", "subscription", "device", "server", "database", "job", "worker", "queue"),
    *("photo", "video", "playlist", "album", "book", "recipe", "menu", "delivery", "package", "shipment", "warehouse"),
    *("employee", "team", "department", "course", "student", "teacher", "exam", "lesson", "patient", "doctor"),
    *("appointment", "claim", "policy", "contract", "offer", "lead", "campaign", "post", "comment", "channel"),
    *("branch", "commit", "issue", "release", "build", "test", "backup", "snapshot", "volume", "network", "license"),
    *("plant", "garden", "sensor", "camera", "door", "alarm", "printer", "machine", "robot", "vehicle", "station"),
    *("bill", "budget", "loan", "card", "wallet", "badge", "survey", "poll", "game", "player", "match", "form"),
]
ATTRIBUTES = [
    *(Parameter(name, name, kind) for name, kind in (("name", "name"), ("city", "city"), ("date", "date"))),
    *(Parameter(name, name, kind) for name, kind in (("title", "phrase"), ("email", "email"), ("time", "time"))),
    *(
        Parameter(name, name, kind)
        for name, kind in (("price", "decimal"), ("quantity", "integer"), ("url", "address"))
    ),
    *(Parameter(name, name, kind) for name, kind in (("path", "path"), ("owner", "name"), ("code", "identifier"))),
    *(
        Parameter(name, name, kind)
        for name, kind in (("label", "pseudoword"), ("urgent", "boolean"), ("size", "integer"))
    ),
    *(Parameter(name, name, kind) for name, kind in (("reason", "phrase"), ("page", "integer"), ("author", "name"))),
    *(
        Parameter(name, name, kind)
        for name, kind in (("limit", "integer"), ("version", "decimal"), ("tag", "pseudoword"))
    ),
    Parameter("start_date", "start date", "date"),
    Parameter("new_name", "new name", "pseudoword"),
    Parameter("phone", "phone", "identifier"),
    Parameter("dry_run", "dry run", "boolean"),
    Parameter("priority", "priority", "word", options=("low", "medium", "high")),
    Parameter("color", "color", "word", options=("red", "green", "blue", "black")),
    Parameter("format", "format", "word", options=("pdf", "csv", "json")),
    Parameter("status", "status", "word", options=("active", "paused", "done")),
]
RESULTS = [one for one in ATTRIBUTES if one.name in "name city date price quantity owner status time email title code"]
CLAUSES = ("with {0} {1}", "with the {0} {1}", "with {0} {1}", "whose {0} is {1}", "with {0} = {1}", "({0}: {1})")


@dataclass(frozen=True)
class Pair:
    """A verb and a noun."""

    verb: str
    noun: str


def coin_pair(draw: Draw, verb: str | None = None, noun: str | None = None) -> Pair:
    """A pair of this split, with the verb or noun given."""
    if verb is not None and noun is not None:
        return Pair(verb, noun)

    def make() -> Pair:
        return Pair(verb or draw.pick(list(VERBS)), noun or draw.pick(NOUNS))

    while True:
        pair = make()
        if is_test(f"{pair.verb} {pair.noun}") == draw.test:
            return pair


def coin(draw: Draw, verb: str | None = None, noun: str | None = None) -> Tool:
    """A tool of this split for a random pair, or one with the given verb or noun."""
    pair = coin_pair(draw, verb, noun)
    parameters = draw.some(ATTRIBUTES, 0, 3)
    if draw.chance(0.5):
        name = draw.pick((f"{pair.noun}_id", "id", f"{pair.noun}_id"))
        parameters.insert(0, Parameter(name, "id", "identifier"))
    parameters = parameters[:3]
    if not parameters and draw.chance(0.8):
        parameters = [draw.pick(ATTRIBUTES)]
    optional = draw.random.randint(1, len(parameters)) if len(parameters) > 1 and draw.chance(0.4) else len(parameters)
    parameters = [
        Parameter(one.name, one.spoken, one.kind, place < optional, one.options) for place, one in enumerate(parameters)
    ]
    theme = f"{pair.verb} {pair.noun}"
    results = tuple(draw.some(RESULTS, 0, 2)) if pair.verb in ("get", "find", "check") else ()
    phrases = tuple(_phrase(draw, pair, parameters) for _ in range(2))
    return Tool(_name(draw, pair), _describe(draw, pair), tuple(parameters), phrases, results, theme)


def _name(draw: Draw, pair: Pair) -> str:
    style = draw.random.randrange(12)
    if style == 0:
        return f"{pair.verb}{pair.noun.capitalize()}"
    if style == 1:
        return f"{pair.noun}_{pair.verb}"
    if style == 2:
        return f"{draw.pick(('mcp', 'api', 'crm', 'shop', draw.word()))}_{pair.verb}_{pair.noun}"
    return f"{pair.verb}_{pair.noun}"


def _describe(draw: Draw, pair: Pair) -> str:
    article = "an" if pair.noun[0] in "aeio" else "a"
    return draw.pick(
        (f"{pair.verb.capitalize()} {article} {pair.noun}", f"{pair.verb.capitalize()} {article} {pair.noun}.")
    )


def _phrase(draw: Draw, pair: Pair, parameters: list[Parameter]) -> str:
    """A wish that names every argument that must be given, and some that may."""
    wish = draw.pick(VERBS[pair.verb])
    clauses: list[str] = []
    subject = f"the {pair.noun}"
    for parameter in parameters:
        if not parameter.required and draw.chance(0.5):
            continue
        slot = f"{{{parameter.name}}}"
        if parameter.kind == "phrase" and draw.chance(0.8):
            slot = f'"{slot}"'
        if parameter.spoken == "id" and draw.chance(0.5):
            subject = draw.pick((f"{pair.noun} {slot}", f"the {pair.noun} {slot}"))
            continue
        clause = draw.pick(CLAUSES).format(parameter.spoken, slot)
        clauses.append(clause.replace("with ", "and ", 1) if clauses and clause.startswith("with ") else clause)
    return " ".join([wish, subject, *clauses])


def coin_chain(draw: Draw, length: int = 3) -> tuple[list[Tool], str]:
    """Tools of which each takes what the one before has found, and a wish for all, in which `{…}` stands for the start.

    The last one tells a fact, or does something with what was found. The first noun says which split a chain is in.
    """
    first = draw.pick([noun for noun in NOUNS if is_test(f"chain {noun}") == draw.test])
    path = [first, *draw.random.sample([noun for noun in NOUNS if noun != first], length - 2)]
    verbs = ["get" if draw.chance(0.6) else "find" for _ in path]
    start = draw.pick([one for one in ATTRIBUTES if one.name in ("name", "email", "code", "title", "phone", "label")])
    takes = [start, *(Parameter(f"{noun}_id", f"{noun} id", "identifier") for noun in path)]
    steps = [
        (f"{verb}_{noun}", Pair(verb, noun), takes[place + 1])
        for place, (verb, noun) in enumerate(zip(verbs, path, strict=True))
    ]
    slot = f'"{{{start.name}}}"' if start.kind == "phrase" else f"{{{start.name}}}"
    parts = [f"{draw.pick(VERBS[verbs[0]])} the {first} {draw.pick(CLAUSES).format(start.spoken, slot)}"]
    for before, verb, noun in zip(path, verbs[1:], path[1:], strict=False):
        wish = draw.pick(VERBS[verb]).lower()
        parts.append(draw.pick((f"{wish} its {noun}", f"{wish} the {noun} of that {before}")))
    tools = [
        Tool(name, _describe(draw, pair), (taken,), (), (given,), name)
        for (name, pair, given), taken in zip(steps, takes, strict=False)
    ]
    if draw.chance(0.5):
        goal = draw.pick([one for one in RESULTS if one.name != start.name])
        tools.append(Tool(f"get_{goal.name}", _describe(draw, Pair("get", goal.name)), (takes[-1],), (), (goal,)))
        parts.append(draw.pick((f"tell me its {goal.spoken}", f"get the {goal.spoken} of that {path[-1]}")))
    else:
        deed = draw.pick(("send", "print", "archive", "share", "check", "approve", "cancel", "delete", "pay"))
        tools.append(Tool(f"{deed}_{path[-1]}", _describe(draw, Pair(deed, path[-1])), (takes[-1],), ()))
        wish = draw.pick(VERBS[deed]).lower()
        parts.append(draw.pick((f"{wish} it", f"{wish} that {path[-1]}")))
    return tools, draw.pick((join(parts), ", then ".join(parts), ", ".join(parts)))
