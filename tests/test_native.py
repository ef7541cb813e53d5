"""Native code: structs as C++ has them, libraries from the user's own folder only."""

import ctypes
import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from amor.errors import AmorError
from amor.ops import chunks, native
from amor.ops.backends import module
from amor.ops.native import team
from amor.ops.native.owner import others_may_write

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "amor").rglob("*.py"))
pytestmark = pytest.mark.skipif(native.compiler() is None, reason="no C++ compiler")


def named(text: str) -> list[str]:
    """The modules whose source holds a text."""
    return [
        ".".join(p.relative_to(ROOT).with_suffix("").parts) for p in FILES if text in p.read_text()
    ]


def structures(base: type = ctypes.Structure) -> Iterator[type]:
    for each in base.__subclasses__():
        yield each
        yield from structures(each)


@pytest.fixture
def anew() -> Iterator[None]:
    for function in (native._built, native._loaded):
        function.cache_clear()
    yield
    for function in (native._built, native._loaded):
        function.cache_clear()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: None) -> Path:
    """A cache folder of the test's own, not yet made."""
    monkeypatch.setenv("AMOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def source(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "some.cpp").write_text(text)
    return folder / "some.cpp"


@pytest.fixture
def answering(tmp_path: Path) -> Path:
    return source(tmp_path / "source", 'extern "C" int answer() { return 42; }\n')


# structs and numbers


def test_every_struct_of_the_package_is_compared_with_its_cpp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in named("ctypes.Structure"):
        importlib.import_module(name)
    compared: set[type] = set()
    honest = native.agree

    def noted(loaded, structs, numbers, source):
        honest(loaded, structs, numbers, source)
        compared.update(structs)

    monkeypatch.setattr(native, "agree", noted)
    sources = named("SOURCE = Path(__file__)")
    assert len(sources) == len(list((ROOT / "amor").rglob("*.cpp")))
    for name in sources:
        loader = importlib.import_module(name).library
        loader.cache_clear()
        loader()
    ours = {each for each in structures() if each.__module__.startswith("amor.")}
    assert len(ours) >= 25
    assert not {f"{each.__module__}.{each.__name__}" for each in ours - compared}


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        (
            "long x_row, x_token;",
            "long x_token, x_row;",
            "Inputs.x_row is integer of 8 bytes at 48 in C++ "
            "and integer of 8 bytes at 40 in Python",
        ),
        (
            "channels, taps, block;",
            "channels, taps, block, more;",
            "Shape is 48 bytes in C++ and 40 bytes in Python",
        ),
        ("MAX_TAPS = 64", "MAX_TAPS = 32", "MAX_TAPS is 32 in C++ and 64 in Python"),
    ],
    ids=["a swapped field", "one more field", "another number"],
)
def test_a_source_that_does_not_fit_its_python_is_refused(
    tmp_path: Path, home: Path, right: str, wrong: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conv = module("conv", "native")
    text = conv.SOURCE.read_text()
    assert text.count(right) == 1
    monkeypatch.setattr(conv, "SOURCE", source(tmp_path / "source", text.replace(right, wrong)))
    conv.library.cache_clear()
    try:
        with pytest.raises(AmorError) as refused:
            conv.library()
    finally:
        conv.library.cache_clear()
    assert f"native code some.cpp does not fit its Python: {said}" == str(refused.value)


TOLD = """
#include "layout.h"
struct Some { long count; float eps; };
LAYOUT(STRUCT(Some, count, eps))
"""


class Some(ctypes.Structure):
    _fields_ = [("count", ctypes.c_long), ("eps", ctypes.c_float)]


class Wider(ctypes.Structure):
    """As long as the C++ struct, its fields in the same places."""

    _fields_ = [("count", ctypes.c_long), ("eps", ctypes.c_double)]


class Whole(ctypes.Structure):
    _fields_ = [("count", ctypes.c_long), ("eps", ctypes.c_int)]


def test_a_field_of_another_type_or_a_struct_that_one_side_does_not_know_is_refused(
    tmp_path: Path, home: Path
) -> None:
    told = source(tmp_path / "source", TOLD)
    assert native.library(told, Some)
    for other, said in ((Wider, "float of 8 bytes at 8"), (Whole, "integer of 4 bytes at 8")):
        other.__name__ = "Some"
        with pytest.raises(
            AmorError, match=rf"Some.eps is float of 4 bytes at 8 in C.. and {said} in Python"
        ):
            native.library(told, other)
    with pytest.raises(AmorError, match=r"Some.count is .* in C.. and missing in Python"):
        native.library(told)
    silent = source(tmp_path / "silent", 'extern "C" int answer() { return 42; }')
    with pytest.raises(AmorError, match=r"Some.count is missing in C"):
        native.library(silent, Some)
    with pytest.raises(AmorError, match="TILE is missing in C"):
        native.library(silent, TILE=16)


def test_more_taps_than_native_code_has_room_for_are_refused() -> None:
    import torch

    conv = module("conv", "native")
    x, weight = torch.randn(1, 70, 8), torch.randn(8, conv.MAX_TAPS + 1)
    with pytest.raises(AmorError, match="65 taps"):
        conv.conv(x, weight)
    assert conv.conv(x, weight[:, 1:])[0].shape == x.shape


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 100000}', '{"a": 17}', '{"a": "64"}'])
def test_a_stored_chunk_that_native_code_has_no_room_for_is_refused(home: Path, text: str) -> None:
    chunks.stored.cache_clear()
    home.mkdir()
    (home / "chunks.json").write_text(text)
    try:
        with pytest.raises(AmorError, match=r"chunks\.json"):
            chunks.chunk_size("scan", "native", 1024, (24, 64, 128))
    finally:
        chunks.stored.cache_clear()


