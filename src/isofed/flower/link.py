"""Flower's server process (its "SuperLink") with its doors locked: ``python -m isofed.flower.link``.

Flower 1.41 serves three interfaces on one port. *Fleet*, for the sites, asks for a registered key. *Control*, which
registers sites and starts and stops runs, lets anybody in unless an identity provider is bought with it. *Runtime*,
through which a server app gets its messages, is locked by a shared secret only where its executor is started apart.
So this process

- asks for a token in every control request (:class:`TokenAuth`),
- leaves the executor to `isofed flower server`, which shares a secret with it,
- refuses a request that is too long before any of it is read into memory (:class:`Bounded`), also from strangers.
"""

from __future__ import annotations

import hmac
import importlib
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from flwr.supercore.auth.typing import AccountAuthCredentials, AccountInfo
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.main import create_app

# The package has a function of the module's name, which hides it from an ordinary import.
superlink = importlib.import_module("flwr.superlink.cli.flower_superlink")

LONGEST = 16 * 2**20  # bytes of a request; Flower cuts arrays into pieces of 5 MB, and an app has 10 MB at most

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class TokenAuth(NoOpControlAuthnPlugin):
    """Lets in whoever has the federation's token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    def validate_tokens_in_metadata(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[bool, AccountInfo | None]:
        for _, value in metadata:
            given = value if isinstance(value, bytes) else value.encode()
            if hmac.compare_digest(given, self._token):
                return super().validate_tokens_in_metadata(metadata)
        return False, None

    def get_auth_tokens(self, device_code: str) -> AccountAuthCredentials | None:
        return None  # there is no way to get the token but the file

    def refresh_tokens(
        self, metadata: Sequence[tuple[str, str | bytes]]
    ) -> tuple[Sequence[tuple[str, str | bytes]] | None, AccountInfo | None]:
        return None, None


class Bounded:
    """Refuses long requests: by what they announce, and, where that is not true, as soon as they exceed it."""

    def __init__(self, app: App, most: int = LONGEST) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if not announced.isdigit() or int(announced) > self.most:
            return await _refuse(send)
        seen = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.most:
                return {"type": "http.disconnect"}  # which ends the request, wherever it is being read
            return message

        await self.app(scope, counted, send)


async def _refuse(send: Send) -> None:
    await send({"type": "http.response.start", "status": 413, "headers": [(b"connection", b"close")]})
    await send({"type": "http.response.body", "body": b"too long"})


def main() -> None:
    """Run the process; its words are those of flower-superlink, after the path of the token."""
    token = Path(sys.argv[1]).read_text().strip()
    sys.argv = ["flower-superlink", *sys.argv[2:]]
    config = superlink._parse_superlink_lifespan_config()
    config.authn_plugin = TokenAuth(token)
    app = create_app(config, superlink.SuperLinkLifespan)
    app.add_middleware(Bounded)
    uvicorn.run(
        app,
        host=config.host,
        port=config.port,
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        log_config=get_uvicorn_log_config(30),
        access_log=False,
        workers=1,
    )


if __name__ == "__main__":
    main()
