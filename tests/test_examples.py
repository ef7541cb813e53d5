"""Every example in the README, in docs/ and in the help of a verb runs: shell commands, Python,
and commands named in sentences.

A document is read from top to bottom, as a newcomer would, in a folder that holds what its examples
name: a small trained run, prepared data, texts. SHRUNK makes examples small, NOT_RUN names those
that cannot run here; these are still parsed.
"""

import ast
import contextlib
import gzip
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from authors_folders import model_kwargs, released
from eval_rows import write as write_sets
from evaluations import folders
from laws import small
from training import DEMO, QUICK, corpus, invented_demo, small_recipe

from amor.cli import bench, main, parser_of, verbs
from amor.cli._training import Reporter
from amor.models.folder import save
from amor.ops import chunks
from amor.train.loop import train
from amor.vocabulary import load_file
from benchmarks import __main__ as benchmarks

ROOT = Path(__file__).parent.parent

# what an example is made smaller by, applied from the first to the
# last: (pattern, replacement, why)
SMALLER = (
    " --steps 3 --set model.changes.width=64 --set model.changes.d_ff=96 --set context=24 "
    "--set micro_batch=2"
)
ONE_RANK = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=0"
SHRUNK = [
    (
        r"^make ",
        f"make --dry-run -C {shlex.quote(str(ROOT))} ",
        "it installs from the network: what it would do is printed",
    ),
    (r"--steps \d+", "", "three steps show that training runs; added below"),
    (r"train RECIPE", "train my-recipe.toml", "RECIPE stands for the reader's own"),
    (
        r"(train my-recipe.toml .*)",
        r"\1 --steps 3",
        "the recipe in the folder is small, but for its steps",
    ),
    (r"(train tiny[/ ](?!.*batch=).*)", r"\1 --set batch=2", "two windows a step"),
    (r"(train tiny[/ ].*)", r"\1" + SMALLER, "a small model and short windows train alike"),
    (
        r"(train recall/.*)",
        r"\1 --steps 2 --set batch=4 --set eval.windows=4",
        "two small steps show that a task is learned",
    ),
    (
        r"(amor fit .*--data .*)",
        r"\1 --tokens 600 --windows 4 --hidden 8 --no-frontier",
        "a few tokens fit a small router",
    ),
    (r"--rows 512", "", "added below"),
    (r"(amor recall .*)", r"\1 --rows 4", "four rows are judged like a hundred"),
    (
        r"changes.vocab=8192",
        "changes.vocab=4096",
        "the data here has fewer tokens; the preset's vocabulary holds them",
    ),
    (
        r"(train paper/1.5b) .*",
        r"\1 --dry-run --flops 1e15",
        "a model of this size fits no test; its arguments and recipe are read",
    ),
    (
        r"torchrun --nproc-per-node \d+ -m",
        ONE_RANK,
        "as torchrun would set it; tests/test_train_ranks.py starts two",
    ),
    (r"--minutes 2", "--minutes 0.0001", "two minutes are too long"),
    (r"bpe:(4096|2048)", "bpe:300", "texts here have fewer words"),
    (r"--head-size 32", "", "added below"),
    (
        r"--train-steps \d+",
        "--train-steps 2 --set batch=2 --set micro_batch=2",
        "two small steps show that blocks are trained",
    ),
    (
        r"(check .*my_.*)",
        r"\1 --set width=64 --set d_ff=96 --set vocab=211 --weights float32",
        "a small model tells as much",
    ),
    (
        r"(amor attach .*)",
        r"\1 --head-size 32 --set context=24 --set eval.windows=4",
        "short windows are read alike",
    ),
    (r"--max-tokens \d+", "", "added below"),
    (r"(amor generate .*)", r"\1 --max-tokens 4", "a few tokens show that it writes"),
    (
        r"--preset paper",
        "--preset paper --limit 12",
        "the beginning of each text is enough to draw",
    ),
    (
        r"(trace .* --value)",
        r"\1 --windows 2 --context 24",
        "two windows are judged like thirty-two",
    ),
    (r"--length 300", "--length 40", "short rows are cut, padded and packed like long ones"),
    (r"(amor check .*)", r"\1 --rows 2", "two rows are a batch"),
    (r"--measure 180m", "--measure tiny", "180m takes a minute to measure"),
    (r"--contexts [\d,]+", "--contexts 24,48", "contexts of thousands take minutes"),
    (r"--scale 180m --parts", "--parts", "--quick has a scale of its own"),
    (r"--rounds \d+", "", "one round; added below"),
    (r"((amor bench|-m benchmarks) (?!.*--quick).*)", r"\1 --quick", "shapes that take seconds"),
    (r"((amor bench|-m benchmarks) .*)", r"\1 --rounds 1", "one round shows that everything runs"),
    (
        r"(bench decode(?!.*(--parts|--model )).*)",
        r"\1 --parts contexts",
        "tests/test_bench.py has all parts",
    ),
    (
        r"(bench decode(?!.*--models? ).*)",
        r"\1 --models mamba2,amor-mamba2",
        "two of eight architectures",
    ),
    (
        r"(benchmarks peers(?!.*--only).*)",
        r"\1 --only mamba2-layer",
        "tests/test_bench.py has every row",
    ),
    (r"(benchmarks busy(?!.*--only).*)", r"\1 --only decode", "tests/test_bench.py has every row"),
    (r"(bench(marks beside| batch)(?!.*--batches).*)", r"\1 --batches 2", "two rows are a batch"),
    (r"(bench(marks beside| batch).*)", r"\1 --prefill 8", "a short prompt"),
    (
        r"(amor study (?!.*--plan).*)",
        r"\1 --plan",
        "tests/test_study.py runs one; here it is only planned",
    ),
    (r"--limit 200", "", "added below"),
    (
        r"(amor eval .*)",
        r"\1 --limit 1 --samples 1 --lengths 900 --segments 1",
        "one document a task shows that it runs",
    ),
    (
        r"--suite niah,length-extrapolation",
        "--suite niah,length-extrapolation --task niah_single_1,pg19",
        "the others are slow to make",
    ),
    (
        r"--command COMMAND",
        "--command ./their-rows.sh",
        "COMMAND stands for the reader's own program",
    ),
]
# the same for Python
SHRUNK_PYTHON = [
    (r"context=256, count=32", "context=24, count=2", "the text here is short"),
    (r"steps = 400", "steps = 2", "two steps show that it trains"),
    (r"257", "25", "short rows"),
    (r"max_tokens=50", "max_tokens=4", "a few tokens show that it writes"),
    (r"max_steps=200", "max_steps=2", "two steps show that it trains"),
]

