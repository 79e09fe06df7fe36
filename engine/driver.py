"""The engine's thread: takes requests in, steps the backend, hands deltas out. Nothing else touches the backend."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from math import inf
from typing import Any, NamedTuple

from ..schemas.errors import GenerationFailed, InvalidRequest
from ..schemas.events import Delta
from .backend import Backend
from .choice import Choice
from .handle import RequestHandle
from .stalls import StallClock

_Key = tuple[str, int, int]  # request, epoch, choice: what a delta is addressed with

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


class Driver:
    """Owns a backend and the thread that loads and runs it.

    `submit`, `cancel` and `close` may be called from any thread; they leave a command that takes effect between two
    steps. The thread sleeps while there is nothing to do.

    No other thread computes: OpenMP keeps helpers for each thread that ever did, and once they outnumber the cores they
    sleep between any two products instead of spinning, at half the speed.
    """

    def __init__(self, load: Callable[[], Backend], stall_timeout: float) -> None:
        """Returns when `load` has; raises what it raised. See `StallClock` for `stall_timeout`, in seconds."""
        self.num_steps = 0  # set by the thread: rises for as long as it is alive and has work
        self.num_tokens = 0  # generated, all requests together; set by the thread
        self.error: BaseException | None = None  # what ended the thread; set by the thread
        self._commands: deque[_Add | _Cancel | _Call] = deque()
        self._running: dict[_Key, _Running] = {}
        self._changed = threading.Condition()  # guards the two above and `_closing`
        self._closing = False
        self._stall_timeout = stall_timeout
        self._stalls = StallClock(stall_timeout, time.monotonic)
        loaded: Future[Backend] = Future()
        self._thread = threading.Thread(target=self._main, args=(load, loaded), name="penstock-engine", daemon=True)
        self._thread.start()
        self.backend = loaded.result()

    @property
    def healthy(self) -> bool:
        return self.error is None and not self._closing and self._thread.is_alive()

    def submit(self, choices: Iterable[Choice], handle: RequestHandle) -> None:
        """Run the choices of one request; their deltas go to `handle`.

        Raises `InvalidRequest` for choices that are running already, `GenerationFailed` once the thread has ended.
        """
        new = {_key(choice): _Running(choice, handle) for choice in choices}
        with self._changed:
            if not self.healthy:
                raise GenerationFailed("the engine has stopped")
            if new.keys() & self._running.keys():
                raise InvalidRequest(f"request {handle.request.id!r} is running already", param="id")
            self._running |= new
            self._commands.extend(_Add(running.choice) for running in new.values())
            self._changed.notify()

    def cancel(self, request: str) -> bool:
        """Stop every choice of `request` before its next token; whether any was running."""
        with self._changed:
            choices = [running.choice for key, running in self._running.items() if key[0] == request]
        self.cancel_choices(choices)
        return bool(choices)

    def cancel_choices(self, choices: list[Choice]) -> None:
        """Stop these before their next token; those that have finished stay as they are."""
        with self._changed:
            self._commands.append(_Cancel(choices))
            self._changed.notify()

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Run something between two steps, on the thread that owns the backend.

        Raises `GenerationFailed` once the thread has ended.
        """
        result: Future[Any] = Future()
        with self._changed:
            if not self.healthy:
                raise GenerationFailed("the engine has stopped")
            self._commands.append(_Call(work, result))
            self._changed.notify()
        return result

    def close(self, timeout: float | None) -> bool:
        """Cancel what runs, free the model and end the thread; whether it ended within `timeout` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _main(self, load: Callable[[], Backend], loaded: Future[Backend]) -> None:
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
            self._deliver([choice.end("cancelled") for choice in self._unfinished()])
            self._refuse_calls()
            self.backend.close()
        except BaseException as error:
            _log.exception("the engine's thread has ended")
            with self._changed:
                self.error = error
            stopped = GenerationFailed("the engine has stopped")
            self._deliver([choice.fail(stopped) for choice in self._unfinished()])
            self._refuse_calls()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when it is time to end."""
        with self._changed:
            while not self._commands and not self._closing and (delay := self.backend.delay()) > 0:
                delay = min(delay, self._stalls.interval if self._running else inf)
                self._changed.wait(None if delay == inf else delay)
                if self._running and self._stalls.is_due:
                    break
            return not self._closing

    def _obey(self) -> list[Delta]:
        """Carry out the commands; the deltas of what ends by them."""
        with self._changed:
            commands, self._commands = self._commands, deque()
        deltas = []
        for command in commands:
            match command:
                case _Add(choice):
                    if choice.finish is None:
                        self.backend.add(choice)
                    else:  # an earlier holder had sent its last token already
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
            # The backend could not say whose fault it was, so everything it held may be damaged.
            _log.exception("a step of the engine failed")
            with self._changed:
                untouched = {command.choice for command in self._commands if isinstance(command, _Add)}
            damaged = [choice for choice in self._unfinished() if choice not in untouched]
            for choice in damaged:
                self.backend.remove(choice)
            return [choice.fail(error) for choice in damaged]

    def _end_stalls(self) -> list[Delta]:
        """Have the backend begin again what it does not go on with; the last deltas of what that did not help."""
        deltas = []
        told = f"no progress for {self._stall_timeout:g} s"
        error = GenerationFailed(f"The engine made {told}, twice; send the request again.")
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
            _log.warning("request %s has made %s: it begins again", request, told)
        for request in failed:
            _log.error("request %s has made %s, the second time: it ends", request, told)
        return deltas

    def _refuse_calls(self) -> None:
        """Nobody will run them any more."""
        with self._changed:
            for command in self._commands:
                if isinstance(command, _Call):
                    command.result.set_exception(GenerationFailed("the engine has stopped"))

    def _unfinished(self) -> list[Choice]:
        """Everything whose last delta has not been delivered."""
        with self._changed:
            return [running.choice for running in self._running.values()]

    def _deliver(self, deltas: list[Delta]) -> None:
        """Put deltas into their handles and wake the readers: one call for each event loop, not for each token."""
        loops: dict[asyncio.AbstractEventLoop, dict[RequestHandle, None]] = {}
        with self._changed:
            for delta in deltas:
                key = (delta.request, delta.epoch, delta.choice)
                handle = self._running[key].handle
                handle.put(delta)
                self.num_tokens += len(delta.token_ids)
                if delta.finish_reason is not None:
                    del self._running[key]
                loops.setdefault(handle.loop, {})[handle] = None
        for loop, handles in loops.items():
            try:
                loop.call_soon_threadsafe(_wake, list(handles))
            except RuntimeError:  # the loop is closed, so nobody will ever read this
                for handle in handles:
                    handle.cancel()


def _key(choice: Choice) -> _Key:
    return choice.request.id, choice.request.epoch, choice.number


def _wake(handles: list[RequestHandle]) -> None:
    for handle in handles:
        handle.wake()
