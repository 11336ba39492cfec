"""Where workers may meet: on this machine, or in a network that the operator named."""

import pytest

from paclm.config import WorkersConfig
from paclm.engine.rendezvous import Rendezvous, check_workers, find_rendezvous
from paclm.errors import InvalidInput

PRIVATE = ("10.8.0.0/24", "fd00:8::/64")


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("127.0.0.1:29500", ("127.0.0.1", 29500)),
        ("127.9.9.9:0", ("127.9.9.9", 0)),
        ("[::1]:7", ("::1", 7)),
        ("10.8.0.255:29500", ("10.8.0.255", 29500)),
        ("[fd00:8::5]:29500", ("fd00:8::5", 29500)),
    ],
)
def test_loopback_and_private_networks_are_let_through(address, found):
    where = find_rendezvous(address, PRIVATE)
    assert where == found
    assert str(where) == address


@pytest.mark.parametrize("address", ["10.8.1.0:29500", "192.168.0.1:29500", "8.8.8.8:1", "[fd00:9::5]:29500"])
def test_other_addresses_need_the_flag(address):
    with pytest.raises(InvalidInput, match="unencrypted"):
        find_rendezvous(address, PRIVATE)
    assert isinstance(find_rendezvous(address, PRIVATE, is_insecure=True), Rendezvous)


@pytest.mark.parametrize("address", ["0.0.0.0:29500", "[::]:29500", "10.8.0.1", ":29500", "10.8.0.1:x", "a:70000"])
def test_what_is_no_address_of_one_machine_is_refused_with_the_flag_too(address):
    with pytest.raises(InvalidInput, match="--rendezvous"):
        find_rendezvous(address, PRIVATE, is_insecure=True)


@pytest.mark.parametrize("settings", [{"private_networks": ["10.8.0.1/24"]}, {"timeout_seconds": 0.5}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(InvalidInput):
        WorkersConfig(**settings)


@pytest.mark.parametrize("count", [0, 9])
def test_every_worker_has_a_world(count):
    check_workers(8, 8)
    with pytest.raises(InvalidInput, match="8 worlds"):
        check_workers(count, 8)
