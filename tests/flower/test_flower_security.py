"""Whoever reaches the sites' port, or has an account on the machine, gets nothing."""

import asyncio
import json
import os
import re
import socket
import ssl
import stat
import sys
from base64 import b64encode
from pathlib import Path

import httpx
import pytest
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedld.deployment import registrations
from fedld.deployment.daemons import Stored
from fedld.deployment.keys import make_site_key
from fedld.deployment.listener import Activity, Holding
from fedld.deployment.registrations import Admission

HERE = Path(__file__).parent
NOBODY = 65534


def modes(folder):
    return {path: stat.S_IMODE(path.lstat().st_mode) for path in folder.rglob("*") if not path.is_symlink()}


def family(pid):
    """A process and all that descend from it."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def listening(pid):
    """Inodes of the TCP sockets on which a process and its children listen."""
    tables = (Path(f"/proc/{pid}/net/{name}").read_text() for name in ("tcp", "tcp6"))
    lines = [line.split() for table in tables for line in table.splitlines()]
    ports = {line[9]: int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A"}
    links = [os.readlink(link) for one in family(pid) for link in Path(f"/proc/{one}/fd").glob("*")]
    return {ports[link[8:-1]] for link in links if link.startswith("socket:[") and link[8:-1] in ports}


def test_an_outsider_gets_nothing(secure):
    words = [f"127.0.0.1:{secure.port}", str(secure.folder / "certificates" / "ca.crt")]
    done = secure.call(sys.executable, str(HERE / "attacker.py"), *words)
    assert json.loads(done.stdout) == []


def test_a_registered_site_cannot_administer(secure):
    words = [f"127.0.0.1:{secure.port}", str(secure.folder / "certificates" / "ca.crt"), "keys/beta.key"]
    assert json.loads(secure.call(sys.executable, str(HERE / "attacker.py"), *words).stdout) == []


def test_the_gate_reads_nothing_of_a_stranger():
    async def never(*_):
        raise AssertionError("it was read, or passed on")

    def ask(path, **headers):
        said = []

        async def send(part):
            said.append(part.get("status"))

        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": "POST", "path": path, "headers": pairs}
        asyncio.run(Admission(never, lambda: {"alpha": b"key"})(scope, never, send))
        return said[0]

    known = {"flwr_public_key": b64encode(b"key").decode(), "flwr_timestamp": now().isoformat()}
    assert ask("/v1/fleet/pull-messages", content_length="5") == 401
    assert ask("/v1/fleet/pull-messages", content_length="5", **known, flwr_signature="AAAA") == 401
    assert ask("/v1/fleet/pull-messages", content_length="99999999999") == 413
    assert ask("/v1/fleet/pull-messages", transfer_encoding="chunked") == 413
    assert ask("/v1/fleet/register-node", content_length="5") == 404
    assert ask("/v1/runtime/acquire-task", content_length="5") == 404


def test_a_site_that_asks_for_its_registration_leaves_flower_alone(tmp_path, monkeypatch):
    """It sent Flower an empty heartbeat, which was an error in the log of a healthy server."""
    make_site_key("alpha", tmp_path)
    key = tmp_path / "alpha.key"
    authority = tmp_path / "ca.crt"
    monkeypatch.setattr(registrations.ssl, "create_default_context", lambda cafile: None)
    registered = load_ssh_private_key(key.read_bytes(), None).public_key()

    async def never(*_):
        raise AssertionError("it was passed on to Flower")

    def ask(keys):
        def post(url, *, headers, content, **_):
            answer = {}

            async def send(part):
                answer.update(part)

            lines = {**headers, "content-length": str(len(content))}
            pairs = [(name.lower().encode(), value.encode()) for name, value in lines.items()]
            scope = {
                "type": "http",
                "method": "POST",
                "path": url.removeprefix("https://h:1"),
                "headers": pairs,
            }
            asyncio.run(Admission(never, lambda: keys)(scope, never, send))
            found = {name.decode(): value.decode() for name, value in answer["headers"]}
            return httpx.Response(answer["status"], headers=found, content=answer["body"])

        monkeypatch.setattr(registrations.httpx, "post", post)
        return registrations.check_registration("h:1", authority, key)

    assert ask({"alpha": public_key_to_bytes(registered)}) is None
    assert ask({"alpha": b"other"}) == "this key is not registered at the server"


def test_a_site_cannot_fill_the_servers_disk(monkeypatch, tmp_path):
    """Above its share of the room, while that is full, a site's replies are refused; others' are taken."""
    monkeypatch.setattr(registrations, "_unsigned", lambda headers, keys: None)
    stored, passed, said = Stored(tmp_path / "links.db", 100.0), [], []

    async def flower(scope, receive, send):
        passed.append(scope["path"])

    async def send(part):
        said.append(part.get("status", 0))

    guard = Admission(flower, lambda: {"a": b"a", "b": b"b"}, full=stored.full, room=stored.room)

    def push(key, call="push-object"):
        facts = {b"content-length": b"40", b"flwr-public-key": b64encode(key)}
        scope = {"type": "http", "method": "POST", "path": f"/v1/fleet/{call}", "headers": facts.items()}
        before = len(passed)
        asyncio.run(guard(scope, None, send))
        return len(passed) > before

    assert all(push(b"a") for _ in range(3))  # more than its share, but there is room
    (tmp_path / "links.db").write_bytes(bytes(60))
    (tmp_path / "links.db-wal").write_bytes(bytes(60))
    assert not push(b"a")
    assert said[0] == 507
    assert push(b"a", "pull-messages")
    assert push(b"b")
    (tmp_path / "links.db-wal").unlink()
    assert push(b"a")


def test_the_server_has_one_port_and_a_site_has_none(secure):
    assert listening(secure.processes["server"].pid) == {secure.port}
    for site in secure.sites:
        assert listening(secure.processes[site].pid) == set()


def test_what_server_and_sites_write_is_private(secure):
    found = modes(secure.folder / "runs") | modes(secure.folder / "state")
    assert secure.folder / "runs" / "superlink.db" in found
    assert not {str(path): oct(mode) for path, mode in found.items() if mode & 0o077}
    for folder in ("runs", *(f"state/{site}" for site in secure.sites)):
        assert stat.S_IMODE((secure.folder / folder).stat().st_mode) == 0o700


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_account_of_the_machine_gets_nothing(secure):
    path = json.loads((secure.folder / "runs" / "running.json").read_text())["socket"]
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setuid(NOBODY)
        try:
            socket.socket(socket.AF_UNIX).connect(path)
        except PermissionError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for pid in family(secure.processes["server"].pid):
        assert b"--token" not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_one_name_one_key(secure):
    for words, said in (
        (["--name", "alpha", "--key", "keys/beta.pub"], "'alpha' is registered already"),
        (["--name", "delta", "--key", "keys/beta.pub"], "registered already, for 'beta'"),
        (["--name", "../x", "--key", "keys/beta.pub"], "letters, digits"),
        (["--name", "delta", "--key", "keys/beta.key"], "not an OpenSSH public key"),
    ):
        done = secure.call(secure.fedld, "server", "register", *words, check=False)
        assert done.returncode == 2
        assert said in done.stderr


def test_every_line_on_trust_names_a_test_that_exists():
    pages = [HERE.parents[1] / "docs" / name for name in ("deployment.md", "site-limits.md", "operations.md")]
    named = set(re.findall(r"`(test_\w+)`", "".join(page.read_text() for page in pages)))
    written = {
        name for file in HERE.glob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(named) > 15
    assert named <= written
    table = pages[0].read_text().partition("## What is trusted")[2].partition("\n\n`--insecure`")[0]
    lines = [[cell.strip() for cell in line.split("|")] for line in table.splitlines() if "|" in line]
    promises = [line for line in lines if line[2].startswith(("cannot", "finds"))]
    assert len(promises) > 25
    assert all("`test_" in line[3] for line in promises)


def test_a_lost_database_and_the_way_back(secure):
    """Names and keys are in the operator's file: sites come back by themselves."""

    def online():
        done = secure.call(secure.fedld, "server", "status", check=False)
        return done.stdout.count(": online since") if done.returncode == 0 else -1

    assert "server stopped" in secure.call(secure.fedld, "server", "stop").stdout
    assert secure.processes.pop("server").wait(60) == 0
    assert secure.call(secure.fedld, "server", "status", check=False).returncode == 2
    for file in (secure.folder / "runs").glob("superlink.db*"):
        file.unlink()
    secure.start_server()
    secure.wait(lambda: online() == 3, 120)
    secure.call(secure.fedld, "site", "stop", "--name", "alpha", "--state", "state")
    assert secure.processes.pop("alpha").wait(60) == 0
    assert "site 'alpha' stopped" in secure.log("alpha")
    assert not [
        line for site in secure.sites for line in secure.log(site).splitlines() if "Traceback" in line
    ]
    secure.start_site("alpha")


