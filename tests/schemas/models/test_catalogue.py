"""The catalogue's records: what an entry may say, how names resolve, and how revisions come and go."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.schemas.errors import InvalidRequest, ModelNotFound
from penstock.schemas.models.catalogue import (
    Catalogue,
    CatalogueEntry,
    FailedSwap,
    Revision,
    RevisionKey,
    parse_keep_alive,
)


def entry(name: str = "qwen", **given: Any) -> CatalogueEntry:
    return CatalogueEntry.model_validate({"name": name, "source": "/models/qwen", **given})


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("500ms", 0.5),
        ("10s", 10.0),
        ("300", 300.0),
        (300, 300.0),
        (0.5, 0.5),
        (0, 0.0),
        ("0", 0.0),
        ("0s", 0.0),
        (-1, None),
        (-0.5, None),
        ("-1", None),
        ("-1m", None),
    ],
)
def test_keep_alive_takes_the_forms_of_ollama(given: object, seconds: float | None) -> None:
    assert parse_keep_alive(given) == seconds


@pytest.mark.parametrize("given", ["", "-", "m", "5 minutes", "5x", "m5", "1e3", True, None, [], float("nan"), 1e300])
def test_keep_alive_refuses_the_rest(given: object) -> None:
    with pytest.raises(ValueError, match='must be a duration such as "5m"'):
        parse_keep_alive(given)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"pin": True, "keep_alive": 300.0}, "a pinned model is never unloaded"),
        ({"preload": True, "keep_alive": 0.0}, "0 would unload at once what preload has loaded"),
        ({"name": "two words"}, "String should match pattern"),
        ({"name": ""}, "at least 1 character"),
        ({"queue_limit": -1}, "greater than or equal to 0"),
        ({"defaults": {"temperature": 3}}, "temperature: Input should be less than or equal to 2"),
        ({"defaults": {"stream": True}}, "stream cannot have a default here"),
        ({"defaults": {"min_tokens": 5, "max_tokens": 2}}, "min_tokens: 5 is above the 2 tokens allowed"),
        ({"others": [{"number": 2, "source": ""}]}, "at least 1 character"),
        ({"dtype": "bf16"}, "Input should be"),
        ({"version": 2}, "Input should be 1"),
    ],
)
def test_a_faulty_entry_is_refused(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValidationError, match=fault):
        entry(**given)


def test_an_entry_survives_json_and_ignores_what_a_newer_version_adds() -> None:
    given = entry(aliases=["q"], keep_alive=60.0, defaults={"temperature": 0, "stop": ["a"]}, max_batch_size=4)
    catalogue = Catalogue().add(given).swap("q", "/models/new")
    assert Catalogue.model_validate_json(catalogue.model_dump_json()) == catalogue
    newer = '{"name": "a", "source": "b", "colour": "blue"}'
    assert CatalogueEntry.model_validate_json(newer) == CatalogueEntry(name="a", source="b")


def test_models_are_found_by_name_and_alias() -> None:
    catalogue = Catalogue().add(entry(aliases=["fast"])).add(entry("llama"))
    assert catalogue.find("fast") is catalogue.find("qwen")
    with pytest.raises(ModelNotFound, match="no model 'lama'; did you mean llama"):
        catalogue.find("lama")
    with pytest.raises(ModelNotFound, match="no model 'xyz'; known: qwen, fast, llama"):
        catalogue.find("xyz")
    with pytest.raises(ModelNotFound, match="known: none yet"):
        Catalogue().find("qwen")


@pytest.mark.parametrize("other", [entry("fast"), entry("x", aliases=["qwen"]), entry("x", aliases=["fast"]), entry()])
def test_a_name_belongs_to_one_model(other: CatalogueEntry) -> None:
    catalogue = Catalogue().add(entry(aliases=["fast"]))
    with pytest.raises(InvalidRequest, match="already a model's name or alias; remove that one first"):
        catalogue.add(other)


@pytest.mark.parametrize("aliases", [["qwen"], ["a", "a"]])
def test_a_name_is_given_once(aliases: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="given twice"):
        Catalogue().add(entry(aliases=aliases))


def test_a_swap_tries_the_new_revision_before_requests_get_it() -> None:
    before = Catalogue().add(entry())
    trying = before.swap("qwen", "/models/new")
    found = trying.find("qwen")
    assert (found.revision, found.source, found.candidate) == (1, "/models/qwen", 2)
    assert found.sources == {1: "/models/qwen", 2: "/models/new"}
    with pytest.raises(InvalidRequest, match="already being swapped, to /models/new"):
        trying.swap("qwen", "/models/other")
    swapped = trying.promote(RevisionKey("qwen", 2))
    found = swapped.find("qwen")
    assert (found.revision, found.source, found.candidate) == (2, "/models/new", None)
    assert found.sources == {1: "/models/qwen", 2: "/models/new"}, "earlier requests finish on the old one"
    assert swapped.promote(RevisionKey("qwen", 2)) == swapped
    with pytest.raises(ValueError, match="is a former one: swap to its source instead"):
        swapped.promote(RevisionKey("qwen", 1))
    with pytest.raises(ValueError, match="is the current one: remove the model instead"):
        swapped.retire(RevisionKey("qwen", 2))
    assert swapped.retire(RevisionKey("qwen", 1)).find("qwen").sources == {2: "/models/new"}


def test_a_failed_swap_leaves_the_model_as_it_was() -> None:
    before = Catalogue().add(entry())
    after = before.swap("qwen", "/models/new").retire(RevisionKey("qwen", 2), "no weights")
    failed = after.find("qwen").failed_swap
    assert failed == FailedSwap(revision=2, source="/models/new", reason="no weights")
    assert after.find("qwen").model_copy(update={"failed_swap": None}) == before.find("qwen")
    assert after.swap("qwen", "/models/newer").find("qwen").failed_swap is None, "the next one begins anew"
    assert after.swap("qwen", "/models/newer").find("qwen").candidate == 3, "its number is not used again"
    with pytest.raises(ModelNotFound, match="no revision 2 of the model 'qwen'"):
        after.promote(RevisionKey("qwen", 2))
    with pytest.raises(InvalidRequest, match="at least 1 character"):
        before.swap("qwen", "")


def test_what_is_offered_again_counts_and_former_revisions_finish_their_requests() -> None:
    swapped = Catalogue().add(entry()).swap("qwen", "/models/new").promote(RevisionKey("qwen", 2))
    assert swapped.offer([entry(source="/models/new", pin=True)]).find("qwen").sources == swapped.find("qwen").sources
    again = swapped.offer([entry()]).find("qwen")
    assert (again.revision, again.source, again.candidate) == (3, "/models/qwen", None)
    assert again.sources == {1: "/models/qwen", 2: "/models/new", 3: "/models/qwen"}
    trying = Catalogue().add(entry()).swap("qwen", "/models/new")
    assert trying.offer([entry()]).find("qwen").candidate == 2, "a swap goes on after a restart"


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["add", "offer", "remove", "swap", "promote", "retire"]),
        st.sampled_from("ab"),
        st.integers(1, 4),
    ),
    max_size=30,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_a_revision_is_one_source_for_ever(steps: list[tuple[str, str, int]]) -> None:
    catalogue, seen = Catalogue(), dict[RevisionKey, str]()
    for count, (step, name, number) in enumerate(steps):
        try:
            match step:
                case "add":
                    catalogue = catalogue.add(entry(name, source=f"/models/{count}"))
                case "offer":
                    catalogue = catalogue.offer([entry(name, source=f"/models/{count % 3}")])
                case "swap":
                    catalogue = catalogue.swap(name, f"/models/{count}")
                case "remove":
                    catalogue = catalogue.remove(name)
                case "promote":
                    catalogue = catalogue.promote(RevisionKey(name, number))
                case _:
                    catalogue = catalogue.retire(RevisionKey(name, number))
        except (InvalidRequest, ModelNotFound, ValueError):
            continue
        for each in catalogue.entries:
            for revision, source in each.sources.items():
                assert seen.setdefault(RevisionKey(each.name, revision), source) == source
            assert len({each.revision, *(other.number for other in each.others)}) == 1 + len(each.others)
            assert each.candidate is None or each.candidate > each.revision


def test_a_revision_is_a_directory_or_an_id() -> None:
    assert Revision(number=1, source="org/model").source == "org/model"
