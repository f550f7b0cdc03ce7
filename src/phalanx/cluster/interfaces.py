"""Which network interfaces the libraries are told to use, and whether this machine has them."""

from collections.abc import Collection, Iterator, Mapping

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def missing(environ: Mapping[str, str], names: Collection[str]) -> Iterator[str]:
    """What of these variables this machine, which has interfaces with these names, cannot satisfy, in words."""
    for variable in VARIABLES:
        wanted = environ.get(variable)
        if wanted and not _matches(variable, wanted, names):
            yield f"{variable}={wanted}, and there is no such interface ({', '.join(sorted(names))})"


def _matches(variable: str, wanted: str, names: Collection[str]) -> bool:
    """Gloo takes names, and wants all of them; NCCL takes prefixes: "=" before them means whole names, "^" all
    others."""
    parts = [part for part in wanted.lstrip("=^").split(",") if part]
    if variable.startswith("GLOO"):
        return all(part in names for part in wanted.split(","))
    if wanted.startswith("="):
        return any(part in names for part in parts)
    return wanted.startswith("^") or any(name.startswith(part) for part in parts for name in names)
