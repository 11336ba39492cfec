"""Messages between rank 0 and a worker: both ends in one process, over a real Gloo pair."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes
from hypothesis.extra.numpy import arrays as np_arrays

from paclm.engine.wire import (
    _DTYPES,
    _HEADER,
    FRAME,
    Order,
    WireBroken,
    _unpacked,
    accept,
    check_count,
    find_store,
    join,
    packed,
    serve_store,
)
from paclm.errors import InvalidInput


@pytest.fixture
def pair():
    """Rank 0's end and the worker's."""
    store, port = serve_store("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        worker = pool.submit(lambda: join(find_store("127.0.0.1", port, 20.0), 1, "127.0.0.1"))
        rank_0 = accept(store, 1, 1, "127.0.0.1")
        yield rank_0, worker.result()


def arrays():
    """Every type and odd sizes, so that what follows an array would be misaligned without padding."""
    generator = np.random.default_rng(0)
    names = ("uint8", "int32", "int64", "float32", "float64", "bool", "uint16")
    odd = [generator.integers(0, 2, (3, 1 + number)).astype(name) for number, name in enumerate(names)]
    return [*odd, np.zeros((0, 5), dtype=np.float32), generator.random((4, 6))[:, ::2], np.array(7)]


def assert_same(message, kind, number, sent):
    assert (message.kind, message.number) == (kind, number)
    assert len(message.arrays) == len(sent)
    for found, array in zip(message.arrays, sent, strict=True):
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert np.array_equal(found, array)


def test_messages_arrive_as_they_were_sent_in_both_directions(pair):
    rank_0, worker = pair
    rank_0.send(Order.STEP, 1, arrays(), 20.0)
    assert_same(worker.receive(20.0), Order.STEP, 1, arrays())
    worker.send(Order.ANSWER, 1, (), 20.0)
    assert_same(rank_0.receive(20.0), Order.ANSWER, 1, [])


@pytest.mark.parametrize("size", [FRAME - 64, FRAME - 56, FRAME - 48, FRAME, FRAME + 1, 3 * FRAME])
def test_messages_around_and_above_a_frame_arrive_whole(pair, size):
    rank_0, worker = pair
    whole = [np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)]
    rank_0.post(packed(Order.ADAPTERS, 1, whole), 20.0)
    rank_0.post(packed(Order.STEP, 2, []), 20.0)
    assert_same(worker.receive(20.0), Order.ADAPTERS, 1, whole)
    assert_same(worker.receive(20.0), Order.STEP, 2, [])


def test_a_short_message_after_a_long_one_has_nothing_of_it(pair):
    rank_0, worker = pair
    for number, values in enumerate((np.full(9999, 5), np.full(3, 8), np.full(0, 1)), 1):
        rank_0.send(Order.STEP, number, [values], 20.0)
        assert_same(worker.receive(20.0), Order.STEP, number, [values])


def test_arrays_of_a_message_outlive_the_next_one(pair):
    rank_0, worker = pair
    rank_0.send(Order.STEP, 1, [np.full(100, 1)], 20.0)
    first = worker.receive(20.0)
    rank_0.send(Order.STEP, 2, [np.full(100, 2)], 20.0)
    worker.receive(20.0)
    assert (first.arrays[0] == 1).all()


@pytest.mark.parametrize("place", [1, 2, 3, 4, 5, 6, 7])
def test_what_is_no_message_ends_the_connection(pair, place):
    rank_0, worker = pair
    message = packed(Order.STEP, 1, [np.arange(3)])
    message.numpy().view(np.int64)[place] = -(2**40) if place != 7 else 2**50
    rank_0.post(message, 20.0)
    with pytest.raises(WireBroken, match="no message"):
        worker.receive(20.0)


def test_silence_and_a_lost_peer_are_errors(pair):
    rank_0, worker = pair
    with pytest.raises(WireBroken):
        rank_0.receive(0.2)
    with pytest.raises(WireBroken):  # the pair is closed for both
        worker.receive(20.0)


def test_whatever_is_packed_is_unpacked(pair):
    """Any types and shapes, also empty ones and more than a frame, through one connection."""
    rank_0, worker = pair
    shapes = array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=12)

    @given(st.lists(st.sampled_from(_DTYPES).flatmap(lambda dtype: np_arrays(dtype, shapes)), max_size=4))
    def check(sent):
        rank_0.send(Order.ANSWER, 3, sent, 20.0)
        message = worker.receive(20.0)
        assert [found.tobytes() for found in message.arrays] == [array.tobytes() for array in sent]
        assert [found.shape for found in message.arrays] == [array.shape for array in sent]
        assert [found.dtype for found in message.arrays] == [array.dtype for array in sent]

    check()


@given(
    st.one_of(st.binary(max_size=200), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20)),
    st.integers(0, 5),
)
def test_garbage_is_a_broken_wire_and_nothing_else(garbage, count):
    body = garbage if isinstance(garbage, bytes) else np.array(garbage, dtype=np.int64).tobytes()
    with contextlib.suppress(WireBroken):
        found = _unpacked(np.frombuffer(body, dtype=np.uint8), count)
        assert sum(array.nbytes for array in found) <= len(body), "no more than was sent"


@given(st.data())
def test_a_message_with_a_changed_number_in_its_head_is_whole_or_refused(data):
    body = packed(Order.STEP, 1, [np.arange(3), np.zeros((2, 0), dtype=np.uint16)]).numpy()[8 * _HEADER :].copy()
    numbers = body[: 8 * 7].view(np.int64)
    numbers[data.draw(st.integers(0, 6))] = data.draw(st.integers(-(2**63), 2**63 - 1) | st.integers(-8, 64))
    with contextlib.suppress(WireBroken):
        found = _unpacked(body, 2)
        assert sum(array.nbytes for array in found) <= len(body)


def test_a_worker_started_for_another_number_of_workers_does_not_join():
    _served, port = serve_store("127.0.0.1", workers=2)
    found = find_store("127.0.0.1", port, 20.0)
    check_count(found, 2)
    with pytest.raises(InvalidInput, match="--workers 2"):
        check_count(found, 3)
