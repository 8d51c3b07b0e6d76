"""Two hosts on this one, with names and networks of their own, whose links can be cut."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = ("ip", "ss", "nsenter", "unshare")


def missing() -> str | None:
    """Why no such hosts can be made here; None if they can."""
    if not all(map(shutil.which, PROGRAMS)):
        return "needs ip, ss, nsenter and unshare: apt-get install iproute2 util-linux"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "ip", "link", "add", "near", "type", "veth"],
        capture_output=True, text=True,
    )  # fmt: skip
    if tried.returncode:
        return (
            f"needs network namespaces: run as root, which may make them ({tried.stderr.strip()})"
        )
    return None


class Started:
    """A context manager whose `__exit__` ends what `_start` began, also where that failed."""

    def _start(self):
        raise NotImplementedError

    def __exit__(self, *_):
        raise NotImplementedError

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self


class Hosts(Started):
    """Two hosts: the first has this machine's network, the second one of its own. A link of either
    name joins them, `control` for Slurm and `data` for the processes of jobs, which find each other
    by the hosts' names."""

    def __init__(self, folder: Path, names: Sequence[str] = ("n0", "n1")):
        self.names, self.folder, self._space = names, folder, f"jaxbench-{os.getpid()}"
        first = os.getpid() % 2**14 * 8  # of 198.18.0.0/15, which is there for tests (RFC 2544)
        self._addresses = {
            link: tuple(_address(first + offset + host) for host in (1, 2))
            for link, offset in (("control", 0), ("data", 4))
        }

    def _start(self) -> None:
        _ip("netns", "add", self._space)
        _ip("-n", self._space, "link", "set", "lo", "up")
        for link, addresses in self._addresses.items():
            near, far = self._ends(link)
            _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", self._space)
            for end, space, address in zip((near, far), self._spaces, addresses, strict=True):
                _ip(*space, "address", "add", f"{address}/30", "dev", end)
                _ip(*space, "link", "set", end, "up")
        data = zip(self._addresses["data"], self.names, strict=True)
        names = "".join(f"{address} {name}\n" for address, name in data)
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def __exit__(self, *_):
        # Unchecked: `_start` may have failed before it had made all of them.
        for link in self._addresses:
            subprocess.run(["ip", "link", "delete", self._ends(link)[0]], check=False)
        subprocess.run(["ip", "netns", "delete", self._space], check=False)

    @property
    def _spaces(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (), ("-n", self._space)

    def _ends(self, link: str) -> tuple[str, str]:
        return f"{link[0]}{os.getpid()}a", f"{link[0]}{os.getpid()}b"

    def control(self, name: str) -> str:
        """The address by which Slurm reaches a host."""
        return self._addresses["control"][self.names.index(name)]

    def on(self, name: str) -> list[str]:
        """Prefix of a command that runs on a host; it executes the command in its place."""
        own = ["nsenter", f"--net=/run/netns/{self._space}"] if name == self.names[1] else []
        script = f'mount --bind "{self.folder}/hosts" /etc/hosts; hostname {name}; exec "$@"'
        return [*own, "unshare", "--mount", "--uts", "sh", "-ec", script, "sh"]

    def cut(self, link: str) -> None:
        """Drops all packets of a link silently."""
        _ip("-n", self._space, "link", "set", self._ends(link)[1], "down")

    def mend(self, link: str) -> None:
        """Restores a link."""
        _ip("-n", self._space, "link", "set", self._ends(link)[1], "up")

    def reset(self, link: str) -> None:
        """Every connection is reset; new ones can be made."""
        address = self._addresses[link][1]
        command = ["ip", "netns", "exec", self._space, "ss", "--tcp", "--kill", "src", address]
        subprocess.run(command, check=True, capture_output=True)


def _address(number: int) -> str:
    return f"198.{18 + number // 2**16}.{number // 2**8 % 2**8}.{number % 2**8}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
