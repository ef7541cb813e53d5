"""What the fuzzer gives nonsense to: a stock of valid inputs, made once, and for each surface the
files that are spoiled and the commands that read them; and command lines, verb by verb."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nonsense import toml


@dataclass(frozen=True)
class Surface:
    """Files of the stock, which of them are spoiled, and what then reads them.

    An act is a command line; @ is the folder of the case, {task} the evaluation task of the spoiled
    file. One that begins with `python` calls a function of this file.
    """

    needs: tuple[str, ...]  # of the stock
    spoils: tuple[str, ...]  # patterns in the folder of the case; one file of them
    acts: tuple[str, ...]


GENERATE = "--prompt 'ab c' --max-tokens 2 --temperature 0"
PREPARE = "prepare texts --out data --tokenizer bytes --valid 0.1 --workers 1"
DRY = "train @/recipe.toml --data @/data --dry-run --flops 1e10"
TRAIN = "train @/recipe.toml --data @/data --out @/new --steps 1"
ATTACH = "--out @/new --blocks 1 --head-size 16 --text @/book.txt"
EVAL = "eval @/model --data @/rows --out @/new --limit 2 --max-length 64"
STUDY = "study @/study.toml --data @/data --out @/study --plan"
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")
RUN = ("run", "data", "recipe.toml")
READS_RUN = (
    "report @/run --quick",
    "report @/run @/run",
    "info @/run",
    "train @/recipe.toml --data @/data --out @/run --steps 4",
)
# a folder as another library publishes it, and whether blocks can be attached to it
SOURCES = {
    "mamba2-hf": True,
    "mamba2-ssm": True,
    "gated-deltanet-fla": True,
    "llama": False,
    "authors": False,
    "authors-shards": False,
}
SUITES = ("common-sense", "retrieval", "longbench", "length-extrapolation", "niah", "perplexity")

SURFACES: dict[str, Surface] = {
    "model/config": Surface(
        ("model",),
        ("model/config.json",),
        ("info @/model", f"generate @/model {GENERATE}", "convert @/model --out @/new --to hf"),
    ),
    "model/weights": Surface(
        ("model",),
        ("model/model.safetensors",),
        (
            f"generate @/model {GENERATE}",
            "trace @/model --text 'ab c'",
            "convert @/model --out @/new --to hf",
        ),
    ),
    "tokenizer/bytes": Surface(
        ("model",), ("model/tokenizer.json",), (f"generate @/model {GENERATE}",)
    ),
    "tokenizer/bpe": Surface(
        ("plain", "bpe.json", "texts"),
        ("bpe.json",),
        (
            f"generate @/plain --tokenizer @/bpe.json {GENERATE}",
            "prepare @/texts --out @/new --tokenizer @/bpe.json --valid 0.1 --workers 1",
            "convert @/plain --out @/new --tokenizer @/bpe.json --to hf",
        ),
    ),
    "recipe": Surface(("data", "recipe.toml"), ("recipe.toml",), (DRY,)),
    "data/manifest": Surface(("data", "recipe.toml"), ("data/train/manifest.json",), (TRAIN, DRY)),
    "data/valid": Surface(("data", "recipe.toml"), ("data/valid/manifest.json",), (DRY,)),
    "data/shard": Surface(("data", "recipe.toml"), ("data/train/*.bin",), (TRAIN,)),
    "data/journal": Surface(
        ("data", "texts"),
        ("data/prepare.json",),
        (PREPARE,),
    ),
    "data/source": Surface(
        ("sources",),
        ("sources/*",),
        ("prepare @/sources --out @/new --tokenizer bytes --valid 0.5 --workers 1",),
    ),
    "state": Surface(("model", "state.safetensors"), ("state.safetensors",), ("python read_on",)),
    "bars": Surface(("bars.toml",), ("bars.toml",), ("python bars_of",)),
    "bench": Surface(("decode.json",), ("decode.json",), ("report @/decode.json",)),
    "prompts": Surface(
        ("model", "prompts.jsonl"),
        ("prompts.jsonl",),
        ("generate @/model --batch @/prompts.jsonl --max-tokens 2",),
    ),
    "text": Surface(
        ("model", "plain", "book.txt"),
        ("book.txt",),
        (
            "trace @/model --file @/book.txt --limit 20",
            f"attach @/plain {ATTACH}",
            "eval @/model --suite perplexity --text @/book.txt --context 32 --out @/new",
        ),
    ),
    **{
        f"run/{name}": Surface(RUN, (f"run/{name}",), READS_RUN)
        for name in ("metrics.jsonl", "events.jsonl", "config.json", "machine.json")
    },
    "run/findings": Surface(RUN, ("run/findings.json",), READS_RUN[:3]),
    "run/recall": Surface(RUN, ("run/recall.json", "run/recall/by_policy.json"), READS_RUN[:3]),
    "run/checkpoint": Surface(
        RUN, ("run/latest/*.json", "run/latest/*.safetensors"), READS_RUN[2:]
    ),
    "attach": Surface(
        ("plain", "book.txt"),
        tuple(f"plain/{name}" for name in MODEL_FILES),
        (f"attach @/plain {ATTACH}",),
    ),
    **{
        f"convert/{name}/{what}": Surface(
            (name, "book.txt"),
            tuple(f"{name}/{file}" for file in files),
            (f"convert @/{name} --out @/new",)
            + ((f"attach @/{name} {ATTACH}",) if recurrent else ()),
        )
        for name, recurrent in SOURCES.items()
        for what, files in {
            "config": ("config.json",),
            "weights": ("*.safetensors", "*.bin"),
            "others": ("tokenizer*.json", "generation_config.json", "*index.json", "manifest.json"),
        }.items()
    },
    "convert/back": Surface(
        ("authors-ours",),
        tuple(f"authors-ours/{name}" for name in MODEL_FILES),
        ("convert @/authors-ours --out @/new --to authors",),
    ),
    "convert/llama2c": Surface(
        ("llama2c", "book.txt"),
        ("llama2c/*.bin",),
        ("convert @/llama2c --out @/new", "convert @/llama2c/m.bin --out @/new --tokenizer bytes"),
    ),
    "tokenizer/bos": Surface(
        ("llama2c-ours", "book.txt"),
        ("llama2c-ours/tokenizer.json",),
        (
            f"generate @/llama2c-ours {GENERATE}",
            f"generate @/llama2c-ours --no-bos --stop-id 1 {GENERATE}",
            "trace @/llama2c-ours --text ab --bos",
            "eval @/llama2c-ours --suite perplexity --text @/book.txt --context 32 --out @/new",
        ),
    ),
    "router": Surface(
        ("routed",),
        ("routed/config.json", "routed/fit.json", "routed/model.safetensors"),
        (f"generate @/routed {GENERATE}", "info @/routed", "fit @/routed --out @/new --detach"),
    ),
    "hf/config": Surface(
        ("hf",),
        ("hf/config.json",),
        ("python from_pretrained", "convert @/hf --out @/new", f"generate @/hf {GENERATE}"),
    ),
    "hf/others": Surface(
        ("hf",),
        ("hf/generation_config.json", "hf/tokenizer*.json", "hf/special_tokens_map.json"),
        ("python from_pretrained", "convert @/hf --out @/new"),
    ),
    "hf/weights": Surface(
        ("hf",), ("hf/*.safetensors",), ("python from_pretrained", "convert @/hf --out @/new")
    ),
    "eval/rows": Surface(
        ("model", "rows"),
        ("rows/**/*.jsonl", "rows/**/*.gz"),
        (EVAL + " --suite {suite} --task {task} --lengths 40,60 --samples 1 --segments 1",),
    ),
    "eval/store": Surface(
        ("model", "rows", "evaluated"),
        ("evaluated/*",),
        ("eval @/model --data @/rows --out @/evaluated --limit 1 --task piqa",),
    ),
    "results/scores": Surface(
        ("evals",),
        ("evals/*/*.json",),
        (
            "table @/evals/a @/evals/b",
            "table @/evals/a @/evals/b --suite common-sense --gates --floor @/evals/untrained",
            "table @/evals/a --suite length-extrapolation --figure @/new.svg",
            "compare @/evals/a @/evals/b --samples 50",
        ),
    ),
    "results/samples": Surface(
        ("evals",),
        ("evals/*/samples_*.jsonl",),
        (
            "table @/evals/a @/evals/b --suite common-sense --floor @/evals/untrained",
            "table @/evals/a @/evals/b --suite niah --format latex",
            "compare @/evals/a @/evals/b --samples 50",
        ),
    ),
    "results/pages": Surface(("results",), ("results/*.json",), ("python results_page",)),
    "study/definition": Surface(("study.toml", "data"), ("study.toml",), (STUDY,)),
    "study/ledger": Surface(
        ("study.toml", "data", "study"), ("study/*.json",), (STUDY, "python study_tables")
    ),
    "study/measurements": Surface(
        ("study.toml", "data", "study"),
        ("study/runs/*/*/judged/*.json",),
        (STUDY, "python study_tables", "python study_tables"),
    ),
}

# every verb, and a line whose mutations cannot run for long: nothing trains for a number of steps
COMMANDS = {
    "info": (
        "info @/model --fire-rate 0.3 --context 99",
        "info amor-mamba2 --scale tiny --set width=64",
    ),
    "generate": (
        "generate @/model --prompt ab --max-tokens 2 --temperature 0.8 --top-k 5 --top-p 0.9 "
        "--min-p 0.1 --seed 1 --rows 2",
        "generate @/model --prompt ab --max-tokens 2 --gate always --weights int8 "
        "--repetition-penalty 1.1 --stop x",
        "generate @/model --batch @/prompts.txt --max-tokens 2 --out @/texts.jsonl",
    ),
    "trace": (
        "trace @/model --text ab --limit 20 --gate never --out @/traced",
        "trace @/model --file @/prompts.txt --html @/trace.html --fire-rate 0.5",
        "trace @/model --value --data @/data/valid --windows 2 --context 8",
    ),
    "train": (
        "train @/recipe.toml --data @/data --dry-run --flops 1e10 --set lr.peak=1e-3",
        "train @/recipe.toml --data @/data --dry-run --flops 1e10 --steps 5 "
        "--set model.name=transformer --set context=16",
    ),
    "prepare": (
        "prepare @/texts --out @/prepared --tokenizer bytes --valid 0.1 --shard-tokens 1000 "
        "--workers 1 --separator x",
        "prepare @/texts --out @/prepared --tokenizer bpe:300 --field text --errors replace "
        "--workers 1",
    ),
    "report": (
        "report @/run --quick",
        "report @/run @/run --figure @/curves.svg",
        "report @/decode.json --figure @/decode.svg",
    ),
    "check": (
        "check amor-mamba2 --scale tiny --set width=64 --set vocab=50 --set pattern=mamba2 "
        "--length 8 --rows 2 --seed 1",
    ),
    "bench": ("bench ops --quick --rounds 1 --out @/ops.json --only nothing",),
    "convert": (
        "convert @/mamba2-hf --out @/new --to amor --vocab 200 --tokenizer bytes",
        "convert @/model --out @/new --to hf --shard-size 5GB --json",
    ),
    "attach": (
        "attach @/plain --out @/new --blocks 1 --head-size 16 --text @/book.txt --gate entropy "
        "--fire-rate 0.2 --probe block --vocab 280",
    ),
    "fit": (
        "fit @/model --data @/data --out @/new --target entropy --hidden 8 --tokens 64 "
        "--windows 2 --context 16 --no-frontier --seed 1",
    ),
    "eval": (
        "eval @/model --data @/rows --out @/new --suite common-sense --task piqa --limit 1 "
        "--gates model,closed --path likelihood --max-length 64 --rows 2 --seed 1",
        "eval @/model --out @/new --suite perplexity --text @/book.txt --context 32 --no-bos",
    ),
    "table": (
        "table @/evals/a @/evals/b --suite niah --format markdown --scale 180M --figure @/a.svg",
    ),
    "compare": ("compare @/evals/a @/evals/b --suite common-sense --samples 50 --seed 1",),
    "recall": (
        "recall @/model --task mqar --set pairs=2 --set vocab=200 --rows 2 --seed 1 --gate always",
    ),
    "study": (
        "study @/study.toml --data @/data --out @/study --plan --jobs 1 --only a --steps 1 "
        "--seeds 1 --set lr.peak=1e-3 --format latex",
    ),
}
WORDS = (
    *("", "x", "-1", "0", "1", "1e9", "10000000000", "99999999999999999999", "9" * 23, "9" * 5000),
    *("1e400", "nan", "inf", "-inf", "0.5", "0x10", "٣", "1_0", "1,1", "a,,b"),
    *("@", "@/none", "@/model", "@/prompts.txt", "/dev/null", "/dev/null/x", "a\0b", "n" * 300),
    *("@/" + "n" * 300, "--", "-", "--help=1", "=", "a=b", "width=", "=1", "blocks.count=-1"),
    *("width=100000000000000000000", "vocab=1e12", "pattern=mamba2 x 100000000"),
    *("é", "\ud800", "\udcff", "@/\udcff", "a=\ud800", "\n", "a\nb"),
)
COMMAND_NEEDS = (
    *("model", "plain", "run", "data", "texts", "rows", "evals", "mamba2-hf", "book.txt"),
    *("recipe.toml", "study.toml", "prompts.txt", "decode.json"),
)


def names() -> list[str]:
    """Every surface: files, then command lines by verb."""
    return [*SURFACES, *(f"command/{verb}" for verb in COMMANDS)]


def command(verb: str, chance: random.Random) -> list[str]:
    """A command line with one or two words replaced, removed, added or doubled."""
    words = chance.choice(COMMANDS[verb]).split()
    for _ in range(chance.choice([1, 1, 2])):
        if len(words) == 1:
            break
        where, what = chance.randrange(1, len(words)), chance.random()
        if what < 0.2 and words[where].startswith("--"):
            words[where : where + 2] = [f"{words[where]}={chance.choice(WORDS)}"]
        elif what < 0.7:
            words[where] = chance.choice(WORDS)
        elif what < 0.8:
            del words[where]
        elif what < 0.9:
            words.insert(where, chance.choice(WORDS))
        else:
            words.insert(where, words[where])
    return words


def needs(name: str) -> tuple[str, ...]:
    """What a surface needs of the stock."""
    return SURFACES[name].needs if name in SURFACES else COMMAND_NEEDS


def task_of(file: str) -> tuple[str, str]:
    """The suite and the task that read a file of rows."""
    from amor.eval.tasks import in_suite

    for suite in SUITES:
        for task, spec in in_suite(suite).items():
            substitute = getattr(spec, "substitute", None)
            files = (getattr(spec, "file", ""), substitute.file if substitute else "")
            if any(file in one for one in files if one):
                return suite, task
    return "niah", "niah_single_2"  # the essays


# --- acts that are no command line: a function of the folder that answers like a verb


@contextlib.contextmanager
def answering(name: str) -> Iterator[list[int]]:
    """The exit code of the block, as a command would give it."""
    from amor.errors import AmorError

    code = [0]
    try:
        yield code
    except AmorError as error:
        print(f"amor {name}: {' '.join(str(error).split())}", file=sys.stderr)
        code[0] = 2


def read_on(folder: Path) -> int:
    """A State from a file, read on from by the steps of a model it may not be of."""
    import torch

    import amor

    with answering("state") as code:
        model = amor.load(folder / "model")[0]
        session = amor.Engine(model).resume(amor.State.load(folder / "state.safetensors"))
        session.step(torch.zeros(session.rows, dtype=torch.long))
        state = amor.State.load(folder / "state.safetensors")
        model(torch.zeros(session.rows, 2, dtype=torch.long), state)
    return code[0]


def bars_of(folder: Path) -> int:
    """The bars of the project's own benchmarks."""
    sys.path.append(str(Path(__file__).parent.parent))  # benchmarks/ is not installed
    from benchmarks import bars
    from benchmarks.__main__ import rows_of_suites

    with answering("bars") as code:
        bars.load(folder / "bars.toml", rows_of_suites())
    return code[0]


