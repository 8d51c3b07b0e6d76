"""What another user of the cluster can try: nothing of ours is killed, overwritten or adopted.

`docs/design/security.md` has the rules. Forged messages: `tests/cluster/test_watchdog.py`.
"""

import ast
import os
import stat
import subprocess
from contextlib import ExitStack
from pathlib import Path

import jax
import pytest
from commands import ROOT
from tiny import tiny_run

import jaxbench
from jaxbench.base import files
from jaxbench.base.errors import RecipeError
from jaxbench.check import host_facts
from jaxbench.cluster import job
from jaxbench.run import prepare
from jaxbench.run.arguments import parse_arguments
from jaxbench.run.cache import program_cache

OTHER = 12345
"""The number of another user."""

needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="needs root: run the tests as root, who can give files to others"
)


def test_no_process_listens_or_signals_another_one():
    """Without a door no datagram can make us kill: not every process (-1), not a foreign one. To
    look up a name, or to try whether a port is free, opens none."""
    signals = {"kill", "killpg", "pidfd_send_signal", "pthread_kill"}
    doors = {"listen", "accept", "recv", "recv_into", "recvfrom", "recvfrom_into", "recvmsg"}
    doors |= {"create_server", "socketserver", "start_server", "create_datagram_endpoint"}
    for path in Path(jaxbench.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {a.name for a in node.names} if isinstance(node, ast.Import) else set()
            names |= {node.attr} if isinstance(node, ast.Attribute) else set()
            assert not names & (signals | doors), path


@pytest.fixture
def secret(tmp_path):
    """A private file, to which another user makes links."""
    path = tmp_path / "secret"
    path.write_text("secret")
    path.chmod(0o600)
    yield path
    assert path.read_text() == "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.fixture
def shared(tmp_path):
    """A folder into which others may write."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    return folder


def writes_whole(path):
    files.write_whole(path, "text")


def writes_json(path):
    record = files.ReservedJson(path)
    record.write({})
    record.close()


def adds_a_line(path):
    lines = files.Lines(path)
    lines.write("text")
    lines.close()


@pytest.mark.parametrize("write", [writes_whole, writes_json, adds_a_line])
@pytest.mark.parametrize("name", ["{}", "{}.tmp", ".{}.tmp", "{stem}.tmp", ".{}.reserve"])
def test_nothing_is_written_through_a_link(write, name, secret, shared):
    path = shared / "run.json"
    link = shared / name.format(path.name, stem=path.stem)
    link.symlink_to(secret)
    try:
        write(path)
    except OSError:
        assert link.is_symlink()
    else:
        assert not path.is_symlink()
        assert path.stat().st_size


def test_a_write_that_fails_leaves_nothing(tmp_path):
    (tmp_path / "run.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        files.write_whole(tmp_path / "run.json", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_the_check_of_a_file_system_writes_through_no_link(secret, shared):
    (shared / f".check-{os.uname().nodename}-{os.getpid()}").symlink_to(secret)
    assert host_facts.files(shared)["problem"].endswith("File exists")


@needs_root
@pytest.mark.parametrize("linked", [False, True])
def test_a_run_folder_of_another_user_is_refused(linked, shared, monkeypatch):
    folder = shared / "run"
    if linked:  # to a folder of this user
        (shared / "own").mkdir()
        folder.symlink_to(shared / "own")
    else:
        folder.mkdir()
    os.chown(folder, OTHER, OTHER, follow_symlinks=False)
    args = parse_arguments(["--config", "x", "--output", str(folder)])
    monkeypatch.setattr(job, "broadcast", lambda name, make: make())
    with pytest.raises(RecipeError, match=f"--output {folder}: it belongs to user {OTHER}; name"):
        prepare.prepare(tiny_run(), args, ExitStack())


@needs_root
@pytest.mark.parametrize("kind", ["own", "new", "foreign", "foreign link"])
def test_a_job_does_not_begin_in_a_folder_of_another_user(kind, shared):
    """The head of the batch script: a job's number can be guessed, and its folder made before."""
    script = (ROOT / "launch/slurm.sbatch").read_text()
    begin, end = script.index("# Another user may have made"), script.index("if ! reason=")
    folder = shared / "its 7"
    if kind == "foreign link":
        (shared / "own").mkdir()
        folder.symlink_to(shared / "own")
    elif kind != "new":
        folder.mkdir()
    if kind.startswith("foreign"):
        os.chown(folder, OTHER, OTHER, follow_symlinks=False)
    head = f"umask g-w,o-w\nlast_words() {{ echo \"$1\"; }}\nfolder='{folder}'\n"
    done = subprocess.run(["bash", "-uc", head + script[begin:end]], capture_output=True, text=True)
    refused = f"failed: {folder} belongs to another user\n"
    assert (done.returncode, done.stdout) == ((5, refused) if "foreign" in kind else (0, ""))
    assert list(folder.iterdir()) == []


@pytest.fixture
def compiled(tmp_path):
    """Compiles a program with a cache: (whether it was cached, files in the cache, what was
    said)."""

    def compiles(folder, **identity):
        said = []
        with program_cache(folder, identity, said.append) as cached:
            jax.jit(lambda x: 3 * x).lower(1.0).compile()
        kept = list(folder.rglob("*-cache")) if folder.is_dir() else []
        return cached.program, kept, said

    return compiles


def test_a_cache_is_private_and_is_used_again(compiled, tmp_path):
    folder = tmp_path / "a" / "cache"
    cached, kept, said = compiled(folder)
    assert (cached, len(kept), said) == (False, 1, [])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert compiled(folder) == (True, kept, [])
    link = tmp_path / "own"
    link.symlink_to(folder)
    assert compiled(link)[0]
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if fd.resolve() == folder]


