"""Servers over the curator's small workspaces."""

import copy
import shutil
from contextlib import ExitStack

import pytest

from curator.conftest import make, no_keys_around, no_notes, template
from curator.deployments import ScriptedEngine, set_mechanism, without_notes
from curator.dp_deployments import with_dp_adapter
from paclm import Workspace
from paclm.engine.adapters import AdapterStack
from paclm.engine.loading import open_engine
from paclm.server.database import service_path
from paclm.worlds.layout import DP_FILE
from server.live import CHAT_TEMPLATE, serve, serve_student
from server.stepped import SteppedEngine
from worlds.students import make_student

__all__ = ["make", "no_keys_around", "no_notes", "template"]


@pytest.fixture
def start(make, small_tokenizer):
    """Start a server with these settings in [mechanism]; `engine`, `tokenizer` and what `serve` takes can be given."""
    with ExitStack() as servers:

        def start(**options):
            engine = options.pop("engine", None) or ScriptedEngine()
            tokenizer = options.pop("tokenizer", small_tokenizer)
            names = ("settings", "is_loopback", "quota", "unit", "has_ward")
            serving = {name: options.pop(name) for name in names if name in options}
            return servers.enter_context(serve(make(**options), engine, tokenizer, **serving))

        yield start


@pytest.fixture(scope="session")
def dp_template(template, tmp_path_factory):
    """A workspace with an adapter for the promise `corpus`, and no budget."""
    folder = tmp_path_factory.mktemp("dp") / "clinic"
    shutil.copytree(template, folder)
    set_mechanism(folder, support_size=40)
    with without_notes():
        return with_dp_adapter(Workspace.open(folder)).path


def open_dp_engine(path):
    stack = AdapterStack.load(path / "adapters" / DP_FILE).as_public()
    return open_engine(Workspace.open(path), 40, stack=stack)


@pytest.fixture(scope="session")
def dp_engine(dp_template):
    """One engine for all tests that start a server of their own: it keeps nothing between sequences."""
    return open_dp_engine(dp_template)


@pytest.fixture
def start_corpus(tmp_path, dp_template, dp_engine, chat_tokenizer):
    """Start a server under the promise `corpus`, over a fresh copy or the workspace given."""
    with ExitStack() as servers:

        def start_corpus(workspace=None, **options):
            if workspace is None:
                workspace = Workspace.open(shutil.copytree(dp_template, tmp_path / "clinic"))
            dp_engine.clear()
            tokenizer = options.pop("tokenizer", chat_tokenizer)
            return servers.enter_context(serve(workspace, dp_engine, tokenizer, promise="corpus", **options))

        yield start_corpus


@pytest.fixture(scope="session")
def corpus(dp_template, chat_tokenizer, tmp_path_factory):
    """One server under the promise `corpus` for tests that leave it as they found it; with an engine of its own."""
    workspace = Workspace.open(shutil.copytree(dp_template, tmp_path_factory.mktemp("corpus") / "clinic"))
    with serve(workspace, open_dp_engine(dp_template), chat_tokenizer, promise="corpus") as live:
        yield live


@pytest.fixture(scope="session", params=["half", "corpus"])
def student(request, small_base, chat_tokenizer, tmp_path_factory):
    """A server of a small student of each promise, for tests that leave it as they found it."""
    folder = tmp_path_factory.mktemp("student") / "clinic"
    with serve_student(make_student(folder, small_base, request.param), str(small_base), chat_tokenizer) as live:
        yield live


@pytest.fixture
def engine():
    engine = SteppedEngine(num_slots=2, dissent=0.0)
    yield engine
    engine.run_free()


@pytest.fixture
def path(tmp_path):
    """Path of the service database, in a folder that is closed to others."""
    place = service_path(tmp_path)
    place.parent.mkdir(mode=0o700)
    return place


@pytest.fixture(params=["file", "postgres"])
def books(request):
    """Address of a service database of either kind: a path, or the URL of a database."""
    return request.getfixturevalue({"file": "path", "postgres": "database"}[request.param])


@pytest.fixture
def roles(postgres):
    """A database whose owner may create roles: the curator makes a login for the front."""
    url = postgres.create_database(may_create_roles=True)
    yield url
    if not postgres.is_running:
        postgres.start()
    postgres.drop_database(url)


@pytest.fixture
def live(start):
    return start()


@pytest.fixture(scope="session")
def shared(template, tmp_path_factory, small_tokenizer):
    """One server for tests with many cases that leave it as they found it: starting and ending one takes a while."""
    folder = tmp_path_factory.mktemp("shared") / "clinic"
    shutil.copytree(template, folder)
    set_mechanism(folder, per_token="2^-16", total="2^-4", support_size=40)
    with pytest.MonkeyPatch.context() as environment:
        for name in ("PACLM_KEY", "PACLM_KEY_FILE", "PACLM_KEY_COMMAND", "PACLM_WITNESS"):
            environment.delenv(name, raising=False)
        server = serve(Workspace.open(folder), ScriptedEngine(), small_tokenizer)
        with server as live:
            environment.undo()
            yield live


@pytest.fixture(scope="session")
def chat_tokenizer(small_tokenizer):
    tokenizer = copy.deepcopy(small_tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
