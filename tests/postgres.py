"""A real PostgreSQL for tests: started from the machine's own programs, in a folder of its own, gone with its test run.

Run as a script it installs the wheel `pgserver` where the machine has no PostgreSQL, and says so in one line.
"""

from __future__ import annotations

import base64
import ctypes
import hashlib
import hmac
import importlib.util
import itertools
import os
import pwd
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import parse_qs, quote, urlencode, urlsplit, urlunsplit

from network import TlsDoor, make_certificate

VARIABLE = "PACLM_POSTGRES_BIN"
WHEEL = "pgserver==0.1.4"
PROGRAMS = ("initdb", "postgres", "pg_basebackup")
HOW_TO_GET_ONE = (
    "No PostgreSQL found: apt-get install postgresql, python tests/postgres.py (installs the wheel pgserver), "
    f"or set {VARIABLE} to the folder of initdb and postgres."
)
SETTINGS = """
max_connections = 60
shared_buffers = 16MB
wal_keep_size = 64MB
dynamic_shared_memory_type = mmap  # in the folder: nothing stays behind after a kill
log_min_messages = warning
"""
SHARED_MEMORY = Path("/dev/shm")
PATIENCE = 60.0  # seconds until a server that does not come is a failure


def find_binaries():
    """The folder of PostgreSQL's programs: the named one, the search path's, Debian's newest, or the wheel's."""
    if named := os.environ.get(VARIABLE):
        candidates = [Path(named)]
    else:
        on_path = shutil.which("initdb")
        debian = Path("/usr/lib/postgresql").glob("*/bin")
        wheel = importlib.util.find_spec("pgserver")
        candidates = [
            *([Path(on_path).resolve().parent] if on_path else []),
            *sorted(debian, key=lambda folder: float(folder.parent.name), reverse=True),
            *([Path(wheel.origin).parent / "pginstall" / "bin"] if wheel else []),
        ]
    return next((folder for folder in candidates if all((folder / name).is_file() for name in PROGRAMS)), None)


