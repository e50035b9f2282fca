"""Two "hosts" on one machine: network namespaces with an address, a host name and process numbers of their own."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Host:
    """Where a command runs."""

    name: str
    address: str
    interface: str
    words: tuple[str, ...] = ()
    """In front of the command."""

    @property
    def environment(self) -> dict[str, str]:
        """What gloo needs to know."""
        return {"GLOO_SOCKET_IFNAME": self.interface}


LOOPBACK = tuple(Host(name, "127.0.0.1", "lo") for name in ("one", "two"))
"""Where namespaces may not be made: two agents that share everything but their processes."""


_ALONE = ("unshare", "--uts", "--pid", "--mount", "--fork", "--mount-proc")


def can_make_hosts() -> bool:
    """Whether this user may make namespaces."""
    name = f"hx{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("netns", "exec", name, *_ALONE, "hostname", name)
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return True


@contextmanager
def two_hosts() -> Iterator[tuple[Host, ...]]:
    """Two hosts joined by a cable, gone with the block."""
    own = os.getpid() % 100000
    names, cables = (f"hx{own}a", f"hx{own}b"), (f"va{own}", f"vb{own}")
    hosts = []
    table = Path(tempfile.mkdtemp()) / "hosts"
    table.write_text("127.0.0.1 localhost\n" + "".join(f"10.77.0.{i} {name}\n" for i, name in enumerate(names, 1)))
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", cables[0], "netns", names[0], "type", "veth", "peer", "name", cables[1], "netns", names[1])
        for number, (name, cable) in enumerate(zip(names, cables, strict=True), 1):
            address = f"10.77.0.{number}"
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            for link in ("lo", cable):
                _ip("-n", name, "link", "set", link, "up")
            words = ["ip", "netns", "exec", name, *_ALONE, "--kill-child"]
            words += ["sh", "-c", f'hostname {name} && mount --bind {table} /etc/hosts && exec "$@"', "sh"]
            hosts.append(Host(name, address, cable, tuple(words)))
        yield tuple(hosts)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
        table.unlink()
        table.parent.rmdir()


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