# whose the libraries are


def test_what_native_code_is_kept_in_is_closed_to_others(home: Path, answering: Path) -> None:
    before = os.umask(0)
    try:
        assert native.library(answering).answer() == 42
    finally:
        os.umask(before)
    (kept,) = (home / "native").iterdir()
    assert [p.stat().st_mode & 0o777 for p in (home, home / "native", kept)] == [0o700] * 3
    assert not others_may_write(kept)


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777, 0o1777], ids=oct)
def test_a_folder_that_others_can_write_to_is_refused_in_a_line_that_says_what_to_do(
    home: Path, answering: Path, mode: int
) -> None:
    (home / "native").mkdir(parents=True)
    (home / "native").chmod(mode)
    reason = native.missing(answering)
    assert (
        reason
        and f"chmod go-w {home / 'native'}" in reason
        and "AMOR_CACHE" in reason
        and "\n" not in reason
    )
    with pytest.raises(AmorError, match="chmod go-w"):
        native.library(answering)
    assert not list((home / "native").iterdir()), "nothing is built there"
    (home / "native").chmod(0o700)
    for function in (native._built, native._loaded):
        function.cache_clear()
    assert native.library(answering).answer() == 42


def test_a_link_is_judged_by_where_it_leads(home: Path, answering: Path, tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    home.mkdir()
    (home / "native").symlink_to(open_to_all)
    assert f"chmod go-w {open_to_all}" in str(native.missing(answering))


@pytest.mark.parametrize(
    ("mode", "fits"),
    [(0o755, True), (0o775, True), (0o1777, True), (0o777, False)],
    ids=["r", "g", "t", "o"],
)
def test_a_folder_above_may_be_open_only_where_nobody_moves_what_is_another_s(
    tmp_path: Path, mode: int, fits: bool
) -> None:
    above = tmp_path / "above"
    (above / "mine").mkdir(parents=True)
    (above / "mine").chmod(0o700)
    above.chmod(mode)
    reason = others_may_write(above / "mine")
    assert (reason == "") is fits and (fits or f"chmod o-w {above}" in reason)


def test_what_belongs_to_another_user_is_refused(
    home: Path, answering: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: other)
    reason = native.missing(answering)
    assert (
        reason
        and f"belongs to user {other - 1}, not to you ({other})" in reason
        and "AMOR_CACHE" in reason
    )


def test_a_folder_above_that_belongs_to_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, above = Path.stat, tmp_path.resolve()

    def told(self: Path, **rest: bool) -> os.stat_result:
        found = list(honest(self, **rest))
        found[4] = 4321 if self == above else found[4]
        return os.stat_result(found)

    (tmp_path / "mine").mkdir(mode=0o700)
    assert not others_may_write(tmp_path / "mine")
    monkeypatch.setattr(Path, "stat", told)
    assert f"{above} belongs to user 4321" in others_may_write(tmp_path / "mine")


@pytest.mark.parametrize("harm", ["cut", "emptied", "garbage", "open", "a link"])
def test_a_library_that_is_not_whole_or_not_the_user_s_alone_is_built_anew(
    home: Path, answering: Path, tmp_path: Path, harm: str
) -> None:
    kept, _ = native._built(answering)
    assert kept is not None
    right = kept.read_bytes()
    if harm == "cut":
        kept.write_bytes(right[: len(right) // 2])
    elif harm == "emptied":
        kept.write_bytes(b"")
    elif harm == "garbage":
        kept.write_bytes(os.urandom(len(right)))
    elif harm == "open":
        kept.chmod(0o777)
    else:
        elsewhere = tmp_path / "elsewhere.so"
        elsewhere.write_bytes(right)
        elsewhere.chmod(0o777)
        kept.unlink()
        kept.symlink_to(elsewhere)
    native._built.cache_clear()
    assert native._built(answering) == (kept, "")
    assert not kept.is_symlink() and kept.read_bytes() == right and not others_may_write(kept)
    assert native.library(answering).answer() == 42


def test_what_is_kept_is_not_built_again(
    home: Path, answering: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = native._built(answering)
    monkeypatch.setattr(native, "_compile", None)
    native._built.cache_clear()
    assert native._built(answering) == kept and kept[0] is not None


# threads


def python(code: str, **environment: str) -> str:
    """What a fresh process prints that was told nothing of how to wait but this."""
    told = {
        k: v
        for k, v in os.environ.items()
        if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
    }
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=told | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return (ran.stdout + (ran.stderr if "OMP_DISPLAY_ENV" in environment else "")).strip()


OWN = "; decode has threads of its own"
SAYS = (
    "import os; from amor.threads import waiting; "
    "print(os.environ.get('GOMP_SPINCOUNT'), '|', waiting())"
)


def test_amor_says_how_threads_wait_before_torch_is_imported() -> None:
    from amor.threads import SPINS

    code = f"import amor, sys; assert 'torch' not in sys.modules; {SAYS}"
    assert (
        python(code)
        == f"{SPINS} | spin {SPINS} turns, then sleep (GOMP_SPINCOUNT, set by amor){OWN}"
    )
    assert python(f"import amor.cli; {SAYS}").startswith(f"{SPINS} |"), "the command too"


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"])
def test_what_the_user_says_of_waiting_stands(name: str) -> None:
    spins, said = python(f"import amor; {SAYS}", **{name: "7"}).split(" | ")
    assert spins == ("7" if name == "GOMP_SPINCOUNT" else "None")
    assert said == f"as the environment says: {name}=7"


def test_a_program_that_imported_torch_first_keeps_its_waiting() -> None:
    assert (
        python(f"import torch, amor; {SAYS}")
        == f"None | as it came: torch was imported before amor{OWN}"
    )
    said = python(f"import torch, amor; {SAYS}", OMP_WAIT_POLICY="passive")
    assert said == "None | as it came: torch was imported before amor, OMP_WAIT_POLICY=passive"


@pytest.mark.skipif(sys.platform != "linux", reason="OpenMP of another kind")
def test_what_was_set_reaches_openmp() -> None:
    from amor.threads import SPINS

    assert f"GOMP_SPINCOUNT = '{SPINS}'" in python(
        "import amor, torch", OMP_DISPLAY_ENV="verbose"
    ).replace('"', "'")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc/self/maps")
def test_torch_and_native_code_share_one_openmp() -> None:
    code = (
        "import amor.ops.rowwise.native as it; it.library(); "
        "maps = [line.split()[-1] for line in open('/proc/self/maps')]; "
        "names = ('gomp', 'iomp', 'libomp'); "
        "print(len({path for path in maps if any(name in path for name in names)}))"
    )
    assert python(code) == "1"


TEAM = """
#include <unistd.h>
#include "team.h"
// How many worked, 0 where a member missed a meeting; the last of them is late by so much.
extern "C" int work(int threads, int late, int going) {
    int there[8] = {}, good = 1, of = 0;
    if (going) expect_more();
    together(threads, [&](Member me) {
        for (int round = 1; round <= 50; round++) {
            there[me.mine] = round;
            if (late && round == 1 && me.mine == me.of - 1) usleep(1000 * late);
            me.wait();
            if (me.mine == 0)
                for (int i = 0; i < me.of; i++) good &= there[i] == round;
            me.wait();
        }
        if (me.mine == 0) of = me.of;
    });
    return good * of;
}
"""


@pytest.fixture
def team_work(tmp_path: Path) -> Callable[[int, int, int], int]:
    return team.join(native.library(source(tmp_path / "source", TEAM))).work


@pytest.mark.parametrize("going", [0, 1], ids=["OpenMP", "our own"])
def test_members_of_a_team_meet(team_work: Callable[[int, int, int], int], going: int) -> None:
    for threads in (1, 2, 3, 2, 1, 5):
        found = [team_work(threads, 0, going) for _ in range(40)]
        assert 0 not in found and max(found) <= threads, f"{threads} threads"


def test_a_team_goes_on_with_one_fewer_after_it_waited_for_one_and_comes_back(
    team_work: Callable[[int, int, int], int],
) -> None:
    def works_with_both(late: int = 0) -> bool:
        for _ in range(200):  # a busy machine may have taken one away
            if team_work(2, late, 1) == 2:
                return True
            time.sleep(0.02)
        return False

    assert works_with_both(late=100)
    assert team_work(2, 0, 1) == 1, "the one that was late is not waited for again at once"
    assert works_with_both()


def test_two_python_threads_and_a_child_of_fork_have_a_team(
    team_work: Callable[[int, int, int], int],
) -> None:
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: team_work(3, 0, 1), range(60)))
    assert 0 not in found
    child = os.fork()
    if child == 0:
        os._exit(0 if team_work(1, 0, 1) == 1 and team_work(3, 0, 1) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_decode_uses_openmp_where_the_environment_says_how_to_wait() -> None:
    from amor.threads import SPINS

    code = (
        "import amor; from amor.ops.native import team; from types import SimpleNamespace as N; "
        "joined = []; "
        "team.join(N(join_team=joined.append)); print(len(joined))"
    )
    assert (
        python(code),
        python(code, OMP_WAIT_POLICY="active"),
        python(code, GOMP_SPINCOUNT=str(SPINS)),
    ) == ("1", "0", "1")


def test_doctor_says_how_threads_wait(capsys: pytest.CaptureFixture[str]) -> None:
    from amor.cli import main
    from amor.threads import waiting

    assert main(["doctor", "--quick"]) == 0
    assert f"threads wait: {waiting()}\n" in capsys.readouterr().out
