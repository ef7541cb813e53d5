"""Write a corpus with a model: stories sampled at temperature 1, one line of JSON each.

    python examples/write_stories.py models/stories15M stories.jsonl --stories 20000

Every story starts from the BOS token alone and ends where the model writes BOS again, or after as
many tokens as its context. Stories come in batches, and batch b is drawn with seed SEED + b, so a
run that was stopped goes on where it stopped, and two processes with seeds far apart write
different stories. A line is {"text", "end", "seed", "row"}: end is "stop" for a story that the
model ended, "length" for one that was cut off; `seed` and `row` reproduce it.
`amor prepare stories.jsonl --out data/stories --tokenizer bpe:4096` reads the file.
"""

import argparse
import json
import time
from pathlib import Path

import amor
from amor.vocabulary import prefix_ids

BATCH = 64  # stories per seed; 16 of them are written at the same time


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", help="a model whose texts are separated by BOS")
    parser.add_argument("out", type=Path, help="a .jsonl file; whole batches in it are kept")
    parser.add_argument("--stories", type=int, default=BATCH, help="how many in all")
    parser.add_argument("--seed", type=int, default=0, help="of the first batch")
    parser.add_argument("--weights", default="float16", help="of the engine, as in amor generate")
    args = parser.parse_args()

    model, tokenizer = amor.load(args.model)
    engine, bos = amor.Engine(model, weights=args.weights), prefix_ids(tokenizer, add_bos=True)
    lines = args.out.read_text().splitlines(keepends=True) if args.out.exists() else []
    lines = lines[: len(lines) // BATCH * BATCH]  # a batch that was cut short is written again
    args.out.write_text("".join(lines))
    began, tokens = time.perf_counter(), 0
    for first in range(len(lines), args.stories, BATCH):
        seed, count = args.seed + first // BATCH, min(BATCH, args.stories - first)
        limits = {"max_tokens": model.config.context - len(bos), "stop_ids": bos}
        texts = amor.generate_batch(
            engine, tokenizer, [bos] * count, **limits, temperature=1.0, seed=seed
        )
        with args.out.open("a", encoding="utf-8") as file:
            for row, text in enumerate(texts):
                story = {"text": text.text, "end": text.end, "seed": seed, "row": row}
                file.write(json.dumps(story, ensure_ascii=False) + "\n")
                tokens += len(text.tokens)
        rate = tokens / (time.perf_counter() - began)
        print(f"{first + count:,} of {args.stories:,} stories, {rate:.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
