"""What a system without more threads does to Python and to a library in Rust, and how that is known."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.schemas.threads import lacks_threads

NO_MORE = """
import os, resource, threading
from tokenizers import Tokenizer, models
from penstock.config.process import spare_threads
from penstock.schemas.threads import lacks_threads

tokenizer = Tokenizer(models.BPE({"a": 0}, []))
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
if os.getuid() == 0:  # who may have as many as he likes
    os.setresuid(54321, 54321, 54321)
"""


def outcome(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", NO_MORE + code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="limits that others heed otherwise")
@pytest.mark.parametrize(
    "work", ["threading.Thread(target=print).start()", "tokenizer.encode_batch_fast(['a'])", "os.fork()"]
)
def test_what_wants_a_thread_is_known_by_its_error(work: str) -> None:
    code = f"try:\n    {work}\nexcept BaseException as error:\n    print(lacks_threads(error))"
    assert outcome(code) == "True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="limits that others heed otherwise")
def test_a_stage_tokenizes_without_threads() -> None:
    assert outcome("spare_threads(); print(tokenizer.encode_batch_fast(['aa'])[0].ids)") == "[0, 0]\n"


def test_errors_of_tasks_are_looked_into() -> None:
    group = ExceptionGroup("tasks", [ValueError(), RuntimeError("can't start new thread")])
    assert lacks_threads(ExceptionGroup("tasks", [group]))
    assert not lacks_threads(ExceptionGroup("tasks", [ValueError(), RuntimeError("else")]))
