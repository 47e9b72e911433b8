"""The page of a run, live: who is answered, with what, and how soon a browser shows it."""

import http.client
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.browser import browser
from tests.extras.page.serving import append, served
from tests.processes import wait_until
from tests.report.logs import HOSTILE, KILLED_AND_RESTARTED, metrics, write_run
from toolkit.cli.main import main
from toolkit.errors import DataError
from toolkit.extras.page import serve
from toolkit.extras.page.serve import LivePage, PageServer
from toolkit.report.record import Logs, RunRecord, read_record
from toolkit.system.atomic import write_atomically


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", KILLED_AND_RESTARTED[:3], metrics(12, 2.0))


def ask(
    server: PageServer, path: str = "/", host: str | None = None, method: str = "GET"
) -> tuple[int, str]:
    """Status and body of an answer."""
    port = server.server_address[1]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{port}")
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer.status, body


@contextmanager
def listening(server: PageServer, **headers: str) -> Iterator[Callable[[], str]]:
    """The next field of the server-sent events; a comment is one, too."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request("GET", "/news", headers=headers)
    answer = connection.getresponse()
    assert answer.getheader("Content-Type") == "text/event-stream; charset=utf-8"
    try:
        yield lambda: next(line for line in iter(answer.readline, b"") if line.strip()).decode()
    finally:
        answer.close()
        connection.close()


def last_step(field: str) -> int:
    data = json.loads(field.removeprefix("data: "))
    (loss,) = [one for one in data["charts"] if one["id"] == "loss"]
    return int(loss["lines"][0]["step"][-1])


def test_new_steps(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_SILENCE_S", 0.2)
    with served(run) as server, listening(server) as field:
        version = after_comments(field).removeprefix("id: ").strip()
        assert last_step(field()) == 12
        assert field() == ": nothing new\n"
        with listening(server, **{"Last-Event-ID": version}) as again:
            assert again() == ": nothing new\n"
        append(run, 13)
        assert after_comments(field).startswith("id: ")
        assert last_step(field()) == 13
        events = (run / "events.jsonl").read_bytes()
        (run / "events.jsonl").unlink()
        assert after_comments(field) == "event: lost\n"
        assert "is not a run directory" in field()
        with listening(server, **{"Last-Event-ID": version}) as late:
            assert after_comments(late) == "event: lost\n"
        assert ask(server)[0] == 503
        (run / "events.jsonl").write_bytes(events)
        assert after_comments(field).startswith("id: "), "it is back, though it is the same"
        assert last_step(field()) == 13


def after_comments(field: Callable[[], str]) -> str:
    return next(text for text in iter(field, "") if not text.startswith(":"))


def test_a_client_that_has_gone(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is noticed, and nothing is read for nobody."""
    monkeypatch.setattr(serve, "_SILENCE_S", 0.05)
    monkeypatch.setattr(serve, "_BUSY_EVERY_S", 0.5)
    with served(run) as server:
        with listening(server) as field:
            field()
            assert server.live.listeners == 1
        wait_until(lambda: server.live.listeners == 0, "the end of the connection")
        append(run, 13)
        version = server.live.version
        time.sleep(1.5)
        assert server.live.version == version


def test_clients_share_one_reading(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def counted(path: Path, logs: Logs) -> RunRecord:
        read.append(path)
        return read_record(path, logs)

    monkeypatch.setattr(serve, "read_record", counted)
    live = LivePage([run])
    for _ in range(50):
        live.data()
    assert len(read) == 1


def test_what_costs_more_is_done_less_often(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = cpu_s = thread_s = reading_s = 0.0

    def costly(path: Path, logs: Logs) -> RunRecord:
        nonlocal thread_s
        thread_s += reading_s
        return read_record(path, logs)

    clock = SimpleNamespace(
        monotonic=lambda: now_s,
        process_time=lambda: cpu_s,
        thread_time=lambda: thread_s,
        time_ns=lambda: 0,
    )
    monkeypatch.setattr(serve, "time", clock)
    monkeypatch.setattr(serve, "read_record", costly)
    live = LivePage([run])
    assert live.data()["version"] == "0-1"
    # What clients have cost, the pause until the runs are read again, and what that costs: few
    # clients, some, so many that their share is not kept, and a long run.
    for number, (clients_s, pause_s, next_s) in enumerate(
        [(0.0, 0.5, 0.0), (0.01, 1.0, 0.0), (60.0, 1.2, 0.2), (0.2, 2.0, 0.0)], 2
    ):
        append(run, 11 + number)
        cpu_s += clients_s
        now_s += pause_s - 0.01
        assert live.data()["version"] == f"0-{number - 1}"
        now_s += 0.02
        reading_s = next_s
        assert live.data()["version"] == f"0-{number}"


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/recipe.yaml", "/recipe.yaml", "//etc/passwd", "/news/..",
     "/news%00", "/?x=/../../etc/passwd/../"],
)  # fmt: skip
def test_there_are_no_files(run: Path, path: str) -> None:
    (run / "recipe.yaml").write_text("name: canary-9137\n")
    with served(run) as server:
        status, body = ask(server, path)
        assert status == (200 if path.startswith("/?") else 404)
        assert "root:" not in body and (status == 200 or "canary-9137" not in body)


