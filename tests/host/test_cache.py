"""The cache directory: whose files are loaded, what is removed, what happens without it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from importlib import util
from pathlib import Path

import pytest

from cupykern import cache, cli
from cupykern.kernels import Variant
from cupykern.runtime import store
from cupykern.targets import CompileError, host, host_compiler
from cupykern.tools import doctor
from cupykern.tuning import protocol

ANOTHER_USER = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")

CALL = """
import numpy as np
from cupykern.targets import host
from cupykern.kernels import Variant

def call(value):
    text = f"KERNEL void store_value(float* x) {{ x[0] = {value}; }}"
    x = np.zeros(1, np.float32)
    host.current().compile(Variant("store_value", (), (), 32, text=text))(1, (x,))
    print(x[0])

"""


def run_python(code: str, **environment: str) -> tuple[str, str]:
    """What a process that ends well writes to stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.strip()


def call(value: int, **environment: str) -> str:
    """Check what a kernel stores, in a process that has loaded nothing; returns its warnings."""
    out, err = run_python(f"{CALL}call({value})", **environment)
    assert out == f"{value}.0"
    return err


@pytest.fixture(scope="module")
def filled(tmp_path_factory) -> Path:
    """A cache with the runtime and one kernel."""
    found = tmp_path_factory.mktemp("filled") / "cache"
    call(1, CUPYKERN_CACHE_DIR=str(found))
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The cache directory, which does not exist yet.  Temporary files go beside it."""
    found = tmp_path / "cache"
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("CUPYKERN_CACHE_DIR", str(found))
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr("tempfile.tempdir", None)
    return found


@pytest.fixture
def full(folder, filled) -> Path:
    """The cache directory, with the runtime and one kernel."""
    shutil.copytree(filled, folder)
    return folder


def kernels(place: Path) -> set[Path]:
    return set(place.rglob("*.so"))


def compile_one(place: Path, value: int) -> Path:
    """The file of a new kernel."""
    before = kernels(place)
    assert not call(value)
    (made,) = kernels(place) - before
    return made


# --- whose files are loaded ----------------------------------------------------------------------


def test_directories_and_files_are_the_users_alone(folder):
    put = "from cupykern.runtime import store; store.put({})"
    code = f"{CALL}import os; os.umask(0); call(1); {put}"
    run_python(code, CUPYKERN_CACHE_DIR=str(folder / "a" / "b"))
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in folder.rglob("*")}
    directories = {path for path in modes if path.is_dir()}
    assert {path.name for path in directories} == {"a", "b", "host"}
    assert {modes[path] for path in directories} == {0o700}
    assert len(kernels(folder)) == 2
    for path in modes.keys() - directories - set(folder.rglob("*.lock")):
        assert modes[path] & 0o022 == 0, path


def check_not_used(folder: Path, named: str) -> None:
    """Calls are right, warn once, naming the path, and neither read nor write `folder`."""
    before = {path: path.read_bytes() for path in kernels(folder)}
    maps = f"print([line for line in open('/proc/self/maps') if {str(folder)!r} in line])"
    out, err = run_python(f"{CALL}call(1)\ncall(2)\n{maps}")
    assert out.split() == ["1.0", "2.0", "[]"]
    assert err.count("RuntimeWarning") == 1 and named in err
    assert {path: path.read_bytes() for path in kernels(folder)} == before
    assert not list(Path(os.environ["TMPDIR"]).iterdir())  # the private directory is gone


@pytest.mark.parametrize(("place", "mode"), [("", 0o720), ("host", 0o702)])
def test_a_directory_that_others_can_write_is_not_used(full, place, mode):
    (full / place).chmod(mode)
    check_not_used(full, f"{full / place} can be written by other users (mode {mode:o}")


@needs_root
@pytest.mark.parametrize("place", ["", "host"])
def test_a_directory_of_another_user_is_not_used(full, place):
    os.chown(full / place, ANOTHER_USER, -1)
    check_not_used(full, f"{full / place} belongs to another user (id {ANOTHER_USER})")


@pytest.mark.parametrize("whose", [0o620, pytest.param("another user's", marks=needs_root)])
def test_a_file_that_another_user_could_have_written_is_replaced(full, whose):
    """The directory is the user's alone, so what is compiled into it is trusted."""
    path = compile_one(full, 7)
    before = path.stat().st_mtime_ns
    if whose == "another user's":
        os.chown(path, ANOTHER_USER, -1)
    else:
        path.chmod(whose)
    assert not call(7)
    found = path.stat()
    assert found.st_mtime_ns != before and found.st_uid == os.geteuid()
    assert stat.S_IMODE(found.st_mode) == 0o600


