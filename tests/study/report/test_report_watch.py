"""The live page over a real socket."""

import http.client
import threading

import pytest

from fedld.errors import FedLDError
from fedld.study.report.page import make_server


@pytest.fixture
def server(make_run, tmp_path):
    run = make_run(tmp_path / "run")
    with make_server([run]) as made:
        threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        made.run = run
        yield made
        made.shutdown()


def ask(server, path="/version", method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    answer = connection.getresponse()
    return answer.status, answer.read(), dict(answer.getheaders())


def test_it_listens_on_loopback_only(server):
    assert server.server_address[0] == "127.0.0.1"
    assert server.server_port > 1023


def test_the_page_is_served_and_asks_nobody_else(server):
    status, page, headers = ask(server, "/")
    assert status == 200
    assert b"connect-src &#39;self&#39;" in page
    assert headers["X-Frame-Options"] == "DENY"
    assert headers["X-Fedld-Version"] == ask(server)[1].decode()


def test_the_page_changes_with_the_records(server):
    before, version = ask(server, "/")[1], ask(server)[1]
    lines = (server.run / "rounds.jsonl").read_text().splitlines()
    (server.run / "summary.json").unlink()
    (server.run / "rounds.jsonl").write_text("\n".join(lines[:4]) + "\n")
    assert ask(server)[1] != version
    page = ask(server, "/")[1]
    assert page != before
    assert b"4 of 8 rounds" in page


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1", "", "localhost:1"])
def test_other_hosts_are_refused(server, host):
    assert ask(server, "/", host=host or " ")[0] == 403


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/config.toml", "/config.toml", "//etc/passwd", "/rounds.jsonl", "/?x", "*"],
)
def test_there_is_no_path_to_traverse(server, path):
    status, content, _ = ask(server, path)
    assert status == 404
    assert content == b"there is only /\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_it_is_read_only(server, method):
    assert ask(server, "/", method=method)[0] == 501


def test_a_directory_without_a_run_is_told_at_once(tmp_path):
    with pytest.raises(FedLDError, match="neither a run nor a study"):
        make_server([tmp_path])