class PostgresServer:
    """One database cluster with passwords (scram-sha-256), a Unix socket and TLS.

    It dies with the process that made it, however that ends: a watcher sees to it. `within` names the folder to make it
    in, such as one on a real disk.
    """

    def __init__(self, *, primary=None, within=None):
        binaries = find_binaries()
        assert binaries is not None, HOW_TO_GET_ONE
        self._user = _other_user() if os.geteuid() == 0 else {}
        must_copy = bool(self._user) and not all(path.stat().st_mode & 1 for path in (binaries, *binaries.parents))
        roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 2**30 and not must_copy
        self._within = within or (SHARED_MEMORY if roomy else None)
        self.folder = Path(tempfile.mkdtemp(prefix="paclm-postgres-", dir=self._within))
        self.folder.chmod(0o755)
        if self._user:
            os.chown(self.folder, self._user["user"], self._user["group"])
        self._watcher = subprocess.Popen(
            [sys.executable, __file__, "watch", str(os.getpid()), self.folder], start_new_session=True
        )
        if must_copy:  # the wheel, installed where only root may look
            for name in ("pgserver", "pgserver.libs"):
                shutil.copytree(binaries.parents[2] / name, self.folder / "wheel" / name)
            binaries = self.folder / "wheel" / "pgserver" / "pginstall" / "bin"
        self.binaries = binaries
        self.data = self.folder / "data"
        self.certificate = self.folder / "root.crt"
        self.port = self.tls_port = _free_port()
        self._tls_door = None
        self.primary = primary
        self.process = None
        self._numbers = itertools.count(1)
        try:
            if primary is None:
                self._password = secrets.token_hex(16)
                self._initialise()
                self.start()
        except BaseException:
            self.close()
            raise

    # ---------------------------------------------------------------- life and death
    def start(self):
        options = {"port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": self.folder}
        self.process = self._popen(
            "postgres", "-D", self.data, *(f"--{name}={value}" for name, value in options.items())
        )
        self.wait_until_ready()

    def wait_until_ready(self):
        """Return once the server takes connections, also after a backend's death made it recover."""
        import psycopg

        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self.connect().close()
            except psycopg.OperationalError as error:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"PostgreSQL does not start: {self.log[-2000:]}") from error
            time.sleep(0.01)

    @property
    def is_running(self):
        return self.process is not None and self.process.poll() is None

    def stop(self, mode="fast"):
        """Shut down: `fast` writes a checkpoint, `immediate` is a crash that the next start recovers from."""
        self.process.send_signal({"fast": signal.SIGINT, "immediate": signal.SIGQUIT}[mode])
        self.process.wait(PATIENCE)

    def kill(self):
        """SIGKILL the server and all its children at once."""
        _kill_all_in(self.folder)
        self.process.wait(PATIENCE)

    def restart(self, mode="fast"):
        if self.is_running:
            self.stop(mode)
        self.start()

    def close(self):
        """Kill it and remove every trace; a primary no longer waits for it."""
        if self.primary is not None and self.primary.is_running:
            self.primary.wait_for_standbys("")
        _remove(self.folder)
        if self._tls_door is not None:
            self._tls_door.close()
        if self.process is not None:
            self.process.wait(PATIENCE)
        self._watcher.kill()
        self._watcher.wait(PATIENCE)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def kill_backend(self, pid, by=signal.SIGKILL):
        """Kill one backend. By SIGKILL all connections end and the server recovers; by SIGTERM only this one ends."""
        gone = set(processes_in(self.folder)) - {self.process.pid} if by == signal.SIGKILL else {pid}
        os.kill(pid, by)
        wait_for(lambda: gone.isdisjoint(processes_in(self.folder)), f"process {pid} to end")

    # ---------------------------------------------------------------- databases and their addresses
    @property
    def admin_url(self):
        return f"postgresql://admin:{self._password}@127.0.0.1:{self.port}/postgres"

    def connect(self, url=None, **options):
        """An autocommitting connection; as the superuser over the Unix socket unless told otherwise."""
        import psycopg

        return psycopg.connect(url or self.url(socket=True), autocommit=True, connect_timeout=10, **options)

    def create_database(self, *, may_create_roles=False):
        """The URL of a fresh, empty database that a role of its own, no superuser, owns."""
        name, password = f"test_{os.getpid()}_{next(self._numbers)}", secrets.token_hex(8)
        with self.connect() as admin:
            right = "CREATEROLE" if may_create_roles else ""
            admin.execute(f"CREATE ROLE {name} LOGIN {right} PASSWORD '{_verifier(password)}'")
            admin.execute(f"CREATE DATABASE {name} OWNER {name} TEMPLATE template0 STRATEGY file_copy")
        return f"postgresql://{name}:{password}@127.0.0.1:{self.port}/{name}"

    def drop_database(self, url):
        with self.connect() as admin:
            admin.execute(f"DROP DATABASE {urlsplit(url).path[1:]} WITH (FORCE)")

    def url(self, url=None, *, tls=False, socket=False, port=None):
        """That URL (the superuser's unless given) on this server: with a checked certificate, by socket, by a proxy.

        `port` is the proxy's; one for connections with TLS stands before `tls_port`.
        """
        parts = urlsplit(url or self.admin_url)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        host = f"127.0.0.1:{port or (self.tls_port if tls else self.port)}"
        if tls:
            query |= {"sslmode": "verify-full", "sslrootcert": str(self.certificate)}
        if socket:
            host = ""
            query |= {"host": str(self.folder), "port": str(self.port)}
        login = parts.netloc.rpartition("@")[0]
        return urlunsplit(parts._replace(netloc=f"{login}@{host}", query=urlencode(query, quote_via=quote, safe="/")))

    # ---------------------------------------------------------------- replication
    def standby(self, *, synchronous=True):
        """A second server that streams from this one; every commit here waits for it where it is synchronous."""
        standby = PostgresServer(primary=self, within=self._within)
        try:
            standby._copy(self)
            standby.start()
            name = standby.folder.name
            wait_for(lambda: self._replication(name) is not None, "the standby to stream")
            if synchronous:
                self.wait_for_standbys(f'"{name}"')
                wait_for(lambda: self._replication(name) == "sync", "the standby to be synchronous")
        except BaseException:
            standby.close()
            raise
        return standby

    def promote(self):
        """Make this standby a primary of its own."""
        with self.connect() as admin:
            admin.execute("SELECT pg_promote(wait => true)")
        self.primary = None

    def wait_for_standbys(self, names):
        """Set whom commits wait for; nobody when empty."""
        with self.connect() as admin:
            admin.execute("SET synchronous_commit = local")
            admin.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
            admin.execute("SELECT pg_reload_conf()")

    def _replication(self, name):
        """How that standby follows: `sync`, `async`, or None while it does not stream."""
        with self.connect() as admin:
            query = "SELECT sync_state FROM pg_stat_replication WHERE application_name = %s AND state = 'streaming'"
            row = admin.execute(query, [name]).fetchone()
        return row and row[0]

    # ---------------------------------------------------------------- making one
    @property
    def log(self):
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def _initialise(self):
        password = self.folder / "password"
        self._write(password, _verifier(self._password))
        self._run(
            "initdb", "--pgdata", self.data, "--username=admin", "--auth=scram-sha-256", "--pwfile", password,
            "--encoding=UTF8", "--locale=C", "--no-sync", "--wal-segsize=4",
        )  # fmt: skip
        key, certificate = make_certificate()
        self._write(self.data / "server.key", key)
        self._write(self.data / "server.crt", certificate)
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(SETTINGS + ("ssl = on\n" if self._has_tls() else ""))
        self._open_tls()

    def _copy(self, primary):
        self._password = primary._password
        source = f"host=127.0.0.1 port={primary.port} user=admin application_name={self.folder.name}"
        self._run(
            "pg_basebackup", "--pgdata", self.data, "--dbname", source, "--write-recovery-conf", "--checkpoint=fast",
            "--no-sync", PGPASSWORD=self._password,
        )  # fmt: skip
        with (self.data / "postgresql.auto.conf").open("a") as file:
            file.write("synchronous_standby_names = ''\n")
        self._open_tls()

    def _has_tls(self):
        return bool(self._run("postgres", "-C", "ssl_library", "-D", self.data).strip())

    def _open_tls(self):
        """Tell clients whom to trust; the wheel was built without TLS, and a door speaks it in its place."""
        shutil.copyfile(self.data / "server.crt", self.certificate)
        if not self._has_tls():
            self._tls_door = TlsDoor(self.port, self.data / "server.key", self.data / "server.crt")
            self.tls_port = self._tls_door.port

    def _write(self, path, text):
        path.write_text(text)
        path.chmod(0o600)
        if self._user:
            os.chown(path, self._user["user"], self._user["group"])

    def _popen(self, program, *arguments, stdout=None, **environment):
        own = {name: value for name, value in os.environ.items() if not name.startswith("PG")} | {"LC_ALL": "C"}
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [self.binaries / program, *map(str, arguments)], **self._user, cwd=self.folder, env=own | environment,
                stdin=subprocess.DEVNULL, stdout=stdout or log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _run(self, program, *arguments, **environment):
        with self._popen(program, *arguments, stdout=subprocess.PIPE, **environment) as process:
            output = process.communicate(timeout=PATIENCE)[0].decode()
        assert process.returncode == 0, f"{program} failed: {output[-1000:]} {self.log[-2000:]}"
        return output


