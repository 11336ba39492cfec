"""The tests' own PostgreSQL is a real one: passwords, certificates, crashes and standbys do what they should."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from network import make_certificate
from postgres import HOW_TO_GET_ONE, VARIABLE, PostgresServer, processes_in, wait_for


def add_row(postgres, url, number=1):
    with postgres.connect(url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS numbers (number int)")
        connection.execute("INSERT INTO numbers VALUES (%s)", [number])


def rows(postgres, url):
    with postgres.connect(url) as connection:
        return sorted(row[0] for row in connection.execute("SELECT number FROM numbers"))


def ask(postgres, url, question):
    with postgres.connect(url) as connection:
        return connection.execute(question).fetchone()[0]


def test_a_fresh_database_belongs_to_a_role_with_few_rights_and_is_durable(postgres, database):
    question = "SELECT rolsuper OR rolcreaterole OR rolcreatedb FROM pg_roles WHERE rolname = current_user"
    assert ask(postgres, database, question) is False
    assert ask(postgres, database, "SHOW fsync") == ask(postgres, database, "SHOW synchronous_commit") == "on"
    other = postgres.create_database(may_create_roles=True)
    assert ask(postgres, other, "SELECT rolcreaterole FROM pg_roles WHERE rolname = current_user") is True
    postgres.drop_database(other)


@pytest.mark.parametrize("by_socket", [False, True])
def test_a_wrong_password_is_refused(postgres, database, by_socket):
    url = postgres.url(database, socket=by_socket)
    assert ask(postgres, url, "SELECT 1") == 1
    password = database.split(":")[2].partition("@")[0]
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        postgres.connect(url.replace(password, "wrong"))


def test_the_certificate_is_checked(postgres, database, tmp_path):
    url = postgres.url(database, tls=True)
    with postgres.connect(url) as connection:
        assert connection.pgconn.ssl_in_use
    another = tmp_path / "another.crt"
    another.write_text(make_certificate()[1])
    with pytest.raises(psycopg.OperationalError, match="certificate verify failed"):
        postgres.connect(url.replace(str(postgres.certificate), str(another)))


@pytest.mark.parametrize("death", ["stop", "immediate", "kill", "backend"])
def test_committed_rows_survive(postgres, database, death):
    add_row(postgres, database)
    with postgres.connect(database) as open_one:
        if death == "backend":
            postgres.kill_backend(open_one.info.backend_pid)
        elif death == "kill":
            postgres.kill()
            postgres.start()
        else:
            postgres.restart("immediate" if death == "immediate" else "fast")
        with pytest.raises(psycopg.OperationalError):
            open_one.execute("SELECT 1")
    postgres.wait_until_ready()
    assert rows(postgres, database) == [1]


def test_a_synchronous_standby_has_every_commit_when_the_primary_is_killed():
    with PostgresServer() as primary:
        url = primary.create_database()
        with primary.standby() as standby:
            for number in range(20):
                add_row(primary, url, number)
            primary.kill()
            standby.promote()
            assert rows(standby, standby.url(url)) == list(range(20))
            add_row(standby, standby.url(url), 20)  # waits for nobody


def test_a_commit_waits_for_a_synchronous_standby_and_not_for_another(postgres, database):
    add_row(postgres, database, 1)
    with postgres.standby(synchronous=False) as standby:
        standby.stop()
        add_row(postgres, database, 2)
        standby.start()
        wait_for(lambda: rows(standby, standby.url(database)) == [1, 2], "the row on the standby")
    with postgres.standby() as standby:
        standby.stop()
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        writer = subprocess.Popen(
            [sys.executable, "-c", "import sys, psycopg\nwith psycopg.connect(sys.argv[1]) as c: "
             "c.execute('INSERT INTO numbers VALUES (3)')", database]
        )  # fmt: skip
        wait_for(lambda: ask(postgres, None, waiting) == 1, "the commit to wait")
        assert rows(postgres, database) == [1, 2]
        standby.start()
        assert writer.wait(60) == 0
        assert rows(standby, standby.url(database)) == [1, 2, 3]
    add_row(postgres, database, 4)  # a closed standby is waited for no more


def test_nothing_stays_behind_when_the_tests_are_killed():
    program = "import signal, postgres; print(postgres.PostgresServer().folder, flush=True); signal.pause()"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment, text=True) as tests:
        folder = Path(tests.stdout.readline().strip())
        assert list(processes_in(folder))
        tests.send_signal(signal.SIGKILL)
    wait_for(lambda: not folder.exists(), "the server to go")
    assert not list(processes_in(folder))


def test_without_programs_the_tests_fail_and_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    with pytest.raises(AssertionError, match=HOW_TO_GET_ONE[:20]):
        PostgresServer()
