"""Check that the network interfaces that gloo and NCCL are configured to use exist on this machine."""

from collections.abc import Collection, Iterator, Mapping

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def find_missing_interfaces(environ: Mapping[str, str], interface_names: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each variable that names an interface which this machine does not have."""
    for variable in INTERFACE_VARIABLES:
        value = environ.get(variable)
        if value and not _matches_interface(variable, value, interface_names):
            yield f"{variable}={value}, and there is no such interface ({', '.join(sorted(interface_names))})"


def _matches_interface(variable: str, value: str, names: Collection[str]) -> bool:
    """Match as the libraries do: gloo needs all names to exist; NCCL matches prefixes, "=" full names, "^" excludes."""
    parts = [part for part in value.lstrip("=^").split(",") if part]
    if variable.startswith("GLOO"):
        return all(part in names for part in value.split(","))
    if value.startswith("="):
        return any(part in names for part in parts)
    return value.startswith("^") or any(name.startswith(part) for part in parts for name in names)
