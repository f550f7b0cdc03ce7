"""Check the address of a service, and find its user and password: in the environment, or in a private file in the form
of .netrc. They are never taken from the command line or an address, which other users of the machine and logs see.
"""

import netrc
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from phalanx.errors import UsageError


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user of a service."""

    user: str
    password: str = field(repr=False)


def parse_service_url(service: str, url: str, schemes: tuple[str, str]) -> SplitResult:
    """Split an address. `schemes`: the one with TLS, and the one without.

    Raises:
        UsageError: it is no address of these schemes, or holds a password.
    """
    address = urlsplit(url)
    if "@" in address.netloc:
        raise UsageError(
            f"{service.lower()}: url: user and password do not belong into an address; use PHALANX_{service}_USER and "
            f"PHALANX_{service}_PASSWORD, or credentials_file"
        )
    try:
        is_address = address.scheme in schemes and bool(address.hostname) and address.port != 0
    except ValueError:  # a port that is none
        is_address = False
    if not is_address:
        example = f"{schemes[0]}://host.example.com"
        raise UsageError(f"{service.lower()}: url: expected an address such as {example}, found {url!r}")
    return address


def find_credentials(
    service: str, host: str, file: Path | None, environment: Mapping[str, str] = os.environ
) -> Credentials | None:
    """Find the credentials for `host`.

    Args:
        service: `REDFISH` or `MQTT`: the variables are PHALANX_REDFISH_USER and PHALANX_REDFISH_PASSWORD.
        file: a file in the form of .netrc that only its owner may read; it comes before the environment.

    Returns:
        None where neither has any.

    Raises:
        UsageError: the file cannot be read, others may read it, or half of the credentials is missing.
    """
    if file is not None and (found := _read_private_netrc(file, host)) is not None:
        return found
    names = (f"PHALANX_{service}_USER", f"PHALANX_{service}_PASSWORD")
    user, password = map(environment.get, names)
    if user is None and password is None:
        return None
    if user is None or password is None:
        missing = names[0] if user is None else names[1]
        raise UsageError(f"{missing} is not set, and {' and '.join(names)} belong together")
    return Credentials(user, password)


def check_ca_file(service: str, file: Path | None) -> None:
    """Refuse a file of certificates that is not there: libraries say of it only that there is no such file."""
    if file is not None and not file.is_file():
        raise UsageError(f"{service.lower()}: ca_file: there is no file {file}")


def _read_private_netrc(file: Path, host: str) -> Credentials | None:
    try:
        mode = file.stat().st_mode
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(f"{file}: other users may read it; run: chmod 600 {file}")
        found = netrc.netrc(file).authenticators(host)
    except netrc.NetrcParseError as error:  # its text has words of the file, which may be a password
        raise UsageError(f"{file}, line {error.lineno}: expected `machine HOST login USER password PASSWORD`") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UsageError(f"{file}: cannot be read: {reason}") from None
    return None if found is None else Credentials(found[0], found[2] or "")
