"""A few invented rows for every task that is read from a file; and the harness's generator
of needles, imported cheaply."""

import gzip
import json
from types import SimpleNamespace

CHOICES = {"text": ["a stone", "the sun"], "label": ["A", "B"]}
CLOZE = [
    {
        "context": "[DOC] The harbour of Vadso froze. [PAR] In May it opened",
        "question": "In May it",
        "answers": ["opened"],
    },
    {
        "context": "The mill stood by the river Ouse.",
        "question": "The mill stood by the river",
        "answers": ["Ouse", "the Ouse"],
    },
]
LONG = [
    {
        "context": "Ann has a cat.",
        "input": "Who has a cat?",
        "answers": ["Ann"],
        "all_classes": ["Ann", "Bob"],
        "language": "en",
    },
    {
        "context": "Bob has a dog.",
        "input": "Who has a dog?",
        "answers": ["Bob", "Bobby"],
        "all_classes": ["Ann", "Bob"],
    },
]
ROWS = {
    "lambada_openai_test": [{"text": "the cat sat on the mat"}, {"text": "he opened the old door"}],
    "hellaswag_validation": [
        {
            "activity_label": "Roof",
            "ctx_a": "A man stands.",
            "ctx_b": "he",
            "endings": ["off [title] go.", "sings loudly."],
            "label": "0",
        },
        {
            "activity_label": "Lake",
            "ctx_a": "A boat.",
            "ctx_b": "it",
            "endings": ["flies.", "sinks."],
            "label": "1",
            "ind": 7,
        },
    ],
    "piqa_validation": [
        {"goal": "Dry a cup", "sol1": "Use a towel.", "sol2": "Use a river.", "label": 0},
        {"goal": "Light a lamp", "sol1": "Use a river.", "sol2": "Use a switch.", "label": 1},
    ],
    "arc_easy_test": [
        {"question": "What shines?", "choices": CHOICES, "answerKey": "B"},
        {"question": "What is hard?", "choices": CHOICES, "answerKey": "A"},
    ],
    "arc_challenge_test": [
        {"question": "What burns?", "choices": CHOICES, "answerKey": "B"},
        {
            "question": "What lies?",
            "choices": {"text": ["x", "y", "z"], "label": ["1", "2", "3"]},
            "answerKey": "1",
        },
    ],
    "winogrande_xl_validation": [
        {
            "sentence": "Ann called Sue because _ was late.",
            "option1": "Ann",
            "option2": "Sue",
            "answer": "2",
        },
        {
            "sentence": "The cup fell off the shelf and _ broke.",
            "option1": "cup",
            "option2": "shelf",
            "answer": "1",
        },
    ],
    "openbookqa_test": [
        {"question_stem": "A plant needs", "choices": CHOICES, "answerKey": "B"},
        {"question_stem": "A wall is made of", "choices": CHOICES, "answerKey": "A"},
    ],
    "truthfulqa_mc_validation": [
        {
            "question": "Do pigs fly?",
            "mc2_targets": {"choices": ["No.", "Never.", "Yes."], "labels": [1, 1, 0]},
        },
        {"question": "Is ice warm?", "mc2_targets": {"choices": ["No.", "Yes."], "labels": [1, 0]}},
    ],
    "swde_completion": [
        {
            "doc_id": "1",
            "key": "Year",
            "value": "1977",
            "text": "A film. Year: 1977. Studio: Elm.\n\nYear:",
        },
        {
            "doc_id": "2",
            "key": "Studio",
            "value": "Elm",
            "text": "A film. Year: 1977. Studio: Elm.\n\nStudio:",
        },
    ],
    "fda_completion": [
        {
            "doc_id": "1",
            "key": "device",
            "value": "kit",
            "text": "A. Device: kit B. Applicant: Oak\n\nDevice:",
        },
        {
            "doc_id": "2",
            "key": "applicant",
            "value": "Oak",
            "text": "A. Device: kit B. Applicant: Oak\n\nApplicant:",
        },
    ],
    "squad_v1_dev_subset": [
        {
            "context": "The race is held in June.",
            "question": "When is the race?",
            "answers": {"text": ["June"], "answer_start": [20]},
        },
        {
            "context": "It has 7 rooms.",
            "question": "How many rooms?",
            "answers": {"text": ["7"], "answer_start": [7]},
        },
        {
            "context": "It has nine rooms.",
            "question": "How many rooms?",
            "answers": {"text": ["nine", "9"]},
        },
    ],
    "based_triviaqa": CLOZE,
    "based_nq_2048": CLOZE,
    "based_drop": CLOZE,
    "paul_graham_essays": [
        {
            "name": "one",
            "text": (
                "A river ran past the mill. It was cold! Who would row?\n"
                "  Nobody (or so they said.) answered."
            ),
        },
        {
            "name": "two",
            "text": (
                "Work is a habit. Rest is another one, which few people learn before they are old."
            ),
        },
    ],
}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def write(folder, rows=ROWS, packed=("lambada_openai_test", "paul_graham_essays")):
    """The rows as files: LongBench's and essays in long/, LAMBADA
    beside them, all others in eval/."""
    for name, held in rows.items():
        place = folder / (
            "long"
            if name.startswith(("longbench", "paul"))
            else ""
            if name.startswith("lambada")
            else "eval"
        )
        place.mkdir(parents=True, exist_ok=True)
        if name in packed:
            (place / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines(held)))
        else:
            (place / f"{name}.jsonl").write_bytes(lines(held))
    return folder


def harness_needles(monkeypatch):
    """The harness's module. It asks nltk for its sentences when imported, and pairs all words it
    knows, which takes seconds."""
    import nltk
    import wonderwords

    known = wonderwords.RandomWord()._categories
    few = SimpleNamespace(_categories={kind: sorted(words)[:40] for kind, words in known.items()})
    monkeypatch.setattr(nltk.data, "find", lambda name: name)
    with monkeypatch.context() as while_importing:
        while_importing.setattr(wonderwords, "RandomWord", lambda: few)
        from lm_eval.tasks.ruler import prepare_niah
    return prepare_niah
