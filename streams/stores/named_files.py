"""The uploaded files that requests name by their ids, in place of bytes that they would have in themselves."""

from __future__ import annotations

from collections.abc import Mapping

from ...schemas.bounds import shortened
from ...schemas.errors import InvalidRequest, PayloadTooLarge, StreamNotFound
from ...schemas.loops import Items
from ...schemas.openai.chat import named_files
from ...schemas.openai.completions import ChatRequest
from ...schemas.openai.content import NamedFile, NamedFiles
from ...schemas.openai.responses.files import EARLIER
from ..port import Broker
from ..topology import FILES
from .files import find_file
from .objects import ObjectInfo, Objects

MOST_NAMED = 128  # files of one request
MOST_SHOWN = 20  # images of tools in one prompt


class NamedFileStore:
    """`most` is how many bytes the files of one request may have together."""

    def __init__(self, broker: Broker, most: int) -> None:
        self._broker = broker
        self._most = most

    async def check(self, tenant: str, named: Mapping[str, str]) -> list[ObjectInfo]:
        """The files of which a request names the ids; `named` has the parameter that names each.

        Raises `StreamNotFound` for one that the tenant does not have, or that has expired, `InvalidRequest` for too
        many and `PayloadTooLarge` for too large ones.
        """
        if len(named) > MOST_NAMED:
            fault = f"The request names {len(named)} files; name at most {MOST_NAMED}."
            raise InvalidRequest(fault, code="too_many_files", param=next(iter(named.values())))
        found: list[ObjectInfo] = []
        for id, param in named.items():
            try:
                found.append(await find_file(self._broker, tenant, id, param))
            except StreamNotFound as error:
                advice = "an input before names it; send the items again without it"
                advice = advice if param in EARLIER else "upload it, and send the id that it gets"
                fault = f"{param}: there is no file {shortened(id, 100)!r}; {advice}."
                raise StreamNotFound(fault, code=error.code, param=param) from None
            if (size := sum(info.size for info in found)) > self._most:
                raise PayloadTooLarge(
                    f"{param}: the files up to this one have {size} bytes, and all that a request names may have "
                    f"{self._most} together, the limit of the setting max_body_size.",
                    param=param,
                )
        return found

    async def shown(self, tenant: str, items: Items) -> set[str]:
        """The files of images that a response's own tools have returned and the next turn shows: the newest, as far as
        they are there still and fit."""
        named = [id for item in items if item["type"] == "mcp_call" for id in item.get("images") or ()]
        left, found = self._most // 2, set[str]()
        for id in list(dict.fromkeys(reversed(named)))[:MOST_SHOWN]:
            try:
                file = await find_file(self._broker, tenant, id)
            except StreamNotFound:
                continue  # its client has deleted it, or it has expired
            if file.size > left:
                break
            left -= file.size
            found.add(id)
        return found

    async def read(self, tenant: str, request: ChatRequest) -> NamedFiles:
        """The files that a request names, by their ids. Raises what `check` raises, and `BrokerUnavailable`."""
        named = named_files(request.messages)
        objects, found = await Objects.of(self._broker, FILES), {}
        for id, info in zip(named, await self.check(tenant, named), strict=True):
            data = b"".join([piece async for piece in objects.read(info)])
            found[id] = NamedFile(info.about["filename"], data)
        return found
