"""Who may use the dashboard: checks of Host, Origin, access token and CSRF token.

On loopback, pages of this server may read and act. A page of another site cannot: its requests carry a Host or Origin
header that is not ours, it cannot read the CSRF token of our page, and JSON needs a CORS preflight, which is not
answered. On other addresses, every request needs the access token, which the printed URL carries once and a cookie
afterwards; such a cookie is not sent with requests of other sites (SameSite=Strict).
"""

import hmac
import ipaddress
import secrets
from email.message import Message
from http.cookies import CookieError, SimpleCookie

from maxhydra.record.loopback import LOOPBACK_NAMES, is_allowed_host

CSRF_HEADER = "X-CSRF-Token"
# Addresses that stand for all interfaces of the machine, so any host name may be the server's.
_ANY_ADDRESS = ("", "0.0.0.0", "::")


class Access:
    """The rules of one server at an address; `needs_token` also asks for a token on loopback."""

    def __init__(self, host: str, port: int, *, needs_token: bool = False):
        self.host, self.port = host, port
        self.csrf_token = secrets.token_urlsafe(24)
        self.token = secrets.token_urlsafe(24) if needs_token or not is_loopback(host) else None

    @property
    def cookie_name(self) -> str:
        """Cookies ignore ports, so each server has its own name."""
        return f"maxhydra_{self.port}"

    def is_own_host(self, headers: Message) -> bool:
        """Whether the Host header names this server: DNS rebinding protection."""
        if self.host in _ANY_ADDRESS:
            return bool(headers.get("Host"))
        return is_allowed_host(headers.get("Host", ""), (*LOOPBACK_NAMES, self.host.lower()), port=self.port)

    def is_token(self, text: str) -> bool:
        return self.token is not None and hmac.compare_digest(text.encode(), self.token.encode())

    def may_read(self, headers: Message) -> bool:
        """Whether a request carries the access token, as a cookie or a bearer token, if one is needed."""
        if self.token is None:
            return True
        scheme, _, bearer = headers.get("Authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_token(bearer.strip()):
            return True
        try:
            cookie = SimpleCookie(headers.get("Cookie", "")).get(self.cookie_name)
        except CookieError:
            return False
        return cookie is not None and self.is_token(cookie.value)

    def may_act(self, headers: Message) -> bool:
        """Whether a POST request comes from a page of this server."""
        origin = f"http://{headers.get('Host', '')}"
        is_same_origin = headers.get("Origin", origin) == origin
        is_json = headers.get("Content-Type", "").partition(";")[0].strip() == "application/json"
        has_csrf_token = hmac.compare_digest(headers.get(CSRF_HEADER, "").encode(), self.csrf_token.encode())
        return is_same_origin and is_json and has_csrf_token and self.may_read(headers)

    def cookie(self) -> str:
        """Value of the Set-Cookie header that stores the access token in the browser."""
        return f"{self.cookie_name}={self.token}; HttpOnly; SameSite=Strict; Path=/"


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