def from_pretrained(folder: Path) -> int:
    """The folder as transformers opens it. What transformers refuses before any code of ours runs
    is its own answer, in its own words."""
    import torch

    import amor.hf

    with answering("from_pretrained") as code:
        try:
            model = amor.hf.AmorForCausalLM.from_pretrained(folder / "hf")
            model.generate(torch.ones(1, 2, dtype=torch.long), max_new_tokens=2, do_sample=False)
        except Exception as error:
            if "amor" in {package_of(frame) for frame in frames(error)} or is_ours(error):
                raise
            print(f"amor from_pretrained: {type(error).__name__}", file=sys.stderr)
            code[0] = 2
    return code[0]


def is_ours(error: BaseException) -> bool:
    return type(error).__module__.startswith("amor")


def frames(error: BaseException) -> Iterator[str]:
    """The files an error passed through, without this one."""
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code.co_filename != __file__:
            yield at.tb_frame.f_code.co_filename
        at = at.tb_next


def package_of(file: str) -> str:
    inside = Path(__file__).parent.parent / "amor"
    return "amor" if Path(file).is_relative_to(inside) else ""


def study_tables(folder: Path) -> int:
    """Tables and page of a study from its files, without training or measuring anything."""
    from amor.study import result_page, results

    with answering("study") as code:
        result_page.write(results.read(folder / "study"))
    return code[0]


