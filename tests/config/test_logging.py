"""What goes wrong is logged with its place in the code, and without a word that may come from a prompt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.logs.setup import as_json

SECRET = "my diagnosis"
SET_UP = """
    import asyncio, gc, logging, structlog
    from penstock.config.logs.setup import configure_logging
    from penstock.config.settings import Settings
    from penstock.schemas.errors import BrokerUnavailable, InvalidRequest, StreamFull

    SECRET = " ".join(["my", "diagnosis"])
    configure_logging(Settings(log_format="FORMAT"))

    def failed(error):
        try:
            try:
                raise KeyError(SECRET)
            except KeyError as cause:
                error.add_note(SECRET)
                raise error from cause
        except type(error):
            return error
"""


def logged(form: str, program: str, status: int = 0) -> str:
    """What a process writes that has set up its logging and runs this."""
    code = textwrap.dedent(SET_UP.replace("FORMAT", form)) + textwrap.dedent(program)
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout) == (status, ""), ran.stderr
    assert SECRET not in ran.stderr
    return ran.stderr


@pytest.mark.parametrize("form", ["json", "console"])
def test_an_exception_is_told_by_kind_and_place(form: str) -> None:
    written = logged(
        form,
        """
        group = ExceptionGroup(SECRET, [failed(ValueError(SECRET)), failed(RuntimeError(SECRET))])
        for error in (group, InvalidRequest(f"The model {SECRET} is not served here."), OSError(2, SECRET, SECRET)):
            logging.getLogger("uvicorn.error").error("Exception in ASGI application\\n", exc_info=failed(error))
            structlog.get_logger("penstock").error("failed", exc_info=failed(error))
        """,
    )
    for word in ("ExceptionGroup", "ValueError", "RuntimeError", "InvalidRequest", "FileNotFoundError", "in failed"):
        assert written.count(word) >= 2
    assert written.count("KeyError") >= 6


@pytest.mark.parametrize("form", ["json", "console"])
def test_what_is_about_this_installation_keeps_its_words(form: str) -> None:
    written = logged(
        form,
        """
        for error in (BrokerUnavailable("no answer in 5 s"), OSError(28, SECRET)):
            structlog.get_logger("penstock").error("failed", exc_info=failed(error))
        """,
    )
    assert "no answer in 5 s" in written and "No space left on device" in written


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_task_that_nobody_waited_for_is_told_the_same_way(form: str) -> None:
    written = logged(
        form,
        """
        async def fails():
            raise ValueError(SECRET)

        async def run():
            task = asyncio.create_task(fails())
            await asyncio.wait([task])
            del task
            gc.collect()

        asyncio.run(run())
        """,
    )
    assert "Task exception was never retrieved" in written and "ValueError" in written


@pytest.mark.parametrize("form", ["json", "console"])
def test_the_error_that_ends_a_process_is_told_the_same_way(form: str) -> None:
    written = logged(form, "raise ExceptionGroup(SECRET, [ValueError(SECRET)])", status=1)
    assert "process ended with an error" in written and "ValueError" in written


@pytest.mark.parametrize("form", ["json", "console"])
def test_what_passes_by_itself_ends_a_process_with_a_line(form: str) -> None:
    """A full disk, for example, with what to do, and no traceback."""
    full = 'StreamFull("$KV.penstock_state.lanes: maximum bytes exceeded", storage=True)'
    away = 'BrokerUnavailable("no answer in 5 s")'
    written = logged(form, f"raise ExceptionGroup(SECRET, [{full}, ExceptionGroup(SECRET, [{away}])])", status=1)
    assert "the broker has no room: free space on its disk, or raise store_limit" in written
    assert "no answer in 5 s" in written and "Traceback" not in written
    written = logged(form, f"raise ExceptionGroup(SECRET, [{full}, ValueError(SECRET)])", status=1)
    assert "process ended with an error" in written and "ValueError" in written


texts = st.text(st.characters(codec=None)).filter(lambda text: json.loads(json.dumps(text)) == text)


@given(
    st.dictionaries(
        texts,
        st.one_of(texts, st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans()),
        max_size=4,
    )
)
def test_any_line_is_json_in_ascii(values: dict[str, object]) -> None:
    line = as_json(values, default=repr)
    assert line.isascii() and "\n" not in line and json.loads(line) == values


@pytest.mark.parametrize("form", ["json", "console"])
def test_a_reader_that_has_gone_ends_nothing(form: str) -> None:
    program = """
        import os, sys
        for name in ("penstock", "another"):
            structlog.get_logger(name).error("failed", exc_info=failed(ValueError(SECRET)))
            logging.getLogger(name).error("failed")
        os.write(1, b"goes on")
        os._exit(0)
    """
    reading, writing = os.pipe()
    os.close(reading)
    code = textwrap.dedent(SET_UP.replace("FORMAT", form)) + textwrap.dedent(program)
    try:
        ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=writing, timeout=60)
    finally:
        os.close(writing)
    assert (ran.returncode, ran.stdout) == (0, b"goes on")


@pytest.mark.parametrize("is_read", [True, False])
def test_nobody_waits_for_a_reader_of_the_log_who_stands_still(is_read: bool) -> None:
    """As a halted terminal does: the process waited for it, and answered nobody."""
    program = """
        import sys
        for number in range(5_000):
            structlog.get_logger("penstock").warning("line", number=number)
        logging.getLogger("uvicorn").warning("of a library")
        print("done", flush=True)
        sys.stdin.read()
    """
    code = textwrap.dedent(SET_UP.replace("FORMAT", "json")) + textwrap.dedent(program)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout and process.stderr
        assert process.stdout.readline() == "done\n"
        lines: list[dict[str, Any]] = []
        while is_read and (not lines or "lines" not in lines[-1]):
            lines.append(json.loads(process.stderr.readline()))
        process.stdin.close()
        assert process.wait(60) == 0
    if is_read:
        *written, last = lines
        numbers = [line["number"] for line in written if line["event"] == "line"]
        assert numbers[:100] == [*range(100)] and numbers == sorted(numbers) and len(written) > 2_000
        assert (last["event"], last["lines"]) == ("log lines dropped, as nobody read them", 5_001 - len(written))