@pytest.mark.parametrize("whose", ["file", "directory"])
def test_tuned_configs_that_another_user_could_have_written_are_not_read(folder, whose):
    store.put({"a": {"config": "x", "digest": "y"}})
    place = store.path() if whose == "file" else folder
    place.chmod(0o770)
    store.reload()
    with pytest.warns(RuntimeWarning, match=f"{place} can be written by other users"):
        assert store.rows() == {}
    store.reload()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # once is enough
        assert store.rows() == {}
    if whose == "directory":
        with pytest.raises(PermissionError, match="can be written by other users"):
            store.put({})
    place.chmod(0o700)
    store.reload()
    assert list(store.rows()) == ["a"]


def test_another_kernels_file_is_not_launched(full):
    """Every kernel has the same symbols: only the digest tells them apart."""
    five, six = compile_one(full, 5), compile_one(full, 6)
    five.write_bytes(six.read_bytes())
    assert not call(5)
    assert five.read_bytes() != six.read_bytes()


def test_a_library_without_the_symbols_is_compiled_again(full, tmp_path):
    path = compile_one(full, 8)
    source = tmp_path / "empty.cpp"
    source.write_text('extern "C" int another() { return 1; }\n')
    compiler = host_compiler.the_compiler()
    command = [*compiler.command, "-shared", "-fPIC", str(source), "-o", str(path)]
    subprocess.run(command, check=True)
    library = path.read_bytes()
    path.write_bytes(library + hashlib.sha256(path.name.encode() + b"\0" + library).digest())
    path.chmod(0o600)
    assert not call(8)
    assert path.read_bytes()[:-32] != library


@pytest.mark.parametrize("kind", ["FIFO", "directory", "dangling link"])
def test_what_is_no_file_in_a_kernels_place(full, kind):
    """Neither waits for a writer nor fails."""
    path = compile_one(full, 9)
    path.unlink()
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(full / "nothing")
    err = call(9)
    assert path.is_dir() if kind == "directory" else (path.is_file() and not path.is_symlink())
    assert (
        "RuntimeWarning: cupykern does without its cache: [Errno 21] Is a directory" in err
    ) == (kind == "directory")
    assert (str(path) in err) == (kind == "directory")


def test_a_fifo_in_the_place_of_tuned_configs(folder):
    cache.folder()
    os.mkfifo(store.path())
    store.reload()
    with pytest.warns(RuntimeWarning, match=rf"{store.path()} is not a regular file"):
        assert store.rows() == {}


# --- without a cache directory -------------------------------------------------------------------


def test_no_home_directory(tmp_path):
    """Neither HOME nor an entry in passwd: a directory of the user where temporary files are."""
    without = {"CUPYKERN_CACHE_DIR": "", "XDG_CACHE_HOME": ""}
    code = (
        "import os, pwd\n"
        "def getpwuid(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = getpwuid\n"
        f"del os.environ['HOME']\n{CALL}call(1)\n"
        "from cupykern import cache\nprint(cache.cache_dir())"
    )
    out, err = run_python(code, **without)
    assert out.split() == ["1.0", f"{tmp_path / 'tmp'}/cupykern-{os.geteuid()}"] and not err
    assert len(kernels(tmp_path / "tmp")) == 2


@pytest.mark.exhaustive
@pytest.mark.skipif(util.find_spec("ziglang") is None, reason="ziglang is missing")
def test_no_home_directory_for_ziglang(folder):
    """Which has a cache of its own there: the kernel is not blamed."""
    code = f"import os; del os.environ['HOME']\n{CALL}call(1)"
    out, err = run_python(code, PATH="", CXX="", XDG_CACHE_HOME="")
    assert out == "1.0" and err.count("RuntimeWarning") == 1 and "zig cache directory" in err


@needs_root
def test_a_user_without_a_name_or_a_home(tmp_path):
    """As in a container that runs as any user."""
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        os.chmod(temporary, 0o777)
        code = (
            f"import os\n{CALL}call(1)\n"  # what is imported late may be root's alone
            f"os.setgroups([]); os.setgid({ANOTHER_USER}); os.setuid({ANOTHER_USER})\n"
            "for name in ('HOME', 'CUPYKERN_CACHE_DIR'): del os.environ[name]\n"
            "host.runtimes.clear()\n"
            "call(1)\n"
        )
        out, err = run_python(code, TMPDIR=temporary, XDG_CACHE_HOME="")
        assert out.split() == ["1.0", "1.0"] and not err
        (made,) = Path(temporary).iterdir()
        assert made.name == f"cupykern-{ANOTHER_USER}" and made.stat().st_uid == ANOTHER_USER
        assert len(kernels(made)) == 2