def results_page(folder: Path) -> int:
    """The page of results, from files of measurements."""
    sys.path.append(str(Path(__file__).parent.parent))  # benchmarks/ is not installed
    from benchmarks import results

    with answering("results") as code:
        results.page(results.read(folder / "results"))
    return code[0]


PYTHON: dict[str, Callable[[Path], int]] = {
    function.__name__: function
    for function in (read_on, bars_of, from_pretrained, study_tables, results_page)
}

# --- the stock

STUDY_TOML = """
title = "t"
baseline = "a"
tables = ["models", "gates", "value"]
figures = ["losses"]
judge = {size = {}, loss = {windows = 2}, gate = {}, value = {windows = 2}}
runs = [{name = "a", model = "mamba2"}, {name = "b", model = "amor-mamba2"}]
[set]
steps = 2
context = 8
batch = 2
micro_batch = 2
eval = {every = 1, windows = 2}
[set.model.changes]
vocab = 512
width = 32
d_ff = 48
pattern = "mamba2"
mixers.mamba2 = {head_size = 16, state_size = 16}
blocks.head_size = 16
"""
RECALL = {
    **{"model": "m", "task": {"kind": "mqar", "pairs": 2}, "gate": "entropy", "seed": 0},
    **{"rows": 2, "questions": 2, "answers": 2, "chance": 0.1},
    **{"token": {"mean": 0.5, "se": 0.1}, "whole": {"mean": 0.5, "se": 0.1}},
    **{"nll_questions": {"mean": 1.0, "se": 0.1}, "nll_elsewhere": {"mean": 1.0, "se": None}},
    **{"blocks": [{"questions": 0.5, "elsewhere": 0.2}], "state": {"fixed": 9, "a_token": 9}},
}
PROSE = "The quick brown fox jumps over the lazy dog, and nobody minds.\n"