def connect(secure):
    """A TLS connection to the sites' port, as anybody makes it who has ca.crt."""
    context = ssl.create_default_context(cafile=secure.folder / "certificates" / "ca.crt")
    raw = socket.create_connection(("127.0.0.1", secure.port), 30)
    return context.wrap_socket(raw, server_hostname="127.0.0.1")


def answered(tls):
    """All that comes until the server closes."""
    said = b""
    try:
        while part := tls.recv(65536):
            said += part
    except OSError:
        pass
    return said


def memory(secure):
    """Kilobytes that the server's processes hold."""
    facts = [Path(f"/proc/{pid}/status").read_text() for pid in family(secure.processes["server"].pid)]
    return sum(int(re.search(r"VmRSS:\s+(\d+)", text)[1]) for text in facts if "VmRSS" in text)


def test_an_endless_header_costs_the_server_nothing(secure):
    before = memory(secure)
    with connect(secure) as tls:
        sent = 0
        try:
            tls.sendall(b"POST /v1/fleet/activate-node HTTP/1.1\r\nHost: x\r\nX: ")
            for _ in range(1000):
                tls.sendall(b"a" * 65536)
                sent += 65536
        except OSError:
            pass
        assert sent < 8 << 20
    assert memory(secure) - before < 20_000


def test_half_requests_are_closed_and_bounded_in_number(secure):
    """Also a TLS handshake that does not begin; sites are served meanwhile."""
    silent = socket.create_connection(("127.0.0.1", secure.port), 50)
    opened, refused = [], 0
    for _ in range(40):
        tls = connect(secure)
        try:
            tls.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nX: ")
            tls.settimeout(0.05)
            refused += not tls.recv(1)
        except TimeoutError:
            opened.append(tls)
        except OSError:
            refused += 1
    assert len(opened) <= 32
    assert refused >= 8
    for tls in opened:
        tls.settimeout(60)
        assert answered(tls) == b""
        tls.close()
    assert silent.recv(1) == b""  # a minute without the server's bound
    silent.close()
    assert "online since" in secure.call(secure.fedld, "server", "status").stdout


