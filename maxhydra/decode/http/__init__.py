"""The server: HTTP/1.1 on asyncio streams, with OpenAI's paths and fields over the engine."""

from maxhydra.decode.http.access import Access
from maxhydra.decode.http.fields import Offer
from maxhydra.decode.http.server import Limits, listen, serve
from maxhydra.decode.http.service import Service

__all__ = ["Access", "Limits", "Offer", "Service", "listen", "serve"]
