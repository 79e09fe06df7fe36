"""The engine's thread: accepts requests, steps the backend, delivers deltas. Nothing else touches the backend."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from math import inf
from typing import Any, NamedTuple, TypeVar

from ..schemas.errors import GenerationFailed, InvalidRequest
from ..schemas.events import Delta
from .backend import Backend
from .blocking import result_of
from .choice import Choice
from .handle import RequestHandle
from .request import EngineRequest
from .stalls import StallClock

_AT_EXIT = 5.0  # seconds that the end of the interpreter waits for a thread

_Key = tuple[str, int, int]  # request, epoch, choice: the address of a delta

_STOPPED = "the engine has stopped; load a new one"

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


class _Add(NamedTuple):
    choice: Choice


class _Cancel(NamedTuple):
    choices: list[Choice]


class _Call(NamedTuple):
    work: Callable[[], Any]
    result: Future[Any]


class _Running(NamedTuple):
    choice: Choice
    handle: RequestHandle


class _EngineThread(threading.Thread):
    """Runs a driver, which may be freed before the thread ends; the end of the interpreter waits for both.

    torch aborts the process if the end takes a thread away in the middle of a step, or while the thread frees a model:
    that of a driver which nothing else refers to goes at the end of `run`.
    """

    def __init__(self, driver: Driver, target: Callable[..., None], *args: object) -> None:
        super().__init__(target=target, args=args, name="penstock-engine", daemon=True)
        self._driver = weakref.ref(driver)

    def run(self) -> None:
        try:
            super().run()  # which drops its target, and so the driver
        finally:
            atexit.unregister(self.end_in_time)

    def end_in_time(self) -> None:
        if driver := self._driver():
            driver.close_soon()
        self.join(_AT_EXIT)


class Driver:
    """Owns a backend and the thread that loads and runs it.

    Any thread may call `submit`, `cancel` and `close`; they queue a command that takes effect between two steps. The
    thread sleeps while it has no work.

    No other thread may compute: OpenMP keeps a team for each thread that ever did, and once the teams outnumber the
    cores, their threads sleep between products instead of spinning, which halves the speed.
    """

    def __init__(self, load: Callable[[], Backend], stall_timeout: float) -> None:
        """Start the thread and wait for `load`, which may raise. `stall_timeout` is in seconds: see `StallClock`."""
        self.num_steps = 0  # set by the thread: grows as long as it lives and has work
        self.num_tokens = 0  # generated, for all requests; set by the thread
        self.error: BaseException | None = None  # the exception that ended the thread; set by the thread
        self._commands: deque[_Add | _Cancel | _Call] = deque()
        self._running: dict[_Key, _Running] = {}
        self._changed = threading.Condition()  # guards the two above and `_closing`
        self._closing = False
        self._process = os.getpid()
        self._stall_timeout = stall_timeout
        self._stalls = StallClock(stall_timeout, time.monotonic)
        self.backend = self._start(load)

    def __reduce__(self) -> str:
        raise TypeError("an engine cannot be pickled, as other processes cannot use it; load one in each process")

    @property
    def healthy(self) -> bool:
        return self.error is None and not self._closing and self._thread.is_alive()

    @property
    def _is_forked(self) -> bool:
        """Whether this is the child of the engine's process: it has no such thread, and its locks may be held."""
        return os.getpid() != self._process

    def _start(self, load: Callable[[], Backend]) -> Backend:
        loaded: Future[Backend] = Future()
        self._thread = _EngineThread(self, self._run, load, loaded)
        atexit.register(self._thread.end_in_time)
        try:
            self._thread.start()
            return result_of(loaded)
        except BaseException:  # Ctrl-C, perhaps: what is loaded then is freed at once
            self.close_soon()
            raise

    @contextmanager
    def together(self, requests: Sequence[EngineRequest]) -> Iterator[None]:
        """What is submitted within it takes effect between the same two steps.

        Raises `InvalidRequest` for a request that already runs, or is among `requests` twice.
        """
        self._refuse_child()
        with self._changed:
            seen: set[_Key] = set()
            for request in requests:
                keys = {(request.id, request.epoch, request.first_choice + n) for n in range(request.params.n)}
                if keys & seen or keys & self._running.keys():
                    raise _already_runs(request)
                seen |= keys
            yield

    def submit(self, choices: Iterable[Choice], handle: RequestHandle) -> None:
        """Run the choices of one request; their deltas go to `handle`.

        Raises `InvalidRequest` for choices that already run, `GenerationFailed` once the thread has ended.
        """
        new = {_key(choice): _Running(choice, handle) for choice in choices}
        self._refuse_child()
        with self._changed:
            if not self.healthy:
                raise GenerationFailed(_STOPPED)
            if new.keys() & self._running.keys():
                raise _already_runs(handle.request)
            for running in new.values():
                running.choice.preemptions = handle.preemptions
            self._running |= new
            self._commands.extend(_Add(running.choice) for running in new.values())
            self._changed.notify()

    def cancel(self, request: str) -> bool:
        """Stop every choice of `request` before its next token. Returns whether any was running."""
        if self._is_forked:
            return False
        with self._changed:
            choices = [running.choice for key, running in self._running.items() if key[0] == request]
        self.cancel_choices(choices)
        return bool(choices)

    def cancel_choices(self, choices: list[Choice]) -> None:
        """Stop these choices before their next token; finished ones stay as they are."""
        if self._is_forked:
            return
        with self._changed:
            self._commands.append(_Cancel(choices))
            self._changed.notify()

    def call(self, work: Callable[[], _T]) -> Future[_T]:
        """Run `work` between two steps, on the thread that owns the backend.

        Raises `GenerationFailed` once the thread has ended.
        """
        self._refuse_child()
        result: Future[_T] = Future()
        with self._changed:
            if not self.healthy:
                raise GenerationFailed(_STOPPED)
            self._commands.append(_Call(work, result))
            self._changed.notify()
        return result

    def close(self, timeout: float | None) -> bool:
        """Cancel what runs, free the model and end the thread. Returns whether it ended within `timeout` seconds."""
        self.close_soon()
        self._thread.join(timeout)
        atexit.unregister(self._thread.end_in_time)
        return not self._thread.is_alive()

    def close_soon(self) -> None:
        """`close`, without waiting; any thread that collects garbage may call it, the engine's own included."""
        if self._is_forked:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()

    def _refuse_child(self) -> None:
        if self._is_forked:
            raise GenerationFailed("a forked process does not have its parent's engine; load one there, after the fork")

    def _run(self, load: Callable[[], Backend], loaded: Future[Backend]) -> None:
        try:
            self.backend = load()
        except BaseException as error:
            loaded.set_exception(error)
            return
        loaded.set_result(self.backend)
        try:
            while self._wait():
                self._deliver(self._obey())
                self._deliver(self._step())
                if self._stalls.is_due:
                    self._deliver(self._end_stalls())
                self.num_steps += 1
            left = self._unfinished()
            for choice in left:
                self.backend.remove(choice)
            self._deliver([choice.end("cancelled") for choice in left])
            self._refuse_calls()
            self.backend.close()
        except BaseException as error:
            _log.exception("engine thread died")
            with self._changed:
                self.error = error
            stopped = GenerationFailed("the engine has stopped")
            self._deliver([choice.fail(stopped) for choice in self._unfinished()])
            self._refuse_calls()

    def _wait(self) -> bool:
        """Sleep until there is work; returns False when the thread should end."""
        with self._changed:
            while not self._commands and not self._closing and (delay := self.backend.delay()) > 0:
                delay = min(delay, self._stalls.interval if self._running else inf)
                self._changed.wait(None if delay == inf else delay)
                if self._running and self._stalls.is_due:
                    break
            return not self._closing

    def _obey(self) -> list[Delta]:
        """Execute the queued commands; returns the deltas of the choices that they end."""
        with self._changed:
            commands, self._commands = self._commands, deque()
        deltas = []
        for command in commands:
            match command:
                case _Add(choice):
                    if choice.finish is None:
                        self.backend.add(choice)
                    else:  # another worker has already sent its last token
                        deltas.append(choice.end(choice.finish))
                case _Cancel(choices):
                    for choice in choices:
                        if choice.finish is None:
                            self.backend.remove(choice)
                            deltas.append(choice.end("cancelled"))
                case _Call(work, result):
                    try:
                        result.set_result(work())
                    except Exception as error:
                        result.set_exception(error)
        return deltas

    def _step(self) -> list[Delta]:
        try:
            return self.backend.step() if self.backend.delay() <= 0 else []
        except Exception as error:
            # The backend could not attribute the failure, so all of its choices may be damaged.
            _log.exception("engine step failed")
            with self._changed:
                untouched = {command.choice for command in self._commands if isinstance(command, _Add)}
            damaged = [choice for choice in self._unfinished() if choice not in untouched]
            for choice in damaged:
                self.backend.remove(choice)
            return [choice.fail(error) for choice in damaged]

    def _end_stalls(self) -> list[Delta]:
        """Restart choices that stall for the first time, and fail the others; returns the last deltas of these."""
        deltas = []
        limit = self._stall_timeout
        error = GenerationFailed(f"The engine made no progress for {limit:g} s, twice; send the request again.")
        restarted, failed = set(), set()
        for choice, is_first in self._stalls.check(self._unfinished()):
            self.backend.remove(choice)
            if is_first and choice.finish is None:
                choice.is_waiting = True
                self.backend.add(choice)
                restarted.add(choice.request.id)
            else:
                deltas.append(choice.fail(error))
                failed.add(choice.request.id)
        for request in restarted:
            _log.warning("request %s made no progress for %g s, restarting it", request, limit)
        for request in failed:
            _log.error("request %s made no progress for %g s again, failing it", request, limit)
        return deltas

    def _refuse_calls(self) -> None:
        """Fail the calls that the thread will no longer run."""
        with self._changed:
            for command in self._commands:
                if isinstance(command, _Call):
                    command.result.set_exception(GenerationFailed(_STOPPED))

    def _unfinished(self) -> list[Choice]:
        """The choices whose last delta has not been delivered."""
        with self._changed:
            return [running.choice for running in self._running.values()]

    def _deliver(self, deltas: list[Delta]) -> None:
        """Put deltas into their handles and wake the readers that wait, with one call for each event loop."""
        loops: dict[asyncio.AbstractEventLoop, dict[RequestHandle, None]] = {}
        with self._changed:
            for delta in deltas:
                key = (delta.request, delta.epoch, delta.choice)
                handle = self._running[key].handle
                handle.put(delta)
                self.num_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    del self._running[key]
                if handle.needs_wake or handle.loop.is_closed():
                    loops.setdefault(handle.loop, {})[handle] = None
        for loop, handles in loops.items():
            try:
                loop.call_soon_threadsafe(_wake, list(handles))
            except RuntimeError:  # the loop is closed: no one will read these handles
                for handle in handles:
                    handle.cancel()


def _already_runs(request: EngineRequest) -> InvalidRequest:
    return InvalidRequest(f"request {request.id!r} already runs; choose another id", param="id")


def _key(choice: Choice) -> _Key:
    return choice.request.id, choice.request.epoch, choice.number


def _wake(handles: list[RequestHandle]) -> None:
    for handle in handles:
        handle.wake()
