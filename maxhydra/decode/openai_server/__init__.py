"""OpenAI-compatible HTTP server over the engine, on asyncio streams.

HTTP/1.1 is parsed here rather than by a library, so that serving needs no other one. The routes run in the engine's
process (`serve` with a LocalClient), or in separate ones (`ProcessManager`).
"""

from maxhydra.decode.openai_server.access import Access
from maxhydra.decode.openai_server.adapter_routes import AdapterRoutes
from maxhydra.decode.openai_server.backend import Backend
from maxhydra.decode.openai_server.encoder_settings import EncoderSettings
from maxhydra.decode.openai_server.engine_client import LocalClient
from maxhydra.decode.openai_server.http_process import HttpSettings
from maxhydra.decode.openai_server.pooling_routes import PoolingRoutes
from maxhydra.decode.openai_server.process_manager import ProcessManager
from maxhydra.decode.openai_server.request_schema import ServerDefaults
from maxhydra.decode.openai_server.routes import Service, ServiceSettings
from maxhydra.decode.openai_server.server import Limits, allow_connections, listen, serve

__all__ = [
    "Access",
    "AdapterRoutes",
    "Backend",
    "EncoderSettings",
    "HttpSettings",
    "Limits",
    "LocalClient",
    "PoolingRoutes",
    "ProcessManager",
    "ServerDefaults",
    "Service",
    "ServiceSettings",
    "allow_connections",
    "listen",
    "serve",
]