# examples that cannot run here, and why; their arguments are parsed all the same
NOT_RUN = {
    (
        "amor prepare hf:HuggingFaceFW/fineweb-edu --config sample-10BT --out data/edu "
        "--tokenizer llama-3.1 --valid 0.001"
    ): "a hub",
    "amor train tiny/amor-mamba2 --data DATA --track tensorboard": (
        "tensorboard is not among the extras of the tests"
    ),
    "lm_eval --model hf": "names a way; tests/test_hf.py goes it",
    (
        "lm_eval --model hf --model_args pretrained=mine-hf,trust_remote_code=True "
        "--tasks arc_easy,lambada_openai"
    ): "tasks of a hub",
    "vllm serve mine-hf --dtype float32": "make test-vllm serves a model so",
    "vllm serve mine-hf --tensor-parallel-size 2": "make test-vllm runs two ranks",
    "vllm serve": "names a way; make test-vllm goes it",
    "lm_eval --model vllm": "names a way; make test-vllm goes it",
    "lm_eval --model vllm --model_args pretrained=mine-hf,dtype=float32 --tasks arc_easy": (
        "a task of a hub"
    ),
    "python3 -m venv .venv": "takes long; tests/test_install.py makes one",
    "source .venv/bin/activate": "changes the reader's shell",
    'srun torchrun --nnodes "$SLURM_NNODES" --nproc-per-node 8 --rdzv-backend c10d '
    '--rdzv-endpoint "$head:29500" '
    '--rdzv-id "$SLURM_JOB_ID" -m amor train paper/1.5b --data DATA --out RUN': "needs Slurm",
    "amor train tiny/amor-mamba2 --data DATA --out RUN --steps 3600 --set context=512 "
    "--set batch=8 --set "
    "micro_batch=8": "takes two hours",
    "python tests/kills.py --all": (
        "takes many minutes; tests/test_train_resume.py has a few of its cases"
    ),
    "amor generate --weights ...": "tells of an option; it has no model",
}

# Python that is quoted from the package: its lines stand in this file, in this order
QUOTED = {
    "def program": "amor/mixers/kda.py",
    "Format(": "amor/ops/product/formats.py",
}

PROGRAMS = (
    "amor",
    "make",
    "pip",
    "python",
    "python3",
    "torchrun",
    "srun",
    "echo",
    "source",
    "lm_eval",
    "vllm",
)
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(PROGRAMS)}) \S")


