"""Which names of this machine a request may ask for (its Host), and which addresses are only this machine's.

A page in a browser can have its own domain resolve to 127.0.0.1 and then talk to a server there (DNS rebinding); the
Host of such a request is that domain. So a server on loopback answers to the names of loopback alone, unless more are
allowed.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

from ggml_engine.errors import OptionError

_HOST: Final = re.compile(r"(\[[0-9a-f:.]{2,45}\]|[a-z0-9_.-]{1,253})(:[0-9]{1,5})?", re.ASCII)
LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "[::1]")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens at `host`."""
    address = _address(host)
    return host.lower() == "localhost" or (address is not None and address.is_loopback)


class HostRule:
    """Says whether a Host header is one of ours.

    `has_keys`: a server that others may reach answers to any name when a key is needed (a page of a stranger has none);
    without one to addresses and `localhost` alone, since rebinding needs a name.
    """

    def __init__(self, listens_at: str, allowed_hosts: Iterable[str], *, has_keys: bool) -> None:
        self._names = {host.lower() for host in (*LOOPBACK_NAMES, *allowed_hosts)}
        for name in self._names:
            if not (match := _HOST.fullmatch(name)) or match[2]:
                raise OptionError(f"allowed_hosts takes names and addresses without a port, one is {name!r}")
        public = not is_loopback(listens_at)
        named = bool(tuple(allowed_hosts))
        if public:
            self._names.add(f"[{listens_at}]" if ":" in listens_at else listens_at.lower())
        self._takes_any = public and has_keys and not named
        self._takes_addresses = public and not named

    def allows(self, header: str | None) -> bool:
        """Whether to answer a request with this Host header; None where it has none."""
        if header is None or not (match := _HOST.fullmatch(header.lower())):
            return False
        host = match[1]
        return host in self._names or self._takes_any or (self._takes_addresses and _address(host) is not None)