FAILING_COMPILER = """#!/bin/sh
# As a compiler whose output's disk is full, or whose output's directory is gone.
for word; do case "$word" in
  "$CUPYKERN_CACHE_DIR"/*.so) {what} ;;
esac; done
exec {compiler} "$@"
"""
FULL = 'echo "ld: final link failed: No space left on device" >&2; exit 1'
VANISHED = 'rm -rf "$CUPYKERN_CACHE_DIR"'


@pytest.mark.parametrize("what", [FULL, VANISHED], ids=["full", "vanished"])
def test_a_cache_that_fails_during_a_compile_is_no_compile_error(what, folder, tmp_path):
    compiler = tmp_path / "compiler"
    real = " ".join(host_compiler.the_compiler().command)
    compiler.write_text(FAILING_COMPILER.format(what=what, compiler=real))
    compiler.chmod(0o755)
    err = call(1, CXX=str(compiler))
    assert err.count("RuntimeWarning") == 1 and str(folder) in err
    assert not kernels(folder) and not list((tmp_path / "tmp").iterdir())


def test_a_kernel_that_does_not_compile_is_named(folder):
    """By one error, without a warning about the cache."""
    broken = Variant("broken", (), (), 32, text="KERNEL void broken(float* x) { x[0] = y; }")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(CompileError, match=r"broken<.*does not compile for host"):
            host.current().compile(broken)
    assert not list((folder / "host").glob("tmp*"))


def test_a_compiler_that_makes_nothing_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "true")
    with pytest.raises(CompileError, match="true has made no library"):
        host.current().compile(
            Variant("nothing", (), (), 32, text="KERNEL void nothing(int* x) {}")
        )


def test_a_forked_process_has_a_private_directory_of_its_own(folder):
    """And leaves its parent's."""
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    code = (
        "import os\n"
        "from cupykern import cache\n"
        "made = cache.private_folder()\n"
        "pid = os.fork()\n"
        "assert (cache.private_folder() == made) == (pid != 0)\n"
        "if pid == 0: raise SystemExit(0)\n"
        "assert os.waitpid(pid, 0)[1] == 0 and made.is_dir()\n"
    )
    run_python(code)
    assert not list(Path(os.environ["TMPDIR"]).iterdir())


# --- what killed processes leave -----------------------------------------------------------------

COMPILING = """
import sys, time
from pathlib import Path
from cupykern import cache
with cache.scratch({place}) as made:
    (made / "kernel.cpp").write_text("// half")
    print(made, flush=True)
    time.sleep(60)
"""


def killed(place: str, with_signal: int) -> Path:
    """The scratch directory of a process that was killed in the midst of a compile."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMPILING.format(place=place)], stdout=subprocess.PIPE, text=True
    )
    try:
        made = Path(process.stdout.readline().strip())
        process.send_signal(with_signal)
        assert process.wait(30) == -with_signal
    finally:
        process.kill()
    return made


def age(path: Path, hours: float) -> None:
    then = time.time() - 3600 * hours
    os.utime(path, (then, then))


@pytest.mark.parametrize("with_signal", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_leaves_is_swept(full, with_signal):
    made = killed("cache.folder('host')", with_signal)
    assert [path.name for path in made.iterdir()] == ["kernel.cpp"]
    call(1)
    assert made.is_dir()  # a process of another machine is not seen here: it has to be old
    age(made, 2)
    call(2)
    assert not made.exists()


def test_a_killed_process_private_directory_is_swept(folder):
    made = killed("cache.private_folder()", signal.SIGKILL)
    private = made.parent
    assert private.parent == Path(os.environ["TMPDIR"])
    run_python("from cupykern import cache; cache.private_folder()")
    assert private.is_dir()
    age(private, 2)
    run_python("from cupykern import cache; cache.private_folder()")
    assert not private.exists()


def test_a_user_directory_with_the_name_of_a_private_one_is_left(folder):
    """With no process of its number: no number is so large."""
    place = Path(os.environ["TMPDIR"]) / f"cupykern-{2**31 - 1}-checkout"
    (place / "src").mkdir(parents=True)
    (place / "src" / "thesis.txt").write_text("mine")
    age(place, 2)
    run_python("from cupykern import cache; cache.private_folder()")
    assert (place / "src" / "thesis.txt").read_text() == "mine"


def test_what_is_not_abandoned_is_not_swept(folder):
    """A living process', however old; a young one; what has files of somebody else in it."""
    place = cache.folder("host")
    with cache.scratch(place) as living:
        dead = [place / f"tmp-4194304-abcdefg{i}" for i in range(3)]  # beyond Linux' largest pid
        others = [place / "tmp-mine", place / "tmp-1-short", place / "data"]
        for path in (*dead, *others):
            path.mkdir()
            (path / "kernel.cpp").write_text("")
        (dead[2] / "notes.txt").write_text("the user's")
        link = place / "tmp-4194304-linklink"
        link.symlink_to(others[2])
        for path in (living, *dead[1:], *others):
            age(path, 100)
        cache.sweep(place)
        assert living.is_dir() and dead[0].is_dir() and not dead[1].exists()
        assert [path.name for path in dead[2].iterdir()] == ["notes.txt"]
        assert all((path / "kernel.cpp").exists() for path in others) and link.is_symlink()


