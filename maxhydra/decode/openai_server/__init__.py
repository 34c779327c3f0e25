"""The server: HTTP/1.1 on asyncio streams, with OpenAI's paths and fields over the engine."""

from maxhydra.decode.openai_server.auth import Access
from maxhydra.decode.openai_server.request_schema import ServerDefaults
from maxhydra.decode.openai_server.routes import Service
from maxhydra.decode.openai_server.server import Limits, listen, serve

__all__ = ["Access", "Limits", "ServerDefaults", "Service", "listen", "serve"]
