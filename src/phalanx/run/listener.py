"""Listen on a TCP port: at one address of either family, or on all addresses of this machine."""

import socket


def open_listener(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Return a socket that listens at `host`, an address or a name; "" means all addresses, IPv4 and IPv6.

    A name that has addresses of both families is listened to at the IPv4 address.

    Raises:
        OSError: the name leads nowhere, or the port is taken.
    """
    if not host:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        return socket.create_server(("", port), family=family, backlog=backlog, dualstack_ipv6=dual)
    family, address = resolve_address(host)
    return socket.create_server((address, port), family=family, backlog=backlog)


def reserve_port() -> socket.socket:
    """Return a socket that reserves a free loopback port until it is closed. The system gives the port to no other
    process, and a process that gets the port can listen there with `open_listener`."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", 0))
    return sock


def resolve_address(host: str) -> tuple[socket.AddressFamily, str]:
    """Return the family and the address that a name leads to, IPv4 where it has one. OSError if it leads nowhere."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    return family, str(address[0])
