"""`amor bench batch` beside another program, llama.cpp for instance, round by round in turn.

  python -m benchmarks beside --command ./their-rows.sh --models mamba2 --batches 1,8

Each of our rounds is followed by one of `COMMAND MODEL FORMAT MODE` (MODE is decode:ROWS:STEPS or
prefill:TOKENS), which prints one line of JSON with tok_s_best, the tokens per second of its best
repetition. The ratio of the two is reported.
"""

import argparse
import json
import shlex
import subprocess
from typing import Any

from amor.bench import batch
from amor.bench.batch import BatchCase
from amor.bench.table import BenchmarkTable
from amor.bench.timing import clock, from_rounds
from amor.errors import AmorError

ROWS = batch.ROWS


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `amor bench batch`, and the other program."""
    batch.arguments(parser)
    parser.add_argument("--command", required=True, help="the other program")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return the table for JSON."""
    table = BenchmarkTable("beside", args.quick)
    for case in batch.cases(args):
        case.work()  # compiles and allocates
        ours, theirs = [], []
        for _ in range(args.rounds):
            ours.append(clock(case.work))
            theirs.append(case.tokens / other_rate(args.command, case))
        times = {"amor": from_rounds(ours), "beside": from_rounds(theirs)}
        row = batch.add_row(table, case, times)
        label = f"{case.model} {case.weights} {case.mode}"
        row.numbers[f"tokens/s beside, {label}"] = case.tokens / row.seconds["beside"]
        row.add_ratio(f"{label} over the other", times["beside"], times["amor"])
        row.show()
    return table.result()


def other_rate(command: str, case: BatchCase) -> float:
    """Tokens per second of the other program."""
    words = [*shlex.split(command), case.model, case.weights, case.mode]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    try:
        return float(json.loads(done.stdout.strip().splitlines()[-1])["tok_s_best"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:] or ["nothing"]
        raise AmorError(
            f"--command {' '.join(words)} printed no JSON with tok_s_best ({error}): {last[0]}"
        ) from None
