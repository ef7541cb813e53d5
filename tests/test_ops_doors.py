"""Which code runs an operator: native code, doors to GPU kernels, chunk sizes that are measured."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_ops_recurrent import begins, compare, kernel, made, remembered
from torch import Tensor

from amor.errors import AmorError
from amor.ops import backends, chunks, native
from amor.ops.backends import BACKENDS, choice, missing, module

DOORS = [
    ("scan", "mamba_ssm", "mamba-ssm"),
    ("scan", "fla", "flash-linear-attention"),
    ("delta", "fla", "flash-linear-attention"),
]


@pytest.fixture
def anew() -> Iterator[None]:
    """Choices that were made are forgotten, before and after."""
    remembering = (backends._choose, native._built, native._loaded, native.compiler, chunks.stored)
    for function in remembering:
        function.cache_clear()
    yield
    for function in remembering:
        function.cache_clear()


@pytest.mark.parametrize(("op", "door", "package"), DOORS)
def test_a_missing_gpu_package_is_named_with_the_command_that_installs_it(
    op: str, door: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    backend = next(b for b in BACKENDS[op] if b.name == door)
    reason = missing(op, backend, "cuda")
    assert reason and "pip install" in reason and package in reason
    assert "cuda only" in str(missing(op, backend, "cpu"))


@pytest.mark.parametrize(("op", "door", "package"), DOORS)
def test_a_forced_door_that_cannot_open_is_an_error(
    op: str, door: str, package: str, monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("AMOR_KERNELS", f"{op}={door}")
    with pytest.raises(AmorError, match="cannot run on cpu"):
        choice(op, "cpu")
    with pytest.raises(AmorError, match=package):
        choice(op, "cuda")


FORBIDDEN = """
import torch
from amor.ops import native
from amor.ops.backends import BACKENDS, choice

def library(*_):
    raise AssertionError("native code was loaded")

native.library = library
import amor

assert {choice(op, "cpu")[0] for op in BACKENDS} == {"reference"}
model = amor.build(amor.preset("amor-mamba2", "tiny", vocab=64))
tokens = torch.arange(24).view(2, 12)
model(tokens[:, :-1], targets=tokens[:, 1:]).loss.backward()
session = amor.Engine(model.eval()).prefill(tokens.tolist())
assert session.step(torch.tensor([1, 2])).logits.isfinite().all()
"""


def test_reference_kernels_run_no_native_code() -> None:
    environment = os.environ | {"AMOR_KERNELS": "reference"}
    subprocess.run([sys.executable, "-c", FORBIDDEN], env=environment, check=True)


def test_without_its_package_a_gpu_falls_to_the_matrix_form_and_says_why(
    monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("AMOR_KERNELS", raising=False)
    name, why = choice("delta", "cuda")
    assert name == "chunked" and "pip install" in why


@pytest.mark.parametrize(("op", "door", "package"), DOORS)
def test_a_package_that_is_installed_but_cannot_be_imported_closes_its_door_with_the_reason(
    op: str,
    door: str,
    package: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    anew: None,
) -> None:
    for name in (door, "triton"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('libcudart.so is lost')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("AMOR_KERNELS", raising=False)
    name, why = choice(op, "cuda")
    assert name == "chunked" and f"{door}: {door}.ops." in why
    assert "cannot be imported (ImportError: libcudart.so is lost)" in why


def test_a_triton_that_cannot_be_imported_leaves_the_head_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    (tmp_path / "triton.py").write_text("raise OSError('no driver')")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.delitem(sys.modules, "amor.ops.head.kernel", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("AMOR_KERNELS", raising=False)
    name, why = choice("head", "cuda")
    assert name == "chunked" and "cannot be imported (OSError: no driver)" in why


def imitate(monkeypatch: pytest.MonkeyPatch, path: str, **functions: object) -> None:
    """A package that is not installed, with these functions in it."""
    parts = path.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    for name, function in functions.items():
        setattr(sys.modules[path], name, function)


def in_sequences(
    run: object, inputs: tuple[Tensor, ...], state: Tensor, bounds: Tensor | None
) -> tuple[Tensor, Tensor]:
    """fla's contract: rows as they are, or one row cut at `cu_seqlens` with a state per piece."""
    if bounds is None:
        return run(*inputs, state)
    pieces = [
        run(*(t[:, a:b] for t in inputs), state[i : i + 1])
        for i, (a, b) in enumerate(zip(bounds.tolist(), bounds.tolist()[1:]))
    ]
    return torch.cat([y for y, _ in pieces], 1), torch.cat([s for _, s in pieces])


