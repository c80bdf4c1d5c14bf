import http.client
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fakedist.errors import SetupError
from fakedist.report.page.serve import HOST, PageServer


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer("<p>the page</p>", 0) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server: PageServer, path: str, method: str = "GET", host: str = "") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port)
    connection.request(method, path, headers={"Host": host} if host else {})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_the_page_is_at_its_address_alone(server: PageServer) -> None:
    assert server.url == f"http://127.0.0.1:{server.server_port}{server.path}"
    assert ask(server, server.path) == (200, b"<p>the page</p>")
    assert ask(server, server.path, "HEAD") == (200, b"")
    for path in ("/", server.path[:-1], f"{server.path}../etc/passwd", "/x" + server.path, "/favicon.ico"):
        assert ask(server, path)[0] == 404


def test_pages_that_it_links_to_are_served_below_its_address_alone() -> None:
    pages = {"rank0/report.html": "<p>rank 0</p>"}
    with PageServer("<p>the page</p>", 0, pages.get) as made:
        assert made.answer(made.path + "rank0/report.html") == (200, "text/html; charset=utf-8", b"<p>rank 0</p>")
        for path in ("/rank0/report.html", made.path + "rank1/report.html", f"/x{made.path[1:]}rank0/report.html"):
            assert made.answer(path) is None


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_nothing_can_be_written(server: PageServer, method: str) -> None:
    assert ask(server, server.path, method)[0] == 501


def test_only_this_machine_is_listened_to_and_another_name_for_it_gets_nothing(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert ask(server, server.path, host="evil.example")[0] == 404
    assert ask(server, server.path, host=f"localhost:{server.server_port}")[0] == 200


def test_every_server_has_an_address_of_its_own(server: PageServer) -> None:
    with PageServer("", 0) as other:
        assert other.path != server.path
        assert len(other.path) > 30


def test_a_browser_that_goes_away_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    asked, gone, closed = threading.Event(), threading.Event(), threading.Event()

    class Watched(PageServer):
        def shutdown_request(self, request: Any) -> None:
            super().shutdown_request(request)
            closed.set()

    def linked(_address: str) -> str:
        asked.set()
        assert gone.wait(10)
        return "x" * 10_000_000

    with Watched("", 0, linked) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        with socket.create_connection((HOST, made.server_port)) as browser:
            browser.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing resets
            browser.sendall(f"GET {made.path}x HTTP/1.1\r\nHost: {HOST}:{made.server_port}\r\n\r\n".encode())
            assert asked.wait(10)
        gone.set()
        assert closed.wait(10)
        made.shutdown()
        thread.join()
    assert capsys.readouterr() == ("", "")


def test_a_port_that_is_taken_is_told(server: PageServer) -> None:
    for port in (server.server_port, 70_000):
        with pytest.raises(SetupError, match="cannot be used"):
            PageServer("", port)
