"""A network that tests can break: a TCP proxy that cuts, freezes, delays, drops and reorders; and a door with TLS."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import select
import socket
import ssl
import struct
import threading
import time
from collections import deque

CHUNK = 2**16
MOST_QUEUED = 2**20  # bytes that the network itself holds; whoever sends more waits
HOLD = 0.2  # seconds that a reply is held back for another connection's to overtake it
END, RESET = b"", None  # in a queue: the sender is done; the sender is gone
_SSL_REQUEST = struct.pack("!II", 8, 80877103)


class Proxy:
    """Stands between clients and a server on this machine. What a call asks for holds when it returns.

    Bytes of one connection keep their order, as TCP promises. A connection that lost bytes is reset by `heal`.
    """

    def __init__(self, target):
        self.target = target
        """The server's port on 127.0.0.1."""
        self.num_swallowed = 0
        """Bytes dropped so far."""
        self.num_overtakings = 0
        """Replies that another connection's overtook."""
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port = self._door.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._orders = deque()
        self._connections = []
        self._held = None
        self._closing = False
        self._make_well()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def cut(self):
        """Reset all connections, and every new one, until healed."""
        self._order(lambda: self._set(cut=True))

    def freeze(self):
        """Keep connections, accept new ones, and forward nothing: a black hole. All is delivered once healed."""
        self._order(lambda: self._set(frozen=True))

    def delay(self, seconds):
        """Deliver everything that comes from now on so much later, in both directions."""
        self._order(lambda: self._set(delay=seconds))

    def drop_requests(self):
        """Swallow what clients send: the server never hears it."""
        self._order(lambda: self._set(dropped={"requests"}))

    def drop_replies(self):
        """Swallow what the server sends: it acts, and its client never hears."""
        self._order(lambda: self._set(dropped={"replies"}))

    def end_after(self, direction, num_bytes):
        """Forward so many more bytes of `requests` or `replies`: then the sender seems to be gone."""
        self._order(lambda: self._set(rest={direction: num_bytes}))

    def rest(self, direction):
        """How many of these bytes are left."""
        found = []
        self._order(lambda: found.append(self._rest[direction]))
        return found[0]

    def reorder(self):
        """Hold a reply back until one of another connection, that came later, has been delivered first."""
        self._order(lambda: self._set(reordered=True))

    def heal(self):
        self._order(self._heal)

    def close(self):
        self._order(lambda: self._set(closing=True))
        self._thread.join()
        for end in (self._door, self._wake, self._woken):
            end.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    @property
    def num_connections(self):
        return len(self._connections)

    @property
    def num_held(self):
        """Bytes on their way: taken from their sender, not yet delivered."""
        held = []
        self._order(lambda: held.extend(way.num_bytes for way in self._ways))
        return sum(held)

    # ---------------------------------------------------------------- below here only the proxy's own thread
    def _order(self, work):
        """Have the proxy's thread do it, and wait until it has."""
        done = threading.Event()
        self._orders.append((work, done))
        self._wake.send(b".")
        assert done.wait(60), "the proxy hangs"

    def _make_well(self):
        self._delay, self._dropped, self._rest = 0.0, set(), {}
        self._cut = self._frozen = self._reordered = False

    def _set(self, **mode):
        for name, value in mode.items():
            setattr(self, f"_{name}", value)
        if self._cut or self._closing:
            self._reset(self._connections)

    def _heal(self):
        self._make_well()
        self._held = None
        self._reset([ways for ways in self._connections if any(way.lost for way in ways)])
        for way in self._ways:
            way.queue = deque((0.0, chunk) for _, chunk in way.queue)

    @property
    def _ways(self):
        return [way for ways in self._connections for way in ways]

    def _run(self):
        while not self._closing:
            self._wait()
            while self._orders:
                work, done = self._orders.popleft()
                work()
                done.set()

    def _wait(self):
        """One turn: sleep until something can be read, written or is due, then do it."""
        now = time.monotonic()
        poll = select.poll()
        poll.register(self._door, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        wishes = {}
        for way in self._ways:
            if way.is_hungry:
                wishes[way.source] = wishes.get(way.source, 0) | select.POLLIN
            if self._may_send(way, now):
                wishes[way.sink] = wishes.get(way.sink, 0) | select.POLLOUT
        for end, events in wishes.items():
            poll.register(end, events)
        due = [way.queue[0][0] for way in self._ways if way.queue and not self._frozen]
        late = min([when for when in due if when > now], default=None)
        ready = dict(poll.poll(None if late is None else 1000 * (late - now) + 1))
        if self._woken.fileno() in ready:
            self._woken.recv(CHUNK)
        if self._orders:  # they come first: nothing is forwarded that they forbid
            return
        if self._door.fileno() in ready:
            self._accept()
        for ways in list(self._connections):
            try:
                for way in ways:
                    if way.is_hungry and way.source.fileno() in ready:
                        self._read(way)
                    self._send(way)
                if all(way.is_done for way in ways):
                    self._forget(ways)
            except OSError:
                self._reset([ways])

    def _accept(self):
        client, _ = self._door.accept()
        server = socket.socket()
        ways = (_Way("requests", client, server), _Way("replies", server, client))
        self._connections.append(ways)
        if self._cut or server.connect_ex(("127.0.0.1", self.target)) != 0:
            self._reset([ways])
            return
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            end.setblocking(False)

    def _read(self, way):
        try:
            chunk = way.source.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            chunk = RESET
        way.has_ended = not chunk
        now = time.monotonic()
        if not self._reordered or way.name == "requests" or not chunk:
            way.queue.append((now + self._delay, chunk))
        elif self._held in (None, way):
            self._held = way
            way.queue.append((now + HOLD, chunk))
        else:
            held, self._held = self._held, None
            way.queue.append((now, chunk))
            self._send(way)
            held.queue = deque((now, late) for _, late in held.queue)
            self.num_overtakings += 1

    def _may_send(self, way, now):
        return bool(way.queue) and way.queue[0][0] <= now and not self._frozen

    def _send(self, way):
        while self._may_send(way, time.monotonic()):
            due, chunk = way.queue.popleft()
            if self._held is way:
                self._held = None
            if way.name in self._dropped:
                way.lost = True
                self.num_swallowed += len(chunk or b"")
            elif chunk is RESET:
                raise ConnectionResetError
            elif chunk == END:
                way.sink.shutdown(socket.SHUT_WR)
                way.is_done = True
            else:
                rest = self._rest.get(way.name, len(chunk))
                try:
                    sent = way.sink.send(chunk[:rest])
                except BlockingIOError:
                    sent = 0
                if way.name in self._rest:
                    self._rest[way.name] -= sent
                if sent == rest < len(chunk):
                    way.lost = True
                    self._dropped.add(way.name)
                    way.sink.shutdown(socket.SHUT_WR)
                if sent < len(chunk):
                    way.queue.appendleft((due, chunk[sent:]))
                    return

    def _reset(self, connections):
        for ways in list(connections):
            for way in ways:  # no goodbye: whoever sends or reads next gets an error
                way.source.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self._forget(ways)

    def _forget(self, ways):
        for way in ways:
            way.source.close()
            if self._held is way:
                self._held = None
        self._connections.remove(ways)


class _Way:
    """One direction of one connection."""

    def __init__(self, name, source, sink):
        self.name = name
        self.source = source
        self.sink = sink
        self.queue = deque()  # (when to deliver, bytes)
        self.has_ended = False
        self.is_done = False
        self.lost = False

    @property
    def num_bytes(self):
        return sum(len(chunk or b"") for _, chunk in self.queue)

    @property
    def is_hungry(self):
        return not self.has_ended and self.num_bytes < MOST_QUEUED


class TlsDoor:
    """Speaks TLS for a PostgreSQL that was built without it: clients see what they would see of one that has it."""

    def __init__(self, target, key_file, certificate_file):
        self._target = target
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate_file, key_file)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._tasks = set()
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self):
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)

    async def _end(self):
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        self._tasks.add(task := asyncio.current_task())
        task.add_done_callback(self._tasks.discard)
        ends = [writer]
        try:
            if await reader.readexactly(len(_SSL_REQUEST)) == _SSL_REQUEST:
                writer.write(b"S")
                await writer.start_tls(self._context)
                answers, requests = await asyncio.open_connection("127.0.0.1", self._target)
                ends.append(requests)
                ways = [asyncio.ensure_future(_pump(*way)) for way in ((reader, requests), (answers, writer))]
                try:  # PostgreSQL's clients never close one way only
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)
            for end in ends:
                end.close()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            for end in ends:
                end.transport.abort()


async def _pump(source, sink):
    while chunk := await source.read(CHUNK):
        sink.write(chunk)
        await sink.drain()


def make_certificate():
    """A key and a self-signed certificate of 127.0.0.1 and localhost, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "paclm test")])
    names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now - day, now + day)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = serialization.Encoding.PEM
    return key.private_bytes(pem, *form).decode(), certificate.public_bytes(pem).decode()
