"""Where an upstream is and the key it wants, checked before anything is served."""

import ipaddress
import re
import socket
import ssl
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

import httpx2 as httpx

from kvass.config import Settings
from kvass.errors import ConfigError

_KEY = re.compile(r"[!-~]+")
_CHECK_SECONDS = 3.0


class Address:
    """An upstream's address and key. Its text names the upstream, and holds no secret."""

    def __init__(self, url: httpx.URL, key: str):
        """`url`: without a path's end, and without /v1."""
        self._url = url
        self._key = key
        self._context = ssl.create_default_context() if url.scheme == "https" else None

    @classmethod
    def of(cls, text: str, settings: Settings, option: str = "--upstream") -> "Address":
        """Raises ConfigError for what is no address of a server, and for an unusable key. `option`: where
        it was given."""
        try:
            url = httpx.URL(text)
        except httpx.InvalidURL as error:
            raise ConfigError(f"{option} {text!r} is no URL: {error}; give http://HOST:PORT") from error
        if url.userinfo:
            raise ConfigError(f"{option} must hold no user or password; set upstream_api_key_file")
        sound = url.scheme in ("http", "https") and url.host and not url.query and not url.fragment
        if not sound or not 0 < (url.port or 80) < 1 << 16:
            raise ConfigError(f"{option} {text!r} is no server's address; give http://HOST:PORT")
        path = url.raw_path.rstrip(b"/").removesuffix(b"/v1").rstrip(b"/")
        return cls(url.copy_with(raw_path=path or b"/"), _key(settings))

    def __str__(self) -> str:
        return f"the upstream {str(self._url).rstrip('/')}"

    @property
    def url(self) -> str:
        """Without /v1."""
        return str(self._url).rstrip("/")

    def to(self, path: bytes, query: bytes = b"") -> httpx.URL:
        """The URL of a path there, its bytes as they are."""
        raw = self._url.raw_path.rstrip(b"/") + path
        return self._url.copy_with(raw_path=raw + (b"?" + query if query else b""))

    def authorization(self) -> dict[str, str]:
        """The header that shows the key; none without a key."""
        return {"authorization": f"Bearer {self._key}"} if self._key else {}

    def client(self, **options: Any) -> httpx.AsyncClient:
        """A client that goes there directly, with nothing of the environment, and that keeps no cookie:
        it would be sent with the requests of others."""
        jar = CookieJar(DefaultCookiePolicy(allowed_domains=()))
        return httpx.AsyncClient(verify=self._context or False, trust_env=False, cookies=jar, **options)

    def session(self, seconds: float) -> httpx.Client:
        """For a few questions, each answered within these seconds; shows the key."""
        return httpx.Client(
            verify=self._context or False, trust_env=False, timeout=seconds, headers=self.authorization()
        )

    def check(self, listening: socket.socket) -> str | None:
        """Ask it once. None where it answers as it should, else why it does not yet.

        Raises ConfigError where it answers, but not as an OpenAI server, or is the server to be started.
        """
        self._check_other(listening)
        try:
            with self.session(_CHECK_SECONDS) as client:
                reply = client.get(self.to(b"/v1/models"))
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        if reply.status_code in (401, 403):
            raise ConfigError(f"{self} refuses the key: set upstream_api_key_file or upstream_api_key")
        if reply.status_code >= 500:
            return f"it answers {reply.status_code}"
        if reply.status_code != 200 or not _lists_models(reply):
            raise ConfigError(
                f"{self} is no OpenAI server: it answers /v1/models with {reply.status_code}; "
                "correct --upstream (the part before /v1)"
            )
        return None

    def _check_other(self, listening: socket.socket) -> None:
        own, port = listening.getsockname()[:2]
        if (self._url.port or (443 if self._url.scheme == "https" else 80)) != port:
            return
        try:
            found = {str(one[4][0]) for one in socket.getaddrinfo(self._url.host, port)}
        except OSError:
            return
        if own in found or any(ipaddress.ip_address(one.partition("%")[0]).is_loopback for one in found):
            raise ConfigError(f"{self} is the address that is to be served; choose another --port")


def _lists_models(reply: httpx.Response) -> bool:
    try:
        told = reply.json()
    except ValueError:
        return False
    return isinstance(told, dict) and isinstance(told.get("data"), list)


def _key(settings: Settings) -> str:
    file, key = settings.upstream_api_key_file, settings.upstream_api_key
    if file is not None and key:
        raise ConfigError("upstream_api_key_file and upstream_api_key are both set; unset one")
    if file is not None:
        try:
            key = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read upstream_api_key_file {file}: {error}") from error
    if (file is not None or key) and not _KEY.fullmatch(key):
        name = "upstream_api_key" if file is None else f"upstream_api_key_file {file}"
        raise ConfigError(f"{name}: must hold one key, of letters, digits and signs of ASCII")
    return key
