"""What all tests share. Property tests are derandomised: a failure is the same failure for everyone."""

import gc
import os
import random
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported, for tests and the commands they start: models this small want one thread, and with one sums
# are taken in the same order on every machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Servers that tests start are on this machine: a proxy that the user has set knows nothing of them.
os.environ.update(NO_PROXY="127.0.0.1,localhost", no_proxy="127.0.0.1,localhost")
# The user's own settings of PostgreSQL's clients (PGSSLMODE, PGOPTIONS, …) are nothing to the tests' servers.
for name in [name for name in os.environ if name.startswith("PG")]:
    del os.environ[name]
# TLS, where no address asks for it, doubles the time of every connection.
os.environ.update(PGSSLMODE="disable", PGGSSENCMODE="disable")

# What is imported stays: the garbage collector need not look through it again and again, nor after every 700 objects.
gc.disable()
gc.set_threshold(50_000, 20, 20)

settings.register_profile("paclm", deadline=None, derandomize=True, max_examples=60, print_blob=True)
settings.load_profile("paclm")


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


num_frozen = len(sys.modules)


def pytest_runtest_logfinish():
    """Libraries that a test was the first to import stay too: engines that are freed collect garbage each time."""
    global num_frozen
    if len(sys.modules) > num_frozen + 100:
        gc.collect()
        gc.freeze()
        num_frozen = len(sys.modules)


@pytest.fixture
def vote_files():
    """Votes of 128 worlds at 32,768 positions of real text, by decoder."""
    folder = Path(__file__).parent / "fixtures" / "votes"
    return {name: folder / f"wikipedia-{name}.npz" for name in ("greedy", "gumbel")}


@pytest.fixture(autouse=True, scope="session")
def ctrl_c_raises():
    """A shell starts what runs in the background with SIGINT ignored; tests that press Ctrl-C would wait in vain."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def own_folders(tmp_path_factory):
    """No test reads or writes the user's own cache and state."""
    folder = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACLM_CACHE_DIR", str(folder / "cache"))
        patch.setenv("PACLM_STATE_DIR", str(folder / "state"))
        yield


@pytest.fixture(autouse=True)
def own_state(tmp_path):
    """Tests share workspaces made once; what one of them had on record is nothing to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACLM_STATE_DIR", str(tmp_path / ".state"))
        yield


@pytest.fixture(scope="session")
def postgres():
    """A PostgreSQL server, one for all tests of this process."""
    from postgres import PostgresServer

    with PostgresServer() as server:
        yield server


@pytest.fixture
def database(postgres):
    """The URL of a fresh, empty database that a role of its own owns. A test may stop or kill the server below it."""
    url = postgres.create_database()
    yield url
    if not postgres.is_running:
        postgres.start()
    postgres.drop_database(url)


WORDS = (
    "the of and to in was for that with from not one all time other two new work year day way long good life same "
    "house last part water place hand small old three back home name side end head city land night school light "
    "patient reports mild fever cough since morning blood pressure normal plan rest fluids review week clinic nurse"
)


def make_texts(count, seed=0):
    """Texts of everyday words, all different."""
    draw = random.Random(seed)
    return [
        " ".join(draw.choices(WORDS.split(), k=draw.randint(8, 40))) + f" no {seed}-{number}."
        for number in range(count)
    ]


@pytest.fixture(scope="session")
def texts():
    return make_texts(200)


@pytest.fixture(scope="session")
def small_base(tmp_path_factory):
    """A random GPT-2 with its own byte-level tokenizer, in a folder as the hub has them."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("small-base")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(make_texts(300, seed=1), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", pad_token="<|end|>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=4)
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def small_tokenizer(small_base):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(small_base)
