"""Small evaluation folders, invented: what `amor eval` would write, from
lists of numbers a document."""

import json
import math
import statistics
from pathlib import Path

import numpy as np

COMMON = (
    "hellaswag",
    "piqa",
    "arc_easy",
    "arc_challenge",
    "winogrande",
    "openbookqa",
    "truthfulqa_mc2",
)
LONG = ("narrativeqa", "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "musique", "gov_report")
LONG += ("qmsum", "multi_news", "trec", "triviaqa", "samsum", "lcc", "repobench-p")


def about(suite, name="a", gates="model", path="likelihood", tasks=(), fires=(30, 40), **more):
    """The key `amor`; keyword arguments such as `limit`, `harness`, `sha256`,
    `tokens`, `curves` change it."""
    settings = {
        "gates": gates,
        "path": path,
        "harness": more.pop("harness", "0.4.13"),
        "limit": more.pop("limit", None),
    }
    model = {
        "name": name,
        "folder": f"runs/{name}",
        "fingerprint": name * 4,
        "parameters": 1000,
        "tokens": more.pop("tokens", 5000),
    }
    data = {
        task: {"source": f"{task}.jsonl", "sha256": more.pop("sha256", "f" * 64), "rows": 9}
        for task in tasks
    }
    return {
        "version": 1,
        "suite": suite,
        "model": model,
        "tokenizer": "t",
        "settings": settings,
        "data": data,
        "gates": {
            task: {
                "prefill": {"tokens": 100, "fires": list(fires)},
                "target": {"tokens": 100, "fires": list(fires)},
            }
            for task in tasks
        },
        "timing": {"seconds": 1.0, "computed": 1, "reused": 0, "tokens": 1},
        **more,
    }


def evaluated(folder, suite, scores, samples=True, **more):
    """Write a suite: task -> metric -> a number a document (None: of
    another length). Returns the file."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    known = about(suite, tasks=tuple(scores), **more)
    path, gates = known["settings"]["path"], known["settings"]["gates"]
    mark = (".decode" if path == "decode" else "") + ("" if gates == "model" else f".{gates}")
    results = {task: {"alias": task} | summed(metrics) for task, metrics in scores.items()}
    counts = {task: max(map(len, metrics.values())) for task, metrics in scores.items()}
    tree = {
        "results": results,
        "n-samples": {t: {"original": n, "effective": n} for t, n in counts.items()},
        "versions": {},
        "amor": known,
    }
    file = folder / f"{suite}{mark}.json"
    file.write_text(json.dumps(tree))
    for task, metrics in scores.items() if samples else ():
        rows = [{"doc_id": n, "target": "x", "filter": "none"} for n in range(counts[task])]
        for metric, values in metrics.items():
            for row, value in zip(rows, values):
                row |= {} if value is None else {metric: value}
        (folder / f"samples_{suite}_{task}{mark}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )
    return file


def summed(metrics):
    """As the harness sums up: "acc,none" and "acc_stderr,none"."""
    found = {}
    for metric, given in metrics.items():
        values = [value for value in given if value is not None]
        mean = statistics.mean(values)
        error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else "N/A"
        if metric == "perplexity":
            mean, error = math.exp(-mean), error * math.exp(-mean)
        found |= {f"{metric},none": mean, f"{metric}_stderr,none": error}
    return found


def drawn(rng, count, share):
    return [float(x) for x in rng.random(count) < share]


def common_sense(folder, name, better=0.0, seed=0, count=200, **more):
    """All nine columns; documents are hard or easy for every model alike."""
    hard = np.random.default_rng(7)
    rng = np.random.default_rng(seed)
    scores = {}
    for task in ("lambada_openai", *COMMON):
        ease = hard.random(count)
        scores[task] = {
            "acc": [float(x) for x in ease + better + 0.05 * rng.standard_normal(count) > 0.7]
        }
    scores["lambada_openai"]["perplexity"] = [-float(x) for x in 5 - 5 * better + rng.random(count)]
    return evaluated(folder, "common-sense", scores, name=name, **more)


def needles(folder, name, share, lengths=(1024, 2048, 4096), count=20, seed=0, **more):
    """Three tasks; a document has one length, as in the harness, which writes
    -1 for 4,096 in the others."""
    rng = np.random.default_rng(seed)
    scores = {}
    for task in ("niah_single_1", "niah_single_2", "niah_single_3"):
        total = len(lengths) * count
        scores[task] = {"4096": [-1.0] * total} if 4096 in lengths else {}
        for place, length in enumerate(lengths):
            mine = drawn(rng, count, share * 0.8**place)
            column = scores[task].get(str(length), [None] * total)
            column[place * count : (place + 1) * count] = mine
            scores[task][str(length)] = column
    file = evaluated(
        folder,
        "niah",
        scores,
        name=name,
        lengths={f"{task}/{n}": 0.9 * n for task in scores for n in lengths},
        **more,
    )
    tree = json.loads(file.read_text())
    for task, metrics in scores.items():
        for length in lengths:
            values = [v for v in metrics[str(length)] if v not in (None, -1.0)]
            tree["results"][task] |= {
                f"{length},none": sum(values) / len(values),
                f"{length}_stderr,none": "N/A",
            }
    file.write_text(json.dumps(tree))
    return file


def extrapolated(folder, name, slope, sets=("govreport", "pg19"), blocks=3, **more):
    lengths = [1024 * n for n in (3, 4, 6, 8, 10, 12, 14, 16, 18, 20)]
    curves = {}
    for number, text in enumerate(sets):
        prefix = [12 + 3 * number + slope * max(n - 4096, 0) / 1024 for n in lengths]
        rates = [[min(0.3 + 0.1 * k + n / 60000, 1.0) for k in range(blocks)] for n in lengths]
        curves[text] = {
            "lengths": lengths,
            "segments": 50,
            "prefix": prefix,
            "bucket": [1.3 * p for p in prefix],
            "errors": [0.6] * 10,
        }
        curves[text]["rates"] = rates if blocks else []
    return evaluated(folder, "length-extrapolation", {}, name=name, curves=curves, **more)


def fits_a_column(drawing):
    """A figure is as wide as a column of a paper, and both axes of every panel have titles."""
    assert drawing.get_figwidth() <= 3.3
    for axes in drawing.axes:
        if axes.axison and axes.get_visible():
            place = axes.get_subplotspec()
            assert axes.get_xlabel() or not place.is_last_row()
            assert axes.get_ylabel() or not place.is_first_col()


def folders(root):
    """Two trained models, one of them with gates closed and open too, and an untrained one,
    in every suite that is drawn."""
    root = Path(root)
    for seed, (name, better) in enumerate((("a", 0.1), ("b", 0.0))):
        common_sense(root / name, f"amor-{name}", better, seed)
        needles(root / name, f"amor-{name}", 0.9 - 0.3 * seed, seed=seed)
        extrapolated(root / name, f"amor-{name}", 0.2 + seed)
        evaluated(
            root / name,
            "retrieval",
            {"swde": {"contains": drawn(np.random.default_rng(seed), 40, 0.5)}},
            name=f"amor-{name}",
        )
    common_sense(root / "a", "amor-a", 0.0, 5, gates="closed", fires=(0, 0))
    common_sense(root / "a", "amor-a", 0.12, 6, gates="open", fires=(100, 100))
    common_sense(root / "untrained", "amor-a", 0.0, 9, tokens=0)