def imitated_delta(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
    assert scale == 1.0 and output_final_state and g.shape == beta.shape
    return in_sequences(
        module("delta", "reference").delta, (q, k, v, g, beta), initial_state, cu_seqlens
    )


def imitated_kda(q, k, v, g, beta, scale, initial_state, output_final_state, cu_seqlens):
    assert scale == 1.0 and output_final_state and g.shape == k.shape
    return in_sequences(
        module("delta", "reference").delta, (q, k, v, g, beta), initial_state, cu_seqlens
    )


def imitated_gla(q, k, v, g, scale, initial_state, output_final_state, cu_seqlens):
    """Gated linear attention: the state is [K, V] where the scan's is [P, S]; dt and A are 1."""
    assert scale == 1.0 and output_final_state

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        s, ys = state, []
        for t in range(q.shape[1]):
            s = s * g[:, t, :, None, None].exp() + k[:, t, ..., None] * v[:, t, :, None]
            ys.append((q[:, t, :, None] @ s).squeeze(-2))
        return torch.stack(ys, 1), s

    return in_sequences(run, (q, k, v, g), initial_state, cu_seqlens)


def imitated_update(
    state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None
):
    """mamba-ssm, one token: state [b, h, p, n] written in place.

    x, dt [b, h, p]; A [h, p, n]; B, C [b, g, n]; D, dt_bias [h, p].
    2.2 reads the strides of dt_bias and D though both are said to be optional.
    """
    assert z is None and not dt_softplus and state_batch_indices is None
    heads, size, width = state.shape[1:]
    assert (
        x.shape == dt.shape == state.shape[:3]
        and A.shape == (heads, size, width)
        and B.shape == C.shape
    )
    assert D.shape == dt_bias.shape == (heads, size)
    assert A.stride()[1:] == (0, 0) and dt.stride()[2] == dt_bias.stride()[1] == 0, (
        "strides of 0: one decay a head"
    )
    dt = dt + dt_bias
    B, C = (t.repeat_interleave(heads // t.shape[1], 1) for t in (B, C))
    state.mul_((dt[..., None] * A).exp()).add_((dt * x)[..., None] * B[:, :, None])
    return (state * C[:, :, None]).sum(-1) + D * x


@pytest.mark.parametrize("skip", [True, False], ids=["D", "no D"])
@torch.no_grad()
def test_one_token_through_the_mamba_ssm_door_is_the_recurrence(
    skip: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    imitate(
        monkeypatch,
        "mamba_ssm.ops.triton.selective_state_update",
        selective_state_update=imitated_update,
    )
    imitate(
        monkeypatch, "mamba_ssm.ops.triton.ssd_combined", mamba_chunk_scan_combined=None
    )  # not asked for one token
    inputs = made("scan", 1)
    inputs["D"] = inputs["D"] if skip else None
    state = remembered("scan", inputs)["state"]
    before = state.clone()
    want = module("scan", "reference").scan(**inputs, state=before)
    y, after = module("scan", "mamba_ssm").scan(**inputs, state=state)
    compare({"y": y, "after": after}, dict(zip(("y", "after"), want)), "step")
    assert torch.equal(state, before), "a state handed over stays as it was"


def imitated_scan(x, dt, A, B, C, chunk_size, D, initial_states, seq_idx, return_final_states):
    """mamba-ssm: a token sees those with its own seq_idx; the initial state has seq_idx 0."""
    assert return_final_states and (seq_idx is None or seq_idx.dtype == torch.int32)
    reset = (
        None
        if seq_idx is None
        else torch.diff(seq_idx, dim=1, prepend=torch.zeros_like(seq_idx[:, :1])) > 0
    )
    return module("scan", "reference").scan(x, dt, A, B, C, initial_states, reset, D)


@pytest.mark.parametrize(("op", "door"), [*(pair[:2] for pair in DOORS), ("kda", "fla")])
@pytest.mark.parametrize("length", [1, 20])
def test_a_door_translates_states_and_resets_exactly(
    op: str, door: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {
        "fla.ops.gated_delta_rule": (
            "chunk_gated_delta_rule",
            "fused_recurrent_gated_delta_rule",
            imitated_delta,
        ),
        "fla.ops.kda": ("chunk_kda", "fused_recurrent_kda", imitated_kda),
        "fla.ops.simple_gla": ("chunk_simple_gla", "fused_recurrent_simple_gla", imitated_gla),
        "mamba_ssm.ops.triton.selective_state_update": (
            "selective_state_update",
            "selective_state_update",
            imitated_update,
        ),
        "mamba_ssm.ops.triton.ssd_combined": (
            "mamba_chunk_scan_combined",
            "mamba_chunk_scan_combined",
            imitated_scan,
        ),
    }
    for path, (first, second, imitation) in names.items():
        imitate(monkeypatch, path, **{first: imitation, second: imitation})
    inputs = made(op, length)
    reset = begins(2, length)
    reset[0, 0] = True
    for start in ({}, remembered(op, inputs)):
        for where in (None, reset):
            got, want = (
                kernel(op, name)(**inputs, **start, reset=where) for name in (door, "reference")
            )
            compare(dict(zip("ys", got)), dict(zip("ys", want)), door)


def test_a_machine_without_a_compiler_says_so_and_works(
    monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("AMOR_KERNELS", raising=False)
    for op, second in (
        ("scan", "chunked"),
        ("delta", "chunked"),
        ("conv", "reference"),
        ("rowwise", "reference"),
    ):
        name, why = choice(op, "cpu")
        assert name == second and "no C++ compiler" in why
    monkeypatch.setenv("AMOR_KERNELS", "scan=native")
    with pytest.raises(AmorError, match="no C\\+\\+ compiler"):
        choice("scan", "cpu")


FORWARD = """
import amor, torch
model = amor.build(amor.preset("mamba2", "tiny", vocab=64))
for _ in range(2):
    model(torch.zeros(1, 4, dtype=torch.long))
"""


def stderr_of(code: str, **environment: str) -> str:
    """What a fresh process prints on stderr; its stdout must stay empty."""
    clean = {k: v for k, v in os.environ.items() if k not in ("AMOR_KERNELS", "AMOR_NATIVE", "CXX")}
    command = [sys.executable, "-c", code]
    ran = subprocess.run(
        command, env=clean | environment, capture_output=True, text=True, check=True
    )
    assert ran.stdout == ""
    return ran.stderr


def test_a_missing_compiler_is_announced_once_in_one_line(tmp_path: Path) -> None:
    """Only where nobody chose it: not with AMOR_KERNELS, not with AMOR_NATIVE=0."""
    line = stderr_of(FORWARD, PATH=str(tmp_path))
    assert line.count("\n") == 1 and "no C++ compiler" in line
    assert "several times slower; see amor doctor" in line
    assert stderr_of(FORWARD, PATH=str(tmp_path), AMOR_KERNELS="reference") == ""
    assert stderr_of(FORWARD, PATH=str(tmp_path), AMOR_NATIVE="0") == ""


COMPILE = """
import sys
from pathlib import Path
from amor.ops import native
for path in sys.argv[1:]:
    assert native.missing(Path(path)) is None
"""


def test_the_first_compile_is_announced_with_progress_and_a_warm_cache_is_silent(
    tmp_path: Path,
) -> None:
    if native.compiler() is None:
        return
    for name in ("one", "two"):
        (tmp_path / f"{name}.cpp").write_text('extern "C" int answer() { return 42; }')
    paths = [str(tmp_path / "one.cpp"), str(tmp_path / "two.cpp")]
    code = COMPILE.replace("sys.argv[1:]", repr(paths))
    cache = {"AMOR_CACHE": str(tmp_path / "cache")}
    first = stderr_of(code, **cache)
    most = len(list(Path(native.__file__).parents[2].rglob("*.cpp")))
    words = "compiling native code for this machine, once: 1 of at most"
    assert first == f"{words} {most} (one) ...\n", "the second one is due 15 seconds later"
    assert stderr_of(code, **cache) == ""
    assert stderr_of(code, AMOR_CACHE=str(tmp_path / "new"), AMOR_KERNELS="auto") == ""


def test_native_code_can_be_switched_off(monkeypatch: pytest.MonkeyPatch, anew: None) -> None:
    monkeypatch.setenv("AMOR_NATIVE", "0")
    assert "AMOR_NATIVE=0" in choice("scan", "cpu")[1]


def test_source_that_does_not_compile_gives_the_compilers_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.compiler() is None:
        return
    monkeypatch.setenv("AMOR_CACHE", str(tmp_path / "cache"))
    wrong = tmp_path / "wrong.cpp"
    wrong.write_text("int main() { return nonsense; }")
    assert "nonsense" in str(native.missing(wrong))
    with pytest.raises(AmorError, match="nonsense"):
        native.library(wrong)


def test_the_one_token_kernels_of_all_operators_stand_together_in_one_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.compiler() is None:
        return
    monkeypatch.setenv("AMOR_CACHE", str(tmp_path / "cache"))
    headers = sorted(p.relative_to(native.OPERATORS) for p in native.OPERATORS.glob("*/step.h"))
    assert len(headers) >= 5
    source = tmp_path / "together.cpp"
    source.write_text(
        "".join(f'#include "{name}"\n' for name in headers * 2)
        + 'extern "C" int answer() { return 42; }\n'
    )
    assert native.library(source).answer() == 42


def test_a_changed_header_compiles_its_sources_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    if native.compiler() is None:
        return
    monkeypatch.setenv("AMOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "OPERATORS", tmp_path)
    source, header = tmp_path / "asks.cpp", tmp_path / "some" / "step.h"
    source.write_text('#include "some/step.h"\nextern "C" int answer() { return ANSWER; }\n')
    header.parent.mkdir()
    for answer in (1, 2):
        header.write_text(f"#define ANSWER {answer}\n")
        for function in (native._built, native._loaded):
            function.cache_clear()
        assert native.library(source).answer() == answer


def test_a_chunk_size_is_forced_then_stored_then_taken_from_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: None
) -> None:
    monkeypatch.setenv("AMOR_CACHE", str(tmp_path))
    monkeypatch.delenv("AMOR_CHUNK", raising=False)
    shape, clock = (24, 64, 128), [0.0]
    assert chunks.chunk_size("scan", "native", 1024, shape) == chunks.DEFAULT["scan", "native"]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])

    def run(chunk: int) -> None:
        clock[0] += 1.0 if chunk == 96 else 2.0

    seconds = chunks.measure("scan", "native", shape, run)
    assert seconds == {chunk: 1.0 if chunk == 96 else 2.0 for chunk in chunks.CHOICES}
    assert chunks.chunk_size("scan", "native", 1024, shape) == 96
    assert chunks.chunk_size("scan", "native", 20, shape) == 32, "no larger than the call needs"
    assert chunks.chunk_size("scan", "native", 1024, (1, 2, 3)) == chunks.DEFAULT["scan", "native"]
    monkeypatch.setenv("AMOR_CHUNK", "scan=16,delta=32")
    assert (
        chunks.chunk_size("scan", "native", 1024, shape),
        chunks.chunk_size("delta", "native", 1024, shape),
    ) == (16, 32)
    monkeypatch.setenv("AMOR_CHUNK", "50")
    with pytest.raises(AmorError, match="multiple of 16"):
        chunks.chunk_size("scan", "native", 1024, shape)


def test_the_default_chunks_are_among_those_measured() -> None:
    assert set(chunks.DEFAULT.values()) <= set(chunks.CHOICES)
    assert max(chunks.CHOICES) <= chunks.LARGEST
