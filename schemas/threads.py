"""What is said where the system allows no more threads or processes: three limits may be meant, and it does not say
which."""

from __future__ import annotations

from .errors import Overloaded

ADVICE = (
    "no more threads can be started here; raise the limit of processes: that of the user (ulimit -u), the container "
    "(pids.max) or the unit (TasksMax)"
)
_PYTHON = "can't start new thread"
_RAYON = "ThreadPoolBuildError"  # in the words of a panic, as of tokenizers


def lacks_threads(error: BaseException) -> bool:
    """Whether the system has refused a thread or a process."""
    match error:
        case BaseExceptionGroup():
            return any(map(lacks_threads, error.exceptions))
        case BlockingIOError():  # fork's; those of sockets stay in the event loop
            return True
        case RuntimeError():
            return str(error) == _PYTHON
        case _:
            return type(error).__name__ == "PanicException" and _RAYON in str(error)


def threads_exhausted() -> Overloaded:
    """What the client hears."""
    text = "The server can start no more threads; try again later."
    return Overloaded(text, code="threads_exhausted", retry_after=5.0)