def _other_user():
    """PostgreSQL refuses to run as root: whom to run it as."""
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise RuntimeError("PostgreSQL does not run as root, and there is no user postgres or nobody: run as another user.")


def _verifier(password):
    """What the server keeps of a password, made with one round of hashing: thousands would slow every connection."""
    salt = secrets.token_bytes(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, iterations=1)
    client, server = (hmac.digest(salted, name, "sha256") for name in (b"Client Key", b"Server Key"))
    salt, stored, server = (base64.b64encode(part).decode() for part in (salt, hashlib.sha256(client).digest(), server))
    return f"SCRAM-SHA-256$1:{salt}${stored}:{server}"


def _free_port():
    """A port below those that the kernel hands to clients: nobody takes it while the server restarts."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as door:
            try:
                door.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


def wait_for(is_so, what):
    deadline = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < deadline, f"waited {PATIENCE:.0f} s for {what}"
        time.sleep(0.02)


def _kill_all_in(folder):
    """SIGKILL every process that works in the folder, the oldest (the postmaster) first, until none is left."""
    deadline = time.monotonic() + PATIENCE
    while found := sorted(processes_in(folder)):
        assert time.monotonic() < deadline, f"processes {found} do not die"
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.005)


def processes_in(folder):
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                    yield int(entry.name)
            except OSError:  # gone, or another user's
                continue


def _remove(folder):
    """Kill what works in the folder and remove it, with the shared memory that a killed server leaves behind."""
    _kill_all_in(folder)
    lock = folder / "data" / "postmaster.pid"
    segment = lock.read_text().split("\n")[6:7] if lock.exists() else []
    if segment and segment[0].split():
        ctypes.CDLL(None).shmctl(int(segment[0].split()[1]), 0, None)  # IPC_RMID
    shutil.rmtree(folder, ignore_errors=True)


def _watch(parent, folder):
    """Remove the server once the process that started it is gone."""
    while os.getppid() == parent:
        time.sleep(0.5)
    _remove(folder)


def main():
    if sys.argv[1:2] == ["watch"]:
        _watch(int(sys.argv[2]), Path(sys.argv[3]))
    elif find_binaries() is None:
        print(f"No PostgreSQL on this machine: installing the wheel {WHEEL} for the tests.")
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", WHEEL]
        if subprocess.run(command).returncode != 0:
            sys.exit(f"pip could not install it. {HOW_TO_GET_ONE}")


if __name__ == "__main__":
    main()
