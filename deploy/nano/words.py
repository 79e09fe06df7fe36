"""Words, and random values made of them, in two splits that never meet: one to train with, one to be examined with.

A value belongs to the examination if a checksum of its letters says so; a `Draw` gives out values of its own split
alone. So no name, number or identifier that the evaluation asks for was ever seen in training, by construction.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

Split = Literal["train", "test"]
Value = str | int | float | bool
T = TypeVar("T")


def _list(text: str) -> list[str]:
    return text.split()


NAMES = _list(
    "Ada Adam Aisha Alan Alice Amara Amir Ana Anders Anna Anton Aria Astrid Ben Bianca Boris Bruno Carla Carlos Chen "
    "Chloe Clara Dan Daria David Diego Dora Elena Elias Ella Emil Emma Enzo Eric Esther Eva Farah Felix Finn Fiona "
    "Frank Freya Gina Grace Greta Hana Hannah Hassan Helen Henry Hugo Ida Igor Ines Ingrid Iris Isaac Ivan Jack Jana "
    "Jane Jin Joe John Jonas Judith Julia Kai Karim Kate Kenji Lara Laura Lea Leo Liam Lina Linus Lisa Lola Louis "
    "Lucia Lucy Luis Luka Lukas Mara Marco Maria Mark Marlo Marta Mary Mateo Max Maya Mei Mia Mila Mina Mira Mona "
    "Nadia Nina Noah Nora Olga Oliver Omar Oscar Otto Pablo Paul Paula Pedro Peter Petra Pia Priya Rafael Rosa Ruth "
    "Sam Sara Selma Sofia Sven Tara Theo Tim Tina Tom Uma Vera Victor Viola Will Yara Yuki Zoe"
)
CITIES = _list(
    "Amsterdam Athens Auckland Baku Bangkok Barcelona Beijing Belgrade Bergen Berlin Bern Bogota Bologna Boston "
    "Bratislava Brussels Bucharest Budapest Cairo Cardiff Chicago Cologne Copenhagen Dakar Dallas Delhi Denver Dublin "
    "Edinburgh Florence Geneva Genoa Ghent Glasgow Graz Hamburg Hanoi Havana Helsinki Houston Istanbul Jakarta Kyoto "
    "Krakow Lagos Leipzig Lima Lisbon Ljubljana London Lyon Madrid Malaga Manila Marseille Melbourne Miami Milan "
    "Montreal Moscow Mumbai Munich Nairobi Naples Nice Osaka Oslo Ottawa Palermo Paris Perth Porto Prague Quito Riga "
    "Rome Rotterdam Salzburg Santiago Seattle Seoul Seville Singapore Sofia Stockholm Sydney Taipei Tallinn Tokyo "
    "Toronto Trieste Tunis Turin Utrecht Valencia Venice Vienna Vilnius Warsaw Zagreb Zurich"
)
# Everyday words: for text operations, titles, notes.
WORDS = _list(
    "apple arm baby bag ball bank bath beach bear bed bell bird boat body bone book bottle bowl box boy branch bread "
    "brick bridge brother brush bus butter button cake camera candle car card cat chain chair cheese church circle "
    "clock cloud coat coffee coin corn cow cup curtain dog door dream dress drum duck ear earth egg engine eye face "
    "farm father feather field finger fire fish flag floor flower fly foot forest fork friend frog fruit game garden "
    "gate gift girl glass glove goat gold grass green guitar hair hammer hand harbor hat head heart hill honey horse "
    "house ice ink iron island jar jewel juice key king kite kitchen knee knife lake lamp leaf leg lemon letter light "
    "lion lock map market meal milk mirror money monkey moon morning mother mountain mouse mouth music nail neck nest "
    "night nose ocean office onion orange oven owl paint paper park pen pencil picture pig pillow pipe plane plant "
    "plate pocket pony pot potato queen rabbit rain red ring river road rock roof room rope rose salt sand school sea "
    "seed sheep ship shirt shoe shop silver sister sky snake snow soap sock song soup spoon spring square stage stamp "
    "star station stone store storm street sugar summer sun table tail tea tent ticket tiger toe tomato tooth tower "
    "town toy train tray tree truck umbrella valley violin wall watch water wave wheel wind window wing winter wire "
    "wolf wood wool yard yellow zebra"
)
SYLLABLES = [a + b for a in _list("b d f g k l m n p r s t v z br ch dr gl kr pl sh st tr w h j") for b in "aeiou"]
ENDINGS = ["", "", "n", "r", "l", "s", "t", "x", "nd", "ck", "m"]


def is_test(text: object) -> bool:
    """Whether the checksum puts `text`, whatever its case, into the examination: one in eight."""
    return zlib.crc32(str(text).lower().encode()) % 8 == 0


def join(parts: Sequence[object], last: str = "and") -> str:
    """`a`, `a and b`, `a, b and c`."""
    texts = [str(part) for part in parts]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {last} {texts[-1]}"


class Draw:
    """Random choices from one seed, for one split. Every method that makes a value makes one of that split."""

    def __init__(self, seed: object, split: Split = "train") -> None:
        self.random = random.Random(f"{seed}/{split}")
        self.test = split == "test"

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def pick(self, choices: Sequence[T]) -> T:
        return self.random.choice(choices)

    def some(self, choices: Sequence[T], least: int, most: int) -> list[T]:
        """Different ones of `choices`, in random order."""
        return self.random.sample(choices, min(len(choices), self.random.randint(least, most)))

    def unseen(self, make: Callable[[], T], key: Callable[[T], object] = lambda value: value) -> T:
        """The first of what `make` makes whose `key` belongs to this split."""
        while True:
            value = make()
            if is_test(key(value)) == self.test:
                return value

    def word(self) -> str:
        return self.unseen(lambda: self.pick(WORDS))

    def pseudoword(self) -> str:
        """Two or three random syllables: what teaches a model to copy what it has never seen."""
        count = self.random.choice((1, 2, 2, 2, 3))
        return self.unseen(
            lambda: (
                "".join(self.pick(SYLLABLES) for _ in range(count)) + self.pick(ENDINGS)
                if count > 1
                else self.pick(SYLLABLES) + self.pick(SYLLABLES)
            )
        )

    def name(self) -> str:
        """A first name, often one that nobody has; now and then with a family name."""
        first = self.unseen(lambda: self.pick(NAMES)) if self.chance(0.5) else self.pseudoword().capitalize()
        return f"{first} {self.pseudoword().capitalize()}" if self.chance(0.15) else first

    def city(self) -> str:
        return self.unseen(lambda: self.pick(CITIES)) if self.chance(0.5) else self.pseudoword().capitalize()

    def digits(self, count: int) -> str:
        return self.unseen(lambda: str(self.random.randint(10 ** (count - 1), 10**count - 1)))

    def identifier(self) -> str:
        """`4821`, `A-4821`, `ord_482` and the like."""
        style = self.random.randrange(5)
        if style < 2:
            return self.digits(self.random.randint(3, 5))
        if style == 2:
            letters = self.random.choice("ABCDEFGHKLMNPQRSTUVWXYZ")
            return self.unseen(lambda: f"{letters}-{self.random.randint(10, 9999)}")
        if style == 3:
            return self.unseen(lambda: f"{self.pick(SYLLABLES)}_{self.random.randint(10, 999)}")
        return self.unseen(lambda: "".join(self.random.choice("abcdef0123456789") for _ in range(6)))

    def number(self, most: int = 99) -> int:
        return self.unseen(lambda: self.random.randint(2, most))

    def integer(self) -> int:
        return self.number(self.pick((9, 99, 999)))

    def decimal(self) -> float:
        return self.unseen(lambda: self.random.randint(1, 99) + self.random.randint(1, 9) / 10)

    def date(self) -> str:
        return self.unseen(
            lambda: f"{self.random.randint(2024, 2029)}-{self.random.randint(1, 12):02}-{self.random.randint(1, 28):02}"
        )

    def time(self) -> str:
        return self.unseen(lambda: f"{self.random.randint(0, 23):02}:{self.random.choice((0, 15, 20, 30, 45)):02}")

    def phrase(self) -> str:
        """One to three everyday words, now and then with one that is none."""

        def make() -> str:
            count = self.pick((1, 1, 2, 2, 3))
            return " ".join([self.pseudoword() if self.chance(0.25) else self.pick(WORDS) for _ in range(count)])

        return f"{self.unseen(make)} {self.word()}" if self.chance(0.5) else self.unseen(make)

    def email(self) -> str:
        return f"{self.name().split()[0].lower()}@{self.word()}.{self.pick(('com', 'org', 'net'))}"

    def path(self) -> str:
        folder = self.pick(("/tmp/", "docs/", "", "/home/", "data/"))
        return f"{folder}{self.word()}.{self.pick(('txt', 'md', 'csv', 'json', 'py'))}"

    def address(self) -> str:
        return f"https://{self.word()}.{self.pick(('com', 'org', 'net'))}/{self.pseudoword()}"

    def value(self, kind: str) -> Value:
        """A value of the named kind, which is the name of a method above, or `boolean`."""
        if kind == "boolean":
            return self.chance(0.5)
        result: Value = getattr(self, kind)()
        return result