def test_only_its_own_names(run: Path) -> None:
    with served(run) as server:
        port = server.server_address[1]
        for host in (f"localhost:{port}", "127.0.0.1", f"[::1]:{port}", f"10.0.0.1:{port}",
                     f"LOCALHOST.:{port}", socket.getfqdn().upper()):  # fmt: skip
            assert ask(server, host=host)[0] == 200, host
        for host in (f"evil.example:{port}", "127.0.0.1.evil.example", ":", "x@127.0.0.1"):
            status, text = ask(server, host=host)
            assert status == 403 and "use its IP address" in text


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_is_written(run: Path, method: str) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    with served(run) as server:
        assert ask(server, "/", method=method)[0] == 501
        assert ask(server, "/")[0] == 200
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_a_client_that_says_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps nobody waiting, and is not kept itself."""
    monkeypatch.setattr(serve._Handler, "timeout", 0.2)
    with served(run) as server, socket.create_connection(server.server_address[:2]) as silent:
        silent.settimeout(60)
        assert ask(server)[0] == 200
        assert silent.recv(1) == b"", "hung up"


@pytest.mark.parametrize("begun", [b"GET / HTTP/1.1\r\nX: ", b"GET /"], ids=["header", "line"])
def test_a_request_that_is_fed_slowly_ends(
    run: Path, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    """Each byte comes in time, the request never ends."""
    monkeypatch.setattr(serve, "IDLE_S", 0.3)
    with served(run) as server, socket.create_connection(server.server_address[:2]) as slow:
        slow.settimeout(0.05)
        slow.sendall(begun)

        def is_closed() -> bool:
            try:
                slow.sendall(b"x")
                return slow.recv(1) == b""
            except TimeoutError:
                return False
            except OSError:
                return True

        wait_until(is_closed, "the server hangs up")


def test_a_body_is_not_another_request(run: Path) -> None:
    with served(run) as server, socket.create_connection(server.server_address[:2]) as client:
        client.settimeout(60)
        body = b"GET /inner HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        head = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        with suppress(ConnectionResetError):
            answers = b""
            while part := client.recv(1 << 16):
                answers += part
        assert answers.count(b"HTTP/1.1 ") == 1


def test_a_client_that_hangs_up_prints_nothing(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served(run) as server:
        for _ in range(3):
            with socket.create_connection(server.server_address[:2]) as client:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                client.recv(100)
        assert ask(server)[0] == 200
    assert capsys.readouterr().err == ""


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", KILLED_AND_RESTARTED, metrics(20, 2.0))
    logs = Logs()
    first = read_record(run, logs).metrics
    text = (run / "metrics.jsonl").read_text()
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 21, "loss": 1.0}\n{"step": 22')
    grown = read_record(run, logs)
    assert grown.metrics is first and len(first) == 21
    assert first[-1] == {"step": 21, "loss": 1.0}
    assert "metrics.jsonl: its last line is cut short, or is being written" in grown.missing
    write_atomically(run / "metrics.jsonl", text)  # as a resume does
    again = read_record(run, logs)
    assert again.metrics == read_record(run).metrics and len(again.metrics) == 20


def test_a_browser_sees_a_new_step(tmp_path: Path) -> None:
    lines = [line | {HOSTILE: 1.0} for line in metrics(12, 2.0)]
    run = write_run(tmp_path / "run", KILLED_AND_RESTARTED[:3], lines)
    with browser() as tab, served(run) as server:
        tab.open(server.url)
        assert tab.run("document.querySelector('.amount').textContent") == "12"
        append(run, 13)
        tab.wait("document.querySelector('.amount').textContent === '13'", "step 13")
        assert tab.run("document.querySelectorAll('figure').length") == 3
        label = tab.run("document.querySelector('[data-chart=loss]').ariaLabel")
        assert "to 4.87, lowest 4.87" in label
        assert tab.errors() == []
        assert {url.split("?")[0] for url in tab.requests()} <= {
            server.url, f"{server.url}news",
        }  # fmt: skip
        assert tab.run("document.images.length") == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is not a run directory with events"),
        (["RUN", "--host", "203.0.113.7"], "cannot listen on 203.0.113.7, port 0"),
        (["RUN", "--host", "no such name"], "cannot listen on no such name, port 0"),
    ],
)
def test_mistakes(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", *(str(run) if one == "RUN" else one for one in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_a_run_is_needed(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        LivePage([tmp_path])