@dataclass(frozen=True)
class Example:
    text: str
    python: bool = False


def blocks(text):
    """(language, code) of fenced and indented blocks; the language of an indented one is None."""
    fenced = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
    indented = re.compile(r"(?:^|\n\n)((?:(?: {4,}.*)?\n)+)")
    place = 0
    for fence in [*fenced.finditer(text), None]:
        before = text[place : fence.start() if fence else len(text)]
        for found in indented.finditer(before):
            code = textwrap.dedent(found[1]).strip("\n")
            yield from (
                (None, piece)
                for piece in ([code] if is_python(code) else code.split("\n\n"))
                if piece.strip()
            )
        if fence:
            yield fence[1], fence[2]
            place = fence.end()


def commands(code):
    """The commands among lines of shell: continued lines joined, comments and
    explanations beside them left out."""
    for line in re.sub(r" *\\\n\s*", " ", code).splitlines():
        if COMMAND.match(line.strip()):
            yield re.split(r"\s+#|\s{2,}", line.strip())[0]


def is_python(code):
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return False
    return any(
        isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.Call)
        for node in ast.walk(tree)
    )


def in_markdown(text):
    """Examples in the order of the page: blocks of shell and Python, and
    commands named in sentences."""
    for language, code in blocks(text):
        if language == "python" or (language is None and is_python(code)):
            yield Example(code, python=True)
        else:
            if language in ("bash", "sh", "console"):
                strange = [
                    line
                    for line in code.splitlines()
                    if line.strip() and not COMMAND.match(line) and line[0] != "#"
                ]
                assert not strange, f"nobody knows how to run {strange}"
            yield from map(Example, commands(code))
    plain = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    for named in re.findall(r"`([^`]+)`", plain):
        words = " ".join(named.split())
        if COMMAND.match(words) and not re.fullmatch(
            r"amor \S+|python -m benchmarks", words
        ):  # a verb alone is a name
            yield Example(words)


def in_help(text):
    """The examples of a verb's or suite's help: its lines that are commands."""
    yield from map(Example, commands(text))