def make_stock(folder: Path) -> None:
    """Every valid input, made by the program itself; some thirty seconds."""
    for make in (make_run, make_models, make_sources, make_evaluations, make_study):
        make(folder)


def run_verb(line: str, folder: Path) -> None:
    from amor.cli import main

    code = main([word.replace("@", str(folder)) for word in line.split()])
    assert code == 0, line


def make_run(folder: Path) -> None:
    """Texts, prepared data, a recipe and a run of it."""
    from training import corpus, small_recipe

    from amor.records.run import Event
    from amor.run import Run

    corpus(folder / "made")
    shutil.copytree(folder / "made/texts", folder / "texts")
    os.chdir(folder)  # a journal holds the paths of sources as they were given
    run_verb(PREPARE, folder)
    tree = small_recipe(folder / "data", steps=4).to_dict() | {"data": ""}
    (folder / "recipe.toml").write_text(toml({k: v for k, v in tree.items() if v is not None}))
    run_verb("train @/recipe.toml --data @/data --out @/run", folder)
    Run(folder / "run").happened(Event(event="resumed", step=2))
    (folder / "run/recall.json").write_text(json.dumps(RECALL))
    (folder / "run/recall").mkdir()
    policies = ("gate", "chance", "everywhere", "never")
    by_policy = {"rate": 0.2} | {name: {"mean": 0.5, "se": 0.1} for name in policies}
    (folder / "run/recall/by_policy.json").write_text(json.dumps(by_policy))
    sources = folder / "sources"
    sources.mkdir()
    texts = [path.read_text() for path in sorted((folder / "texts").iterdir())[:12]]
    (sources / "a.txt").write_text(texts[0])
    (sources / "b.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts[1:]))


def make_models(folder: Path) -> None:
    """A gated model, one without blocks, and what is read beside them."""
    from laws import small

    import amor
    from amor.data.tokenizer import bytes_tokenizer, train_bpe

    shutil.copytree((folder / "run/latest").resolve(), folder / "model")
    if not (folder / "model/tokenizer.json").exists():
        shutil.copy(folder / "data/tokenizer.json", folder / "model/tokenizer.json")
    amor.save(small("mamba2", vocab=280), folder / "plain", bytes_tokenizer())
    model, _ = amor.load(folder / "model")
    amor.Engine(model).prefill([[1, 2, 3], [4, 5]]).state.save(folder / "state.safetensors")
    run_verb("convert @/model --out @/hf --to hf", folder)
    train_bpe([PROSE, PROSE.upper()], 270).save(str(folder / "bpe.json"))
    (folder / "book.txt").write_text(PROSE * 20)
    (folder / "prompts.txt").write_text("ab c\nde\n")
    (folder / "prompts.jsonl").write_text('"ab c"\n{"prompt": "de"}\n')
    shutil.copy(Path(__file__).parent.parent / "benchmarks/bars.toml", folder / "bars.toml")
    fit = "fit @/model --data @/data --out @/routed --hidden 8 --tokens 64 --windows 2"
    run_verb(f"{fit} --context 16 --no-frontier", folder)
    for path in sorted((Path(__file__).parent.parent / "results").glob("*.json"))[::7]:
        (folder / "results").mkdir(exist_ok=True)
        shutil.copy(path, folder / "results")
    bench = "bench decode --quick --models amor-mamba2,mamba2 --contexts 16 --fire-rates 0.5"
    run_verb(f"{bench} --rounds 1 --out @/decode.json", folder)


def make_sources(folder: Path) -> None:
    """A folder of every layout that is converted, the authors' in one file and in shards."""
    from authors_folders import model_kwargs, released
    from test_convert import gdn_fla, llama, mamba2_hf, mamba2_ssm
    from test_convert_llama2c import checkpoint, pieces

    from amor.data.tokenizer import bytes_tokenizer

    mamba2_hf(tie_word_embeddings=True).save_pretrained(folder / "mamba2-hf")
    llama().save_pretrained(folder / "llama")
    gdn_fla(folder / "gated-deltanet-fla")
    mamba2_ssm(folder / "mamba2-ssm")
    released(folder / "authors", model_kwargs(), head=True)
    released(folder / "authors-shards", model_kwargs("gdn", blocks=1), shards=2)
    for name in SOURCES:
        bytes_tokenizer().save(str(folder / name / "tokenizer.json"))
        config: dict[str, Any] = {"model_max_length": 64, "eos_token": "<|endoftext|>"}
        config |= {"add_bos_token": True, "bos_token": {"content": "<|endoftext|>"}}
        (folder / name / "tokenizer_config.json").write_text(json.dumps(config))
    run_verb("convert @/authors --out @/authors-ours", folder)
    checkpoint(folder / "llama2c/m.bin", pieces(False))
    run_verb("convert @/llama2c --out @/llama2c-ours", folder)


def make_evaluations(folder: Path) -> None:
    """Rows of every task, an evaluation that can go on, and evaluations to be compared."""
    import evaluations
    from eval_rows import LONG, ROWS, write

    rows = write(folder / "rows", ROWS | {"longbench_qasper": LONG, "longbench_trec": LONG})
    text = json.dumps({"text": PROSE * 3}) + "\n"
    (rows / "lengths_pg19.jsonl").write_text(text * 2)
    evaluations.folders(folder / "evals")
    run_verb("eval @/model --data @/rows --out @/evaluated --limit 1 --task piqa", folder)


def make_study(folder: Path) -> None:
    """A study of two runs, trained and judged, by a fork of this process."""
    import studying

    (folder / "study.toml").write_text(STUDY_TOML)
    words = f"{folder}/study.toml --data {folder}/data --out {folder}/study --jobs 1"
    child = os.fork()
    if not child:
        studying.study_alone(words.split(), folder / "study.log")
    assert os.waitpid(child, 0)[1] == 0, (folder / "study.log").read_text()[-2000:]
