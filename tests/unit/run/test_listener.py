"""Listening at addresses of both families."""

import socket

import pytest

from phalanx.run.authentication import open_listener, reserve_port, resolve_address


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_an_address_of_either_family_is_listened_to(host: str, family: socket.AddressFamily) -> None:
    if family == socket.AF_INET6 and not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    with open_listener(host, 0) as listener:
        assert listener.family == family
        socket.create_connection((host, listener.getsockname()[1]), timeout=10).close()


def test_all_addresses_are_those_of_both_families() -> None:
    with open_listener("", 0) as listener:
        for host in ("127.0.0.1", *(["::1"] if socket.has_dualstack_ipv6() else [])):
            socket.create_connection((host, listener.getsockname()[1]), timeout=10).close()


def test_a_name_without_an_ipv4_address_has_its_ipv6_address(monkeypatch: pytest.MonkeyPatch) -> None:
    six = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::1", 0, 0, 0))
    four = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 0))
    answers = iter([[six], [six, four]])
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: next(answers))
    assert resolve_address("node-1") == (socket.AF_INET6, "fd00::1")
    assert resolve_address("node-1") == (socket.AF_INET, "10.0.0.1")


def test_a_reserved_port_is_not_given_away_and_can_be_listened_on_again_and_again() -> None:
    with reserve_port() as reserved:
        address = reserved.getsockname()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(address)
        for _ in range(2):
            with open_listener(*address):
                socket.create_connection(address, timeout=10).close()
