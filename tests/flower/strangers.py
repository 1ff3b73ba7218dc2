"""Requests of somebody who can reach the server's port, speaks its language, and has no key, no token and no secret."""

from __future__ import annotations

import ssl
from base64 import b64encode
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import TIMESTAMP_HEADER
from flwr.proto import control_pb2, fleet_pb2, message_pb2, runtime_pb2
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message
from flwr.supercore.runtime_version_compatibility import RuntimeVersionMetadata

from isofed.flower.link import LONGEST

REFUSED = {400, 401, 403, 412}  # the last: what Flower says to a key that nobody has registered


def check_strangers(url: str, ca: Path, node: int, run: int) -> None:
    """Nothing is given to a stranger, who even knows the ids of a node and of a run, and has made a key."""
    key = ec.generate_private_key(ec.SECP384R1())
    public = public_key_to_bytes(key.public_key())
    theirs = Node(node_id=node)
    control: dict[str, Any] = {
        "register-node": control_pb2.RegisterNodeRequest(public_key=public, name="me"),
        "start-run": control_pb2.StartRunRequest(),
        "stop-run": control_pb2.StopRunRequest(run_id=run),
        "list-runs": control_pb2.ListRunsRequest(),
        "list-nodes": control_pb2.ListNodesRequest(),
        "stream-logs": control_pb2.StreamLogsRequest(run_id=run),
        "refresh-auth-tokens": control_pb2.RefreshAuthTokensRequest(refresh_token="any"),
    }
    fleet: dict[str, Any] = {
        "register-node": fleet_pb2.RegisterNodeFleetRequest(public_key=public),
        "activate-node": fleet_pb2.ActivateNodeRequest(public_key=public, heartbeat_interval=30),
        "pull-messages": fleet_pb2.PullMessagesRequest(node=theirs),
        "push-messages": fleet_pb2.PushMessagesRequest(node=theirs),
        "get-fab": GetFabRequest(node=theirs, run_id=run, hash_str="0" * 64),
        "pull-object": message_pb2.PullObjectRequest(node=theirs, run_id=run, object_id="0" * 64),
        "push-object": message_pb2.PushObjectRequest(node=theirs, run_id=run, object_id="0" * 64),
    }
    runtime: dict[str, Any] = {
        "acquire-task": runtime_pb2.AcquireTaskRequest(supported_task_types=["flwr-serverapp"]),
        "pull-task-input": runtime_pb2.PullTaskInputRequest(),
        "pull-messages": runtime_pb2.PullAppMessagesRequest(),
        "push-messages": runtime_pb2.PushAppMessagesRequest(),
        "pull-object": message_pb2.PullObjectRequest(node=theirs, run_id=run, object_id="0" * 64),
        "get-nodes": runtime_pb2.GetNodesRequest(),
    }
    version = dict(RuntimeVersionMetadata.from_local_component("flwr CLI").as_metadata())
    headers = {"content-type": "application/protobuf", **version}
    signed = _signed(key, public)
    context = ssl.create_default_context(cafile=str(ca))
    with httpx.Client(base_url=url, verify=context, headers=headers, timeout=30) as client:
        for api, requests in {"control": control, "fleet": fleet, "runtime": runtime}.items():
            for name, request in requests.items():
                for more in ({}, signed, {"Authorization": "Bearer guessed"}):
                    answer = client.post(f"/v1/{api}/{name}", content=request.SerializeToString(), headers=more)
                    assert answer.status_code in REFUSED, (api, name, answer.status_code, answer.text)
        long = client.post("/v1/fleet/push-object", content=b"0" * (LONGEST + 1))
        assert long.status_code == 413
    with pytest.raises(httpx.TransportError), httpx.Client(base_url=url) as client:
        client.get("/health")  # the certificate is not of an authority that everybody trusts
    with pytest.raises(httpx.TransportError), httpx.Client(base_url=url.replace("https", "http")) as client:
        client.get("/health")


def _signed(key: ec.EllipticCurvePrivateKey, public: bytes) -> dict[str, str]:
    """What a node proves itself with; here by a key that nobody has registered."""
    timestamp = now().isoformat()
    signature = sign_message(key, timestamp.encode())
    return {
        FLEET_HTTP_PUBLIC_KEY_HEADER: b64encode(public).decode(),
        TIMESTAMP_HEADER: timestamp,
        FLEET_HTTP_SIGNATURE_HEADER: b64encode(signature).decode(),
    }
