"""A file system of a given size, in a mount namespace of its own."""

import shutil
import subprocess

import pytest

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]


def needs_small_disk(test):
    """Skips a test where such a file system cannot be had."""
    allowed = shutil.which("unshare") is not None and not (
        subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode
    )
    return pytest.mark.skipif(
        not allowed,
        reason="needs user namespaces: unshare of util-linux, where the kernel allows it",
    )(test)


def run_on_disk(folder, kib, command, cwd):
    """(exit status, standard output and error, a copy of what was left) of a command that writes to
    `<folder>/disk`, `kib` KiB large."""
    disk, left = folder / "disk", folder / "left"
    disk.mkdir()
    script = (
        f'mount -t tmpfs -o size={kib}k none {disk} && {{ "$@"; status=$?; cp -r {disk} {left}; '
        "exit $status; }"
    )
    done = subprocess.run(
        [*NAMESPACE, "sh", "-c", script, "sh", *map(str, command)],
        cwd=cwd, check=False, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr, left