def test_there_are_no_websockets(secure):
    handshake = (
        b"GET /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    )
    handshake += b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    for _ in range(2):
        with connect(secure) as tls:
            tls.sendall(handshake)
            assert answered(tls).startswith(b"HTTP/1.1 404")


def test_a_folder_has_one_server(secure):
    words = ["server", "start", "--port", "0", "--insecure"]
    second = secure.call(secure.fedld, *words, check=False)
    assert second.returncode == 2
    assert "another server runs in 'runs'" in second.stderr
    assert "online since" in secure.call(secure.fedld, "server", "status").stdout
    key = [
        "--ca",
        "certificates/ca.crt",
        "--key",
        "keys/alpha.key",
        "--superlink",
        f"127.0.0.1:{secure.port}",
    ]
    data = ["--data", str(secure.data / "alpha.npz"), "--state", "state", "--min-images", "2"]
    third = secure.call(secure.fedld, "site", "start", "--name", "alpha", *key, *data, check=False)
    assert third.returncode == 2
    assert "another site runs in 'state/alpha'" in third.stderr


def test_a_call_for_work_is_held_until_there_may_be_some():
    """An idle site calls every twenty seconds; nothing is missed that came between two calls."""
    activity, passed = Activity(), []

    async def flower(scope, receive, send):
        await receive()
        passed.append(scope["path"])
        await send({"type": "http.response.body", "body": b"work" if scope["path"] == "/busy" else b""})

    app = Holding(flower, activity, frozenset({"/pull", "/busy"}), frozenset({"/push"}))

    async def call(path, leave=None):
        messages = [{"type": "http.request", "body": b"", "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await (leave or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(part):
            pass

        await app({"type": "http", "path": path, "headers": [], "client": None}, receive, send)

    async def held(path, leave=None):
        task = asyncio.ensure_future(call(path, leave))
        await asyncio.sleep(0.05)
        return task

    async def scenario():
        await call("/pull")  # the first is answered at once
        waiting = await held("/pull")
        assert not waiting.done()
        await call("/push")
        await waiting
        await call("/push")
        await call("/pull")  # something came since its last call
        await call("/busy")
        await call("/busy")  # there may be more
        await call("/pull")
        leave = asyncio.Event()
        gone = await held("/pull", leave)
        count = len(passed)
        leave.set()
        await gone
        assert len(passed) == count  # a caller that went away takes no work with it
        stopped = await held("/pull")
        activity.close()
        await stopped

    asyncio.run(scenario())
    assert passed == ["/pull", "/push", "/pull", "/push", "/pull", "/busy", "/busy", "/pull", "/pull"]
