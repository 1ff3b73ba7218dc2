"""What the coordinator may do with a running server: register sites, start a run, watch and stop it."""

from __future__ import annotations

import hashlib
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    ListRunsRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

from isofed.errors import RunError, UserError
from isofed.flower.addresses import around_proxy, split
from isofed.flower.keys import Keys


class Refused(RunError):
    """The server has answered, and will not."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


class Status(NamedTuple):
    """How a run stands."""

    over: bool
    well: bool
    details: str


class _Token:
    """Adds the federation's token to each request."""

    def __init__(self, token: str) -> None:
        self._header = f"Bearer {token}"

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers["Authorization"] = self._header
        return call_next(context)


class Control:
    """A connection to the server. Without keys it is unencrypted, and only a server that is so too answers."""

    def __init__(self, address: str, keys: Keys | None) -> None:
        split(address)  # which says what is wrong with it
        self.address = address
        if keys:
            for path in (keys.token, keys.ca):
                if not path.is_file():
                    raise UserError(f"there is no {path}; do this on the server's machine, in its project folder")
        own = [_Token(keys.token.read_text().strip())] if keys else []
        around_proxy(os.environ)  # the client below is made by Flower, and looks there
        self._client = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=keys is None,
            root_certificates=keys.ca.read_bytes() if keys else None,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="flwr CLI"), *own],
        )

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def reachable(self) -> bool:
        """Whether the server is up and lets us in."""
        try:
            self._client.ListNodes(ListNodesRequest())
        except httpx.HTTPError:
            return False
        return True

    def register(self, public: Path) -> bool:
        """Let a site in from now on; False if it was so already."""
        try:
            key = load_ssh_public_key(public.read_bytes())
        except (OSError, ValueError, UnsupportedAlgorithm) as error:
            raise UserError(f"{public} is not a public key that `isofed flower keys` made ({error})") from None
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise UserError(f"{public} is a key of another kind; make one with `isofed flower keys`")
        known = public_key_to_bytes(key)
        with self._errors():
            there = self._client.ListNodes(ListNodesRequest()).nodes_info
        if any(node.public_key == known and not node.unregistered_at for node in there):
            return False
        try:
            with self._errors():
                self._client.RegisterNode(RegisterNodeRequest(public_key=known, name=public.stem))
        except Refused as error:
            if error.code == ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE:
                return False
            raise
        return True

    def start(self, app: Path) -> int:
        """Bundle an app and start its run."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a library of Flower's
                bundle = build_fab_from_disk(app)
        except (ValueError, OSError) as error:
            raise UserError(f"{app} is not a Flower app: {' '.join(str(error).split())}") from None
        fab = Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})
        with self._errors():
            return int(self._client.StartRun(StartRunRequest(fab=fab_to_proto(fab))).run_id)

    def status(self, run: int) -> Status:
        """How a run stands now."""
        with self._errors():
            found = self._client.ListRuns(ListRunsRequest(run_id=run)).run_dict[run].status
        return Status(found.status == "finished", found.sub_status == "completed", found.details)

    def stop_all(self) -> int:
        """End all runs that are going on; their folders can be gone on with. Gives how many there were."""
        with self._errors():
            runs = self._client.ListRuns(ListRunsRequest()).run_dict
            going = [run for run, found in runs.items() if found.status.status != "finished"]
            for run in going:
                self._client.StopRun(StopRunRequest(run_id=run))
        return len(going)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Say what went wrong in one sentence."""
        try:
            yield
        except httpx.HTTPStatusError as error:
            said = FlowerError.from_json(error.response.text)
            why = f"{said.message} {said.public_details or ''}".strip() if said else str(error.response.status_code)
            raise Refused(f"the server at {self.address} refuses: {why}", said.code if said else 0) from error
        except httpx.HTTPError as error:
            raise RunError(
                f"no server answers at {self.address}, or it is not the one of these keys ({error})"
            ) from error
