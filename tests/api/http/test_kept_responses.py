"""What WebSockets remember of responses that are not stored."""

from __future__ import annotations

from penstock.api.http.kept_responses import MAX_KEPT, KeptResponses


def test_a_connection_finds_its_newest_responses_and_no_other_does() -> None:
    kept = KeptResponses(1_000_000)
    for number in range(MAX_KEPT + 2):
        kept.put(1, f"r{number}", "before", [number])
    assert [number for number in range(MAX_KEPT + 2) if kept.find(1, f"r{number}")] == [*range(2, MAX_KEPT + 2)]
    assert kept.find(1, "r2") == ("before", b"[2]")
    assert kept.find(2, "r2") is None
    kept.forget(1)
    assert kept.find(1, "r2") is None


def test_all_connections_share_the_room_and_the_least_recently_used_go() -> None:
    kept = KeptResponses(5_000)
    for connection in range(4):
        kept.put(connection, "r", None, ["x" * 600])
    assert kept.find(0, "r") is not None
    kept.put(4, "r", None, ["x" * 600])
    assert [connection for connection in range(5) if kept.find(connection, "r")] == [0, 2, 3, 4]
    kept.put(5, "large", None, ["x" * 6_000])
    assert [connection for connection in range(6) if kept.find(connection, "r") or kept.find(connection, "large")] == []
    for connection in range(6):
        kept.forget(connection)
    kept.put(6, "r", None, ["x" * 4_000])
    assert kept.find(6, "r") is not None
