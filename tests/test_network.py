"""The network that tests break does what it says: each mode is seen from both ends of a connection."""

import socket
import socketserver
import threading
import time

import psycopg
import pytest

import network
from network import Proxy
from postgres import wait_for


class Echo(socketserver.ThreadingTCPServer):
    """Sends back what it gets, and remembers it."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), None)
        self.heard = bytearray()

    def finish_request(self, request, client_address):
        while chunk := request.recv(2**16):
            self.heard += chunk
            request.sendall(chunk)

    def handle_error(self, *_):
        """A connection that a test cuts is no error."""


@pytest.fixture
def echo():
    with Echo() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo):
    with Proxy(echo.server_address[1]) as proxy:
        yield proxy


@pytest.fixture
def connect(proxy):
    """Makes clients of the proxy that give up after a minute: a test that waits in vain fails."""
    clients = []

    def connect():
        clients.append(socket.create_connection(("127.0.0.1", proxy.port), timeout=60))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def receive(client, count):
    found = b""
    while len(found) < count and (chunk := client.recv(count - len(found))):
        found += chunk
    return found


def exchange(client, message=b"hello"):
    client.sendall(message)
    return receive(client, len(message))


def expect_reset(client):
    with pytest.raises(ConnectionError):
        client.recv(1)


def test_a_whole_network_forwards_everything_in_order_and_both_goodbyes(proxy, connect):
    client, message = connect(), bytes(range(256)) * 20_000
    sender = threading.Thread(target=client.sendall, args=(message,))
    sender.start()
    assert receive(client, len(message)) == message
    sender.join()
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""
    wait_for(lambda: proxy.num_connections == 0, "the connection to be forgotten")


def test_a_cut_resets_old_and_new_connections_until_healed(proxy, connect):
    client = connect()
    exchange(client)
    proxy.cut()
    expect_reset(client)
    with pytest.raises(ConnectionError):  # while it connects, or at its first byte
        connect().recv(1)
    proxy.heal()
    assert exchange(connect()) == b"hello"


def test_a_server_that_is_down_resets_its_clients():
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    with (
        Proxy(port) as proxy,
        pytest.raises(ConnectionError),
        socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as client,
    ):
        client.recv(1)


def test_a_frozen_network_keeps_everything_until_healed(echo, proxy, connect):
    old = connect()
    exchange(old, b"before")
    proxy.freeze()
    new = connect()
    old.sendall(b"frozen")
    new.sendall(b"frozen")
    wait_for(lambda: proxy.num_held == 12, "both requests to be held")
    assert bytes(echo.heard) == b"before"
    proxy.heal()
    assert receive(old, 6) == receive(new, 6) == b"frozen"


def test_a_delay_holds_both_ways_and_ends_when_healed(proxy, connect):
    client = connect()
    proxy.delay(0.1)
    began = time.monotonic()
    assert exchange(client) == b"hello"
    assert time.monotonic() - began >= 0.2
    proxy.delay(3600)
    client.sendall(b"late")
    wait_for(lambda: proxy.num_held == 4, "the request to be held")
    proxy.heal()
    assert receive(client, 4) == b"late"


@pytest.mark.parametrize("what", ["requests", "replies"])
def test_what_is_dropped_never_arrives_and_its_connection_is_reset_by_healing(echo, proxy, connect, what):
    client, bystander = connect(), connect()
    exchange(bystander, b"before")
    (proxy.drop_requests if what == "requests" else proxy.drop_replies)()
    client.sendall(b"lost")
    wait_for(lambda: proxy.num_swallowed == 4, "the bytes to be dropped")
    assert bytes(echo.heard) == (b"before" if what == "requests" else b"beforelost")
    proxy.heal()
    expect_reset(client)
    assert exchange(bystander) == b"hello"


def test_reordered_replies_overtake_each_other_across_connections_only(proxy, connect, monkeypatch):
    monkeypatch.setattr(network, "HOLD", 3600)
    first, second = connect(), connect()
    proxy.reorder()
    first.sendall(b"first")
    wait_for(lambda: proxy.num_held == 5, "the reply to be held")
    first.sendall(b" again")
    wait_for(lambda: proxy.num_held == 11, "the next one to queue behind it")
    assert exchange(second, b"second") == b"second"
    assert receive(first, 11) == b"first again"
    assert proxy.num_overtakings == 1
    first.sendall(b"alone")
    wait_for(lambda: proxy.num_held == 5, "the reply to be held")
    proxy.heal()
    assert receive(first, 5) == b"alone"
    monkeypatch.setattr(network, "HOLD", 0.01)
    proxy.reorder()
    assert exchange(first, b"not for ever") == b"not for ever"


def test_a_commit_happens_whose_reply_is_lost(postgres, database):
    with postgres.connect(database) as owner, Proxy(postgres.tls_port) as proxy:
        owner.execute("CREATE TABLE numbers (number int)")
        url = postgres.url(database, tls=True, port=proxy.port)
        with postgres.connect(url) as client:
            client.execute("INSERT INTO numbers VALUES (1)")
            proxy.drop_replies()
            failures = []

            def insert():
                try:
                    client.execute("INSERT INTO numbers VALUES (2)")
                except psycopg.OperationalError as error:
                    failures.append(error)

            thread = threading.Thread(target=insert)
            thread.start()
            wait_for(lambda: proxy.num_swallowed > 0, "the reply to be lost")
            assert owner.execute("SELECT count(*) FROM numbers").fetchone() == (2,)
            assert thread.is_alive()
            proxy.cut()
            thread.join()
            assert failures
