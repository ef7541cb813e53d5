"""C++ written by hand, compiled at first use for this machine and kept in the user's cache folder.

    library = native.library(SOURCE, Shape, MAX_TAPS=MAX_TAPS)     # a ctypes.CDLL, or an AmorError
    reason = native.missing(SOURCE)                                # why there is none, or None

A source is plain C++17 with `extern "C"` functions; it may include the headers beside this file,
and as "<operator>/step.h" the one-token kernels that stand beside their operators. Functions take
raw pointers (`tensor.data_ptr()`) and `native.threads()`, torch's own number, as the argument of
their `num_threads` clauses. Structs and numbers that both sides use are stated by `LAYOUT`
(layout.h) and compared when a library is loaded. The file name holds a hash of the source, the
headers, the compiler, its flags and the processor, so that a changed source or another machine on
the same disk compiles anew, and one of the content, so that a file that is not whole is built anew;
it appears by one rename, so that processes may race. The folder must be the user's alone
(owner.py). AMOR_NATIVE=0 switches native code off, AMOR_CACHE moves the folder, CXX names the
compiler.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from amor.errors import AmorError
from amor.ops.native.layout import agree
from amor.ops.native.owner import others_may_write
from amor.progress import LINE_EVERY, Every

HERE = Path(__file__).parent
OPERATORS = HERE.parent
# no -ffast-math: NaN and infinity must stay what they are
MATHS = ("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared", *MATHS)


def cache_folder() -> Path:
    """Where compiled code and measured choices are kept."""
    base = os.environ.get("AMOR_CACHE") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or "~/.cache", "amor"
    )
    return Path(base).expanduser()


def make_cache_folder(folder: Path) -> None:
    """The cache folder, or one inside it: nobody else has business there."""
    for each in dict.fromkeys((cache_folder(), folder)):
        each.mkdir(mode=0o700, parents=True, exist_ok=True)


@cache
def processor() -> str:
    """The model of the processor and its instruction sets, which -march=native depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "cpu family", "model", "stepping", "flags", "Features")
    return "\n".join(
        line for line in text.splitlines() if line.split("\t")[0].split(":")[0].strip() in wanted
    )


@cache
def processor_name() -> str:
    """A short name that is different for every kind of processor."""
    digest = hashlib.sha256(processor().encode()).hexdigest()[:8]
    return f"{platform.machine()} {digest}"


