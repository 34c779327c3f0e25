"""OpenAI-compatible HTTP server over the engine, on asyncio streams.

HTTP/1.1 is parsed here rather than by a library, so that serving needs no dependency beyond Python.
"""

from maxhydra.decode.openai_server.access import Access
from maxhydra.decode.openai_server.adapter_routes import AdapterRoutes
from maxhydra.decode.openai_server.pooling_routes import PoolingRoutes
from maxhydra.decode.openai_server.request_schema import ServerDefaults
from maxhydra.decode.openai_server.routes import Service
from maxhydra.decode.openai_server.server import Limits, allow_connections, listen, serve

__all__ = [
    "Access",
    "AdapterRoutes",
    "Limits",
    "PoolingRoutes",
    "ServerDefaults",
    "Service",
    "allow_connections",
    "listen",
    "serve",
]