def test_scratch_directories_of_earlier_versions_are_swept(folder):
    old = cache.folder("host") / "tmpab12_x9z"
    old.mkdir()
    (old / "kernel.so.tmp4a1b").write_text("")
    age(old, 2)
    cache.sweep(cache.folder("host"))
    assert not old.exists()


# --- cupykern cache ------------------------------------------------------------------------------


def test_clear_removes_only_what_the_cache_made(full, capsys):
    path = compile_one(full, 3)
    store.put({"a": {"config": "x", "digest": "y"}})
    with protocol.lock(wait=False):
        pass
    theirs = {
        full / "notes.txt": "a",
        full / "data" / "kernel.so": "b",
        full / f"{'a' * 40}.so": "c",
        full / "host" / "mine.so": "d",
        full / "host" / f"{'A' * 40}.so": "e",
        full / "host" / "deep" / f"{'b' * 40}.so": "f",
    }
    for place, text in theirs.items():
        place.parent.mkdir(exist_ok=True)
        place.write_text(text)
    outside = full.parent / "outside.so"
    outside.write_text("g")
    (full / "host" / f"{'c' * 40}.so").symlink_to(outside)
    os.mkfifo(full / "host" / f"{'d' * 40}.so")
    abandoned = full / "host" / "tmp-4194304-abcdefgh"
    abandoned.mkdir()
    (abandoned / "kernel.cpp").write_text("")
    with cache.scratch(full / "host") as living:
        assert cli.main(["cache", "--clear"]) == 0
        assert living.is_dir()
        out = capsys.readouterr().out
        assert f"left: host/{living.name} (being compiled)" in out
    assert not path.exists() and not abandoned.exists()
    assert {place: place.read_text() for place in theirs} == theirs
    assert outside.read_text() == "g" and store.path().exists()
    for name in ("notes.txt", "data", "host/mine.so", "host/deep", f"host/{'c' * 40}.so"):
        assert name in out[out.index("left") :], out
    assert "tuned-1.json, tuned-1.json.lock (tuned configs)" in out
    assert "left: cupykern-bench.lock (a lock)" in out


def test_clear_of_the_users_own_directory(tmp_path, monkeypatch, capsys):
    """A mistaken CUPYKERN_CACHE_DIR costs nothing, not even an empty directory."""
    for number in range(30):
        (tmp_path / f"photo{number}").write_text("")
    (tmp_path / "empty").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for place in (tmp_path, tmp_path / "empty"):
        monkeypatch.setenv("CUPYKERN_CACHE_DIR", str(place))
        assert cli.main(["cache", "--clear"]) == 0
    out = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert "and 22 more (not made by cupykern)" in out


def test_size_counts_what_the_cache_made(full):
    path = compile_one(full, 4)
    before = cache.size()
    assert before >= path.stat().st_size
    (full / "host" / "notes.txt").write_text("12345")
    assert cache.size() == before
    with cache.scratch(full / "host") as made:
        (made / "kernel.cpp").write_text("1234")
        assert cache.size() == before + 4


def test_the_size_of_a_cache_that_another_process_fills(full, monkeypatch):
    """Scratch directories come and go while it is added up."""
    before = cache.size()
    passing = full / "host" / "tmp-4194304-abcdefgh"
    passing.mkdir()
    (passing / "kernel.cpp").write_text("1234")
    look = os.scandir

    def scandir(path):
        found = list(look(path))
        if Path(path) == passing:
            (passing / "kernel.cpp").unlink()
        return contextlib.nullcontext(found)

    monkeypatch.setattr(os, "scandir", scandir)
    assert cache.size() == before


def test_doctor_says_why_the_cache_is_not_used(folder):
    cache.folder()
    folder.chmod(0o777)
    (found,) = (one.found for one in doctor.find_all() if one.thing == "kernel cache")
    assert f"not used: {folder} can be written by other users" in found


# --- tuned configs of two versions ---------------------------------------------------------------


def test_another_versions_tuned_configs_stay_as_they_are(folder, monkeypatch):
    cache.folder()
    others = {folder / name: f"of {name}" for name in ("tuned.json", "tuned-2.json")}
    for path, text in others.items():
        path.write_text(text)
    store.reload()
    assert store.rows() == {}
    store.put({"a": {"config": "x", "digest": "y"}})
    assert store.path().name == "tuned-1.json" and list(store.rows()) == ["a"]
    assert {path: path.read_text() for path in others} == others
    assert not list(folder.glob("*broken*"))