def documents():
    """Document -> its examples."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = {str(page.relative_to(ROOT)): list(in_markdown(page.read_text())) for page in pages}
    helps = [f"amor/cli/{verb}.py" for verb in verbs()] + ["benchmarks/__main__.py"]
    helps += [
        str(Path(suite.__file__).relative_to(ROOT)) for suite in benchmarks.all_suites().values()
    ]
    found |= {
        file: list(in_help(ast.get_docstring(ast.parse((ROOT / file).read_text()))))
        for file in helps
    }
    return {name: list(dict.fromkeys(examples)) for name, examples in found.items() if examples}


@pytest.fixture(scope="session")
def furnished(tmp_path_factory):
    """A folder with everything the examples name, small."""
    folder = tmp_path_factory.mktemp("furnished")
    data = corpus(folder)
    texts = sorted((folder / "texts").iterdir())
    for name in ("DATA", "FOLDER", "data/mine", "data/small"):
        shutil.copytree(data, folder / name)
    train(
        small_recipe(folder / "DATA", changes=QUICK | {"vocab": 4096}), folder / "RUN", [Reporter()]
    )
    for name in ("runs/mine", "runs/other", "runs/demo"):
        shutil.copytree(folder / "RUN", folder / name, symlinks=True)
    shutil.copytree(folder / "RUN" / "latest", folder / "MODEL")
    for name in ("my-texts", "corpus"):
        shutil.copytree(folder / "texts", folder / name)
    published(folder)
    for page in ("add-a-gate", "add-a-backbone"):  # what the reader is asked to save
        name, code = re.search(
            r"Save this as `(\w+\.py)`:\n\n```python\n(.*?)^```", how_to(page), re.S | re.M
        ).groups()
        (folder / name).write_text(code)
    for name in ("held-out.txt", "TEXT.txt", "FILE", "book.txt"):
        shutil.copy(texts[0], folder / name)
    lines = "".join(json.dumps({"text": text.read_text()}) + "\n" for text in texts)
    (folder / "held-out.jsonl").write_text(json.dumps({"text": "something else " * 60}) + "\n")
    for name in ("notes", "novels"):
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "prompts.txt").write_text("one\ntwo\n")
    (folder / "my-recipe.toml").write_text(
        DEMO.replace("[model.changes]", '[model]\nname = "amor-mamba2"\n[model.changes]')
    )
    (folder / "my-study.toml").write_text(
        'title = "mine"\nset.context = 24\n[[runs]]\nname = "a"\nmodel = "mamba2"\n'
    )
    (folder / "their-rows.sh").write_text("#!/bin/sh\necho '{\"tok_s_best\": 100.0}'\n")
    (folder / "their-rows.sh").chmod(0o755)
    (folder / "bars.toml").write_text("bars = []\n")
    for name in ("tests", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    folders(folder / "evals")
    write_sets(folder / "SETS")
    (folder / "SETS" / "lengths_pg19.jsonl").write_text(
        json.dumps({"text": "one two three four five six. " * 200}) + "\n"
    )
    with contextlib.redirect_stdout(io.StringIO()):
        words = "--parts contexts --contexts 24,48 --models mamba2 --quick --rounds 1"
        assert main(["bench", "decode", *words.split(), "--out", str(folder / "decode.json")]) == 0
    return folder


def how_to(page):
    return (ROOT / "docs/how-to" / f"{page}.md").read_text()


def published(folder):
    """Models that are converted and attached to: of transformers, and of ours without blocks."""
    import transformers

    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 1,
    }
    for name in ("MAMBA2", "SOURCE"):
        transformers.Mamba2ForCausalLM(
            transformers.Mamba2Config(vocab_size=257, chunk_size=16, **shape)
        ).save_pretrained(folder / name)
        shutil.copy(folder / "DATA/tokenizer.json", folder / name)
    released(folder / "AUTHORS", model_kwargs())
    shutil.copy(folder / "DATA/tokenizer.json", folder)
    for name in ("mamba2", "transformer"):
        save(small(name, vocab=257), folder / "models" / name, load_file(folder / "DATA"))


@pytest.fixture
def room(furnished, tmp_path, monkeypatch):
    """A copy of the furnished folder to work in; the demo and what doctor
    keeps are of this folder too."""
    folder = tmp_path / "room"
    shutil.copytree(furnished, folder, symlinks=True)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # as PYTHONPATH=. of a command does
    (tmp_path / "demo").mkdir()
    invented_demo(tmp_path / "demo", monkeypatch)
    monkeypatch.setattr(chunks, "path", lambda: tmp_path / "chunks.json")
    monkeypatch.setattr(chunks, "stored", cache(chunks.stored.__wrapped__))
    monkeypatch.setattr(
        "amor.bench.chunks.TOKENS", 40
    )  # of `doctor --measure`: chunks of 2,048 tokens take a minute
    monkeypatch.setattr(
        "amor.bench.rates.LENGTHS", (30, 60)
    )  # of `bench decode --model`: prompts of 16,384 tokens do too
    monkeypatch.setattr(
        "amor.bench.machine.gemm_rate", lambda: 100.0
    )  # as fast as a machine of today
    monkeypatch.setattr("amor.bench.machine.bandwidth", lambda: 20.0)
    monkeypatch.setattr("amor.bench.decode.ROOM", 2)  # tokens of a round
    for module in (bench, benchmarks):
        monkeypatch.setattr(module, "run_suite", measured_once)
    return folder


run_suite, RESULTS = bench.run_suite, {}


def measured_once(suite, args):
    """A suite that measures only what it has not measured before: --bars, --out and
    --json change nothing about it."""
    options = sorted(
        (key, value) for key, value in vars(args).items() if key not in ("bars", "out", "json")
    )
    key = f"{suite.__name__} {options}"
    if key not in RESULTS:
        RESULTS[key] = run_suite(suite, args)
    return dict(RESULTS[key])


def shrunk(text, table=SHRUNK):
    for pattern, replacement, _ in table:
        text = re.sub(pattern, replacement, text)
    return text if table is SHRUNK_PYTHON else re.sub(" +", " ", text)


def verb_and_words(command):
    """What `amor` is called with, however it is started; None where it is not `amor`."""
    words = shlex.split(command)
    if "amor" not in words:
        return None
    return words[words.index("amor") + 1 :]


def is_installation(command):
    """Whether a command installs from the network: it is checked, and not run."""
    return command.startswith("pip install ")


def parsed(command):
    """An example that is not run names a verb and options that exist,
    or an extra of the package."""
    words = verb_and_words(command)
    if words:
        parser_of(words[0]).parse_args(words[1:])
    for script in re.findall(r"python (\S+)", command):
        assert (ROOT / script).is_file(), script
    for constraints in re.findall(r"-c (\S+)", command if is_installation(command) else ""):
        assert (ROOT / constraints).is_file(), constraints
    for extra in re.findall(r"\.\[(\w+)\]", command):
        assert (
            extra
            in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
                "optional-dependencies"
            ]
        ), extra


def begin_anew(words, made):
    """What a command writes is not there before its first example: the folder is
    furnished for those that read."""
    if words[0] not in ("train", "prepare", "demo", "convert", "attach"):
        return
    out = Path(parser_of(words[0]).parse_args(words[1:]).out or "runs/nowhere")
    if out.exists() and out not in made:
        shutil.rmtree(out)
    made.add(out)


def ran(command, made, monkeypatch):
    """Run a shell example; what is wrong with it, or nothing."""
    given, pipe, rest = command.partition(" | ")
    command = rest if pipe else command
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode() if pipe else b"")))
        while assigned := re.match(r"([A-Z_]+)=(\S+) ", command):
            patch.setenv(assigned[1], assigned[2])
            command = command[assigned.end() :]
        words = shlex.split(command)
        command = main
        if words[:3] == ["python", "-m", "benchmarks"]:
            command, words = benchmarks.main, words[2:]
        elif words[0] != "amor":
            done = subprocess.run(words, capture_output=True, text=True, check=False)
            return done.stderr if done.returncode else ""
        if command is main:
            begin_anew(words[1:], made)
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                code = command(words[1:])
            except SystemExit as left:
                code = left.code
        return said.getvalue() or f"exit code {code}" if code else ""


def ran_python(code, names):
    """Run a Python example after those above it in its document; what
    is wrong with it, or nothing."""
    for beginning, file in QUOTED.items():
        if code.startswith(beginning):
            lines = [line.strip() for line in code.splitlines() if line.strip() != "..."]
            source = [line.strip() for line in (ROOT / file).read_text().splitlines()]
            place = 0
            for line in lines:
                after = [source[i].rstrip(",") for i in range(place, len(source))]
                if line not in after:
                    return f"{file} has no line {line!r} there"
                place += after.index(line) + 1
            return ""
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(shrunk(code, SHRUNK_PYTHON), "example", "exec"), names)
    return ""


DOCUMENTS = documents()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_example_of_a_document_runs(document, room, monkeypatch):
    wrong, made, done, names = {}, set(), set(), {}
    for example in DOCUMENTS[document]:
        if example.python:
            found = ran_python(example.text, names)
        elif example.text in NOT_RUN or is_installation(example.text):
            found = parsed(example.text)
        else:
            command = shrunk(example.text)
            found = "" if command in done else ran(command, made, monkeypatch)
            done.add(command)
        if found:
            wrong[example.text] = found
    assert not wrong


def test_what_is_not_run_and_what_is_shrunk_are_examples_that_exist():
    """A name or a rewrite that nothing needs any more would hide the next
    example that looks like it."""
    shell = [
        example.text
        for examples in DOCUMENTS.values()
        for example in examples
        if not example.python
    ]
    code = [
        example.text for examples in DOCUMENTS.values() for example in examples if example.python
    ]
    assert not set(NOT_RUN) - set(shell)
    assert not [
        beginning for beginning in QUOTED if not any(text.startswith(beginning) for text in code)
    ]
    for table, texts in ((SHRUNK, shell), (SHRUNK_PYTHON, code)):
        for number, (pattern, _, _) in enumerate(table):
            assert any(re.search(pattern, shrunk(text, table[:number])) for text in texts), pattern


def test_no_example_is_overlooked():
    page = """
Text with `amor info mamba2 --scale
tiny` in it, and the verb `amor check` alone.

    amor check amor-mamba2     # a comment
    numbers 1 2 3

    import amor
    amor.preset("mamba2", "tiny")

```bash
AMOR_KERNELS=reference amor doctor --quick
```
"""
    kept = [
        "amor check amor-mamba2",
        'import amor\namor.preset("mamba2", "tiny")',
        "AMOR_KERNELS=reference amor doctor --quick",
    ]
    assert [example.text for example in in_markdown(page)] == [
        *kept,
        "amor info mamba2 --scale tiny",
    ]
    with pytest.raises(AssertionError, match="nobody knows how to run"):
        list(in_markdown("```bash\ncurl somewhere\n```\n"))


def test_an_example_that_is_wrong_is_found(room, monkeypatch):
    assert "no recipe" in ran("amor train tiny/no-such-recipe", set(), monkeypatch)
    assert "no option --lenght" in ran("amor check RUN --lenght 3", set(), monkeypatch)
    with pytest.raises(SystemExit):
        parsed("amor prepare hf:NAME --otu data")
    with pytest.raises(AssertionError, match="nothing"):
        parsed("pip install -e '.[nothing]'")