def foreign_folder(folder):
    folder.mkdir(mode=0o700)
    os.chown(folder, OTHER, OTHER)


def foreign_link(folder):
    own = folder.with_name("own")
    own.mkdir(mode=0o700)
    folder.symlink_to(own)
    os.chown(folder, OTHER, OTHER, follow_symlinks=False)


def own_link_to_a_foreign_folder(folder):
    foreign_folder(folder.with_name("theirs"))
    folder.symlink_to(folder.with_name("theirs"))


def writable(mode):
    def make(folder):
        folder.mkdir()
        folder.chmod(mode)

    return make


def a_file(folder):
    folder.write_text("")


def below_a_file(folder):
    folder.symlink_to(folder.with_name("none") / "none")


def a_loop(folder):
    folder.symlink_to(folder)


CACHES = {
    "foreign": (foreign_folder, f"it belongs to user {OTHER}"),
    "foreign link": (foreign_link, f"it belongs to user {OTHER}"),
    "own link": (own_link_to_a_foreign_folder, f"it belongs to user {OTHER}"),
    "group": (writable(0o770), "others may write into it (mode 770)"),
    "all": (writable(0o1777), "others may write into it (mode 777)"),
    "file": (a_file, "File exists"),
    "link to nothing": (below_a_file, "File exists"),
    "loop": (a_loop, "File exists"),
}


@needs_root
@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_that_others_can_change_costs_time_and_not_the_run(kind, compiled, tmp_path):
    make, reason = CACHES[kind]
    folder = tmp_path / "cache"
    make(folder)
    cached, kept, said = compiled(folder)
    assert (cached, kept) == (False, [])
    (warning,) = said
    assert warning.startswith(
        f"warning: {folder} cannot be this user's compilation cache: {reason}; "
    )


def test_a_cache_that_another_process_cannot_use_is_used_by_none(compiled, tmp_path, monkeypatch):
    theirs = (False, "cache cannot be this user's compilation cache: Permission denied")
    monkeypatch.setattr(job, "all_gather", lambda name, value: [value, theirs])
    cached, kept, (warning,) = compiled(tmp_path / "cache")
    assert (cached, kept) == (False, [])
    assert "Permission denied" in warning


def test_a_cache_that_is_exchanged_meanwhile_is_not_adopted(tmp_path):
    folder = tmp_path / "cache"
    with files.private(folder) as own:
        folder.rename(tmp_path / "away")
        folder.mkdir()
        (own / "x").write_text("")
    assert [path.name for path in (tmp_path / "away").iterdir()] == ["x"]
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "empty", "foreign", "a folder"])
def test_a_damaged_program_is_compiled_anew(damage, compiled, tmp_path):
    _, (program,), _ = compiled(tmp_path / "cache")
    content = program.read_bytes()
    program.unlink()
    if damage == "a folder":
        program.mkdir()
    else:
        program.write_bytes({"cut": content[:100], "empty": b"", "foreign": b"x" * 500}[damage])
    with pytest.warns(UserWarning, match="persistent compilation cache"):
        assert compiled(tmp_path / "cache")[0]
