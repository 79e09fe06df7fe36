"""Makes expressions that look ahead or behind into ones that do not, by way of an automaton of their texts.

A state of the automaton is a set of alternatives, each a state of the expression together with those that the
expressions which look ahead of it are in, all of which have to come to an end well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .nodes import ANYTHING, EMPTY, NOTHING, Chars, Edge, Look, Node, Repeat, Seq, alt, children, repeat, seq, walk
from .reading import Fault
from .sets import ANY, WORD, CharSet, both, made, without

_MAX_PLACES = 2_000  # of an expression, repetitions written out
_MAX_ATOMS = 128
_MAX_STATES = 400
_MAX_ALTERNATIVES = 200
_MAX_STEPS = 12_000
_MAX_SIZE = 12_000  # of what is written, in parts
_TOO_LARGE = "what it looks ahead or behind for makes it too large; write it without, or with fewer repetitions"

_Looks = frozenset[tuple[int, "_State", bool]]  # a machine, where it is, and whether it must not come to an end
_State = frozenset[tuple[int, "_Looks"]]
_Context = tuple[bool, bool, tuple[_State, ...]]  # at the beginning; after a letter of a word; what looks behind


@dataclass
class _Machine:
    """The places of an expression, and what leads from each to others: nothing, an edge, a look or a character."""

    free: list[list[tuple[Edge | tuple[bool, int, bool] | None, int]]] = field(default_factory=list)
    steps: list[list[tuple[frozenset[int], int]]] = field(default_factory=list)
    begin: int = 0
    end: int = 0

    def place(self) -> int:
        self.free.append([])
        self.steps.append([])
        if len(self.free) > _MAX_PLACES:
            raise Fault(_TOO_LARGE)
        return len(self.free) - 1


def without_looks(node: Node) -> Node:
    """An expression of the same texts, as a whole, that neither looks ahead nor behind. Raises `Fault`."""
    return _Automaton(node).expression()


class _Automaton:
    def __init__(self, node: Node) -> None:
        self._atoms = _atoms(one.known for one in walk(node) if isinstance(one, Chars))
        self._machines: list[_Machine] = []
        self._behind: list[int] = []  # the machines of what looks behind
        self._word = self._made(Chars(WORD), prefix=False)
        self._any = self._made(Chars(ANY), prefix=False)
        self._main = self._made(node, prefix=False)
        self._known: dict[tuple[int, _State, int, _Context], _State] = {}

    def _made(self, node: Node, *, prefix: bool) -> int:
        machine = _Machine()
        self._machines.append(machine)
        number = len(self._machines) - 1
        machine.begin, machine.end = machine.place(), machine.place()
        self._build(machine, seq(ANYTHING, node) if prefix else node, machine.begin, machine.end)
        return number

    def _build(self, machine: _Machine, node: Node, begin: int, end: int) -> None:
        match node:
            case Chars(known):
                atoms = frozenset(index for index, atom in enumerate(self._atoms) if both(atom, known))
                machine.steps[begin].append((atoms, end))
            case Seq(parts):
                for part in parts:
                    following = machine.place()
                    self._build(machine, part, begin, following)
                    begin = following
                machine.free[begin].append((None, end))
            case Repeat(part, least, most):
                for _ in range(least):
                    following = machine.place()
                    self._build(machine, part, begin, following)
                    begin = following
                if most is None:
                    loop = machine.place()
                    machine.free[begin].append((None, loop))
                    self._build(machine, part, loop, loop)
                    begin = loop
                for _ in range((most or least) - least):
                    machine.free[begin].append((None, end))
                    following = machine.place()
                    self._build(machine, part, begin, following)
                    begin = following
                machine.free[begin].append((None, end))
            case Edge():
                machine.free[begin].append((node, end))
            case Look(part, is_ahead, is_negative):
                if not is_ahead and any(isinstance(one, Look | Edge) and one != Edge("^") for one in walk(part)):
                    raise Fault("what looks behind cannot look on from there")
                number = self._made(part, prefix=not is_ahead)
                if not is_ahead:
                    self._behind.append(number)
                    number = len(self._behind) - 1
                machine.free[begin].append(((is_ahead, number, is_negative), end))
            case _:
                for option in children(node):
                    self._build(machine, option, begin, end)

    def _closed(self, number: int, begun: Iterator[tuple[int, _Looks]] | _State, context: _Context) -> _State:
        """Where a machine may be without another character."""
        machine = self._machines[number]
        found: set[tuple[int, _Looks]] = set()
        waiting = list(begun)
        while waiting:
            one = waiting.pop()
            if one in found:
                continue
            found.add(one)
            place, looks = one
            for guard, following in machine.free[place]:
                passed = self._passed(guard, looks, context)
                if passed is not None:
                    waiting.append((following, passed))
        kept = ((place, looks) for place, looks in found if machine.steps[place] or place == machine.end)
        return frozenset(one for one in kept if not any(place == one[0] and looks < one[1] for place, looks in found))

    def _passed(self, guard: Edge | tuple[bool, int, bool] | None, looks: _Looks, context: _Context) -> _Looks | None:
        """What has to be looked for behind a guard; None where it lets nobody pass."""
        at_begin, after_word, behind = context
        match guard:
            case None:
                return looks
            case Edge("^"):
                return looks if at_begin else None
            case Edge("$"):
                return self._with(looks, self._any, context, is_negative=True)
            case Edge(kind):
                return self._with(looks, self._word, context, is_negative=after_word == (kind == "b"))
            case (True, number, is_negative):
                return self._with(looks, number, context, is_negative=is_negative)
            case (False, number, is_negative):
                end = self._machines[self._behind[number]].end
                return looks if any(place == end for place, _ in behind[number]) != is_negative else None
        raise AssertionError("unreachable")

    def _with(self, looks: _Looks, number: int, context: _Context, *, is_negative: bool) -> _Looks | None:
        begin: _State = frozenset({(self._machines[number].begin, frozenset())})
        return self._judged(looks, number, self._closed(number, begin, context), is_negative=is_negative)

    def _judged(self, looks: _Looks, number: int, state: _State, *, is_negative: bool) -> _Looks | None:
        end = self._machines[number].end
        if (end, frozenset()) in state:
            return None if is_negative else looks
        if not state:
            return looks if is_negative else None
        return looks | {(number, state, is_negative)}

    def _step(self, number: int, state: _State, atom: int, context: _Context) -> _State:
        """Where a machine is after a character, of which `context` is what is behind it."""
        key = number, state, atom, context
        if key not in self._known:
            if len(self._known) >= _MAX_STEPS:
                raise Fault(_TOO_LARGE)
            machine, found = self._machines[number], list[tuple[int, _Looks]]()
            for place, looks in state:
                following: _Looks | None = frozenset()
                for other, where, is_negative in looks:
                    if following is not None:
                        there = self._step(other, where, atom, context)
                        following = self._judged(following, other, there, is_negative=is_negative)
                if following is None:
                    continue
                # What an expression that looks ahead has found stays found, while what it looks for itself is open.
                if place == machine.end and number != self._main:
                    found.append((place, following))
                found += [(target, following) for atoms, target in machine.steps[place] if atom in atoms]
            self._known[key] = self._closed(number, iter(found), context)
            if len(self._known[key]) > _MAX_ALTERNATIVES:
                raise Fault(_TOO_LARGE)
        return self._known[key]

    def _moved(self, context: _Context, atom: int) -> _Context:
        after_word = self._asks_for_words and bool(both(self._atoms[atom], WORD))
        moved: list[_State] = []
        for index, number in enumerate(self._behind):
            moved.append(self._step_behind(number, context[2][index], atom, (False, after_word, ())))
        return False, after_word, tuple(moved)

    def _step_behind(self, number: int, state: _State, atom: int, context: _Context) -> _State:
        machine = self._machines[number]
        found = ((target, looks) for place, looks in state for atoms, target in machine.steps[place] if atom in atoms)
        return self._closed(number, found, context)

    def _is_over(self, number: int, state: _State) -> bool:
        """Whether a machine has come to its end where the text does."""
        end = self._machines[number].end
        return any(
            place == end and all(self._is_over(other, where) != negative for other, where, negative in looks)
            for place, looks in state
        )

    def expression(self) -> Node:
        self._asks_for_words = any(
            isinstance(guard, Edge) and guard.kind in "bB"
            for machine in self._machines
            for free in machine.free
            for guard, _ in free
        )
        bare: _Context = (True, False, ())
        begins = [
            frozenset({(self._machines[one].begin, frozenset[tuple[int, _State, bool]]())}) for one in self._behind
        ]
        behind = (self._closed(one, begin, bare) for one, begin in zip(self._behind, begins, strict=True))
        context: _Context = (True, False, tuple(behind))
        first = self._closed(self._main, frozenset({(self._machines[self._main].begin, frozenset())}), context)
        states: dict[tuple[_Context, _State], int] = {(context, first): 0}
        edges: list[dict[int, set[int]]] = []  # by the state that follows, the atoms that lead there
        over: list[bool] = []
        for number, (context, state) in _growing(states):
            edges.append({})
            over.append(self._is_over(self._main, state))
            for atom in range(len(self._atoms)):
                moved = self._moved(context, atom)
                following = self._step(self._main, state, atom, moved)
                if not following:
                    continue
                target = states.setdefault((moved, following), len(states))
                if len(states) > _MAX_STATES:
                    raise Fault(_TOO_LARGE)
                edges[number].setdefault(target, set()).add(atom)
        return self._eliminated(*_fewest(edges, over))

    def _eliminated(self, edges: list[dict[int, set[int]]], over: list[bool]) -> Node:
        """One expression for an automaton that begins in its first state."""
        last = len(edges)
        into: list[dict[int, Node]] = [{} for _ in range(last + 2)]
        out: list[dict[int, Node]] = [{} for _ in range(last + 2)]

        sizes: dict[tuple[int, int], int] = {}

        def lead(source: int, target: int, node: Node, size: int) -> None:
            node = alt(*([out[source][target]] if target in out[source] else []), node)
            out[source][target] = into[target][source] = node
            sizes[source, target] = sizes.get((source, target), 0) + size
            if sizes[source, target] > _MAX_SIZE:
                raise Fault(_TOO_LARGE)

        for source, targets in enumerate(edges):
            for target, atoms in targets.items():
                lead(source, target, Chars(made(one for atom in atoms for one in self._atoms[atom])), 1)
            if over[source]:
                lead(source, last, EMPTY, 0)
        lead(last + 1, 0, EMPTY, 0)
        left = set(range(last))
        while left:
            state = min(left, key=lambda one: (len(into[one]) * len(out[one]), -one))
            left.remove(state)
            loop, around = out[state].pop(state, None), sizes.get((state, state), 0)
            into[state].pop(state, None)
            again = EMPTY if loop is None else repeat(loop, 0, None)
            for source, before in into[state].items():
                del out[source][state]
                for target, after in out[state].items():
                    size = sizes[source, state] + around + sizes[state, target]
                    lead(source, target, seq(before, again, after), size)
            for target in out[state]:
                del into[target][state]
        return out[last + 1].get(last, NOTHING)


def _growing(states: dict[tuple[_Context, _State], int]) -> Iterator[tuple[int, tuple[_Context, _State]]]:
    """The states in their order, those that are added meanwhile as well."""
    done = 0
    while done < len(states):
        for number, one in enumerate([*states][done:], done):
            yield number, one
            done += 1


def _fewest(edges: list[dict[int, set[int]]], over: list[bool]) -> tuple[list[dict[int, set[int]]], list[bool]]:
    """The automaton without states from which no text ends, and with one state for all that allow the same."""
    sources: list[set[int]] = [set() for _ in edges]
    for source, targets in enumerate(edges):
        for target in targets:
            sources[target].add(source)
    useful, waiting = set[int](), [state for state, is_over in enumerate(over) if is_over]
    while waiting:
        if (state := waiting.pop()) not in useful:
            useful.add(state)
            waiting += sources[state]
    kinds = {state: int(over[state]) for state in useful | {0}}
    count = 0
    while True:
        signs = {
            state: (
                kinds[state],
                frozenset((atom, kinds[to]) for to, atoms in edges[state].items() if to in useful for atom in atoms),
            )
            for state in kinds
        }
        numbers = {sign: number for number, sign in enumerate(dict.fromkeys(signs[state] for state in sorted(kinds)))}
        kinds = {state: numbers[signs[state]] for state in kinds}
        if len(numbers) == count:
            break
        count = len(numbers)
    fewer: list[dict[int, set[int]]] = [{} for _ in numbers]
    ends = [False] * len(numbers)
    for state, kind in kinds.items():
        ends[kind] = over[state]
        for target, atoms in edges[state].items():
            if target in useful:
                fewer[kind].setdefault(kinds[target], set()).update(atoms)
    return fewer, ends


def _atoms(known: Iterator[CharSet]) -> list[CharSet]:
    """The coarsest sets that each of some sets is made of, and that the letters of words are."""
    atoms: list[CharSet] = [WORD, without(ANY, WORD)]
    for one in dict.fromkeys(known):
        atoms = [part for atom in atoms for part in (both(atom, one), without(atom, one)) if part]
        if len(atoms) > _MAX_ATOMS:
            raise Fault(_TOO_LARGE)
    return atoms
