"""Suites whose rows are functions with arguments of their own, one set of them for --quick."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from amor.bench.table import BenchmarkRow, BenchmarkTable, run_rows

# name -> (function, its arguments in a full run, and with --quick)
SizedRows = Mapping[str, tuple[Callable[..., BenchmarkRow], tuple[Any, ...], tuple[Any, ...]]]


def run_sized(suite: str, args: argparse.Namespace, rows: SizedRows) -> dict[str, Any]:
    """`run_rows` for functions of the table and their own arguments."""

    def measure(table: BenchmarkTable, name: str) -> list[BenchmarkRow]:
        function, full, quick = rows[name]
        return [function(table, *(quick if args.quick else full))]

    return run_rows(suite, args, rows, measure)