@cache
def compiler() -> tuple[str, str] | None:
    """The compiler's path and its version, or None."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        path = shutil.which(name)
        if path:
            result = subprocess.run(
                [path, "--version"], capture_output=True, text=True, check=False
            )
            if result.returncode == 0:
                return path, result.stdout.splitlines()[0]
    return None


@cache
def _built(source: Path) -> tuple[Path | None, str]:
    """The compiled library, or None and why."""
    if os.environ.get("AMOR_NATIVE") == "0":
        return None, "switched off by AMOR_NATIVE=0"
    available = compiler()
    if available is None:
        return None, "no C++ compiler found; install g++ (apt install g++) or set CXX"
    path, version = available
    parts = [
        source.read_text(),
        *(h.read_text() for h in sorted(OPERATORS.glob("*/*.h"))),
        version,
        *FLAGS,
        processor(),
    ]
    name = f"{source.parent.name}-{source.stem}-{_digest(chr(0).join(parts).encode())}"
    folder = cache_folder() / "native"
    try:
        make_cache_folder(folder)
        why = others_may_write(folder)
        if why:
            return None, f"{why}, or set AMOR_CACHE to a folder of your own"
        kept = next((each for each in sorted(folder.glob(f"{name}-*.so")) if _whole(each)), None)
        return (kept, "") if kept else _compile(path, source, folder, name)
    except OSError as error:
        advice = "set AMOR_CACHE to a folder that can be written"
        return None, f"cannot write {folder} ({error.strerror}); {advice}"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _whole(library: Path) -> bool:
    """Whether a file has the digest of its name, and only the user can have written it."""
    if not library.is_file() or others_may_write(library):
        return False
    return library.stem.endswith(f"-{_digest(library.read_bytes())}")


def _compile(path: str, source: Path, folder: Path, name: str) -> tuple[Path | None, str]:
    """Compile into `folder`, under a name that ends with a digest of the library.

    None and the compiler's first error where it failed.
    """
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        fresh = Path(temporary) / source.stem
        command = [path, *FLAGS, f"-I{HERE}", f"-I{OPERATORS}", str(source), "-o", str(fresh)]
        with _compilations.announced(source):
            result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            errors = (
                [line for line in result.stderr.splitlines() if "error" in line]
                or result.stderr.splitlines()
                or ["no words"]
            )
            return None, f"{path} could not compile {source.name}: {errors[0].strip()}"
        fresh.chmod(0o700)
        target = folder / f"{name}-{_digest(fresh.read_bytes())}.so"
        return fresh.replace(target), ""


class _Compilations:
    """Announces on stderr what is compiled: a line that goes away on a terminal, else one in 15 s.

    Silent where AMOR_KERNELS is set: whoever forces backends watches them already.
    """

    def __init__(self) -> None:
        self.done = 0  # libraries compiled by this process
        self.line: Every | None = None  # None: nothing announced yet

    @contextmanager
    def announced(self, source: Path) -> Iterator[None]:
        """Announce one source while it compiles."""
        self.done += 1
        terminal, quiet = sys.stderr.isatty(), "AMOR_KERNELS" in os.environ
        if not quiet and (terminal or self.line is None or self.line.due()):
            self.line = self.line or Every(LINE_EVERY)
            most = len(list(OPERATORS.parent.rglob("*.cpp")))
            words = f"compiling native code for this machine, once: {self.done} of at most {most}"
            name = source.parent.name if source.stem == "native" else source.stem
            end = "" if terminal else "\n"
            print(f"{words} ({name}) ...", end=end, file=sys.stderr, flush=True)
        yield
        if terminal and not quiet:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


_compilations = _Compilations()


@cache
def warn_slow(reason: str) -> None:
    """Print on stderr, once per reason, that native code is not used though nobody chose that."""
    if "AMOR_KERNELS" not in os.environ and os.environ.get("AMOR_NATIVE") != "0":
        words = "operators run in torch, several times slower; see amor doctor"
        print(f"{reason}; {words}", file=sys.stderr, flush=True)


def missing(source: Path) -> str | None:
    """Why a source cannot run here, or None. Compiles it at first use, which takes some seconds."""
    return _loaded(source)[1] or None


@cache
def _loaded(source: Path) -> tuple[ctypes.CDLL | None, str]:
    target, why = _built(source)
    if target is None:
        return None, why
    try:
        return ctypes.CDLL(str(target)), ""
    except OSError as error:
        return None, f"cannot load {target}: {error}"


def library(source: Path, *structs: type[ctypes.Structure], **numbers: int) -> ctypes.CDLL:
    """The compiled source, loaded once per process.

    Its structs and numbers (layout.h) must be those of Python.
    """
    loaded, why = _loaded(source)
    if loaded is None:
        raise AmorError(f"native code {source.name}: {why}")
    agree(loaded, structs, numbers, source)
    return loaded


def threads() -> ctypes.c_int:
    """The threads native code may use: torch's number."""
    return ctypes.c_int(torch.get_num_threads())


def pointer(t: torch.Tensor | None) -> ctypes.c_void_p:
    """A tensor's memory as an argument; None is the null pointer."""
    return ctypes.c_void_p(None if t is None else t.data_ptr())


def inner_dense(t: torch.Tensor) -> torch.Tensor:
    """t [B, T, h, n], copied unless its last two dimensions are dense, as after a split."""
    dense = t.stride(3) == 1 and t.stride(2) == t.shape[3]
    return t if dense else t.contiguous()
