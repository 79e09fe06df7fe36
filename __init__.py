"""Penstock: an LLM inference server built as a pipeline over NATS JetStream, with its own engine.

The library's names are here, each imported when it is first used: `import penstock` loads neither torch nor NATS. The
server is the command `penstock`.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from .schemas.lazy_names import lazy_names
from .schemas.version import __version__

if TYPE_CHECKING:
    from .api.library.adapter import OpenAIAdapter
    from .api.library.session import ResponsesSession
    from .api.tools.functions import tool
    from .api.tools.mcp_client import McpClient
    from .engine import EngineConfig, GenerationParams, InferenceEngine
    from .stages import Filter, JobStage

__all__ = [
    "EngineConfig",
    "Filter",
    "GenerationParams",
    "InferenceEngine",
    "JobStage",
    "McpClient",
    "OpenAIAdapter",
    "ResponsesSession",
    "__version__",
    "tool",
]

_HOMES = {
    "EngineConfig": ".engine",
    "Filter": ".stages",
    "GenerationParams": ".engine",
    "InferenceEngine": ".engine",
    "JobStage": ".stages",
    "McpClient": ".api.tools.mcp_client",
    "OpenAIAdapter": ".api.library.adapter",
    "ResponsesSession": ".api.library.session",
    "tool": ".api.tools.functions",
}
# Modules of 0.1.0 that applications and plug-ins import, and where they are now. Their old names go with 0.3.
_MOVED = {
    "api.adapter": "api.library.adapter",
    "api.functions": "api.tools.functions",
    "api.mcp_client": "api.tools.mcp_client",
    "api.mcp_config": "api.tools.mcp_config",
    "api.session": "api.library.session",
    "api.toolbox": "api.tools.toolbox",
    "engine.discovery": "engine.planning.discovery",
    "engine.manifest": "engine.planning.manifest",
    "engine.tokenizer": "engine.text.tokenizer",
    "schemas.chat": "schemas.openai.chat",
    "schemas.codec": "schemas.wire.codec",
    "schemas.embeddings": "schemas.openai.embeddings",
    "schemas.items": "schemas.openai.responses.items",
    "schemas.responses": "schemas.openai.responses.request",
    "streams.jetstream": "streams.nats.broker",
    "streams.registry": "streams.stores.registry",
    "streams.server": "streams.nats.servers.server",
}


__getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__


class _MovedModules(MetaPathFinder, Loader):
    """Imports a module by its name of 0.1.0, with a warning that says the new one."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        is_moved = fullname.removeprefix(f"{__name__}.") in _MOVED
        return ModuleSpec(fullname, self) if is_moved else None

    def exec_module(self, module: ModuleType) -> None:
        new = f"{__name__}.{_MOVED[module.__name__.removeprefix(f'{__name__}.')]}"
        warnings.warn(f"{module.__name__} is now {new}; the old name goes with 0.3", DeprecationWarning, stacklevel=2)
        vars(module).update({name: value for name, value in vars(import_module(new)).items() if name[:2] != "__"})


sys.meta_path.append(_MovedModules())
