"""Doors people use: `vllm serve` answers the openai client and tells of the gates, `lm_eval
--model vllm` gives our scores."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from serving import CLOSE, by_ours, fired
from vllm.distributed import cleanup_dist_env_and_memory

import amor
from amor.eval.judge import Judge
from amor.eval.lm import AmorLM
from amor.eval.store import Store

TEXT = "The state of the Union is strong, and it will be"
BIN = Path(sys.executable).parent
OUTSIDE = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")} | {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind"
}


@pytest.fixture(scope="module")
def served(entropy_model, tmp_path_factory):
    """The model, the address of a server of it, and where the server writes its log."""
    model, folder = entropy_model
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [
        BIN / "vllm",
        "serve",
        folder,
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--dtype",
        "float32",
    ]
    command += [
        "--max-model-len",
        "512",
        "--max-num-seqs",
        "4",
        "--kv-cache-memory-bytes",
        str(1 << 27),
        "--served-model-name",
        "tiny",
    ]
    command += ["--enforce-eager"]
    with log.open("w") as out:
        server = subprocess.Popen(
            [str(word) for word in command], stdout=out, stderr=subprocess.STDOUT, env=OUTSIDE
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        yield model, f"http://127.0.0.1:{port}", log
    finally:
        server.send_signal(signal.SIGINT)
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def wait_for(address, server, log, seconds=400):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert server.poll() is None, log.read_text()[-3000:]
        try:
            return urllib.request.urlopen(address, timeout=5)
        except OSError:
            time.sleep(0.5)
    raise AssertionError(f"no answer in {seconds} s: {log.read_text()[-3000:]}")


def client(address):
    from openai import OpenAI

    return OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


def test_the_openai_client_is_answered(served):
    model, address, _ = served
    ids = list(TEXT.encode())
    wanted = by_ours(model, [ids])[0]
    assert [one.id for one in client(address).models.list().data] == ["tiny"]
    how = {
        "model": "tiny",
        "prompt": TEXT,
        "max_tokens": len(wanted.tokens),
        "temperature": 0,
        "logprobs": 1,
    }
    how["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    whole = client(address).completions.create(**how, echo=True).choices[0]
    assert whole.token_ids == wanted.tokens
    told = torch.tensor(whole.logprobs.token_logprobs[1:])
    assert (told - torch.cat([wanted.prompt, wanted.logprobs])).abs().max() < CLOSE
    pieces = list(client(address).completions.create(**how, stream=True))
    assert [
        token for piece in pieces for choice in piece.choices for token in choice.token_ids
    ] == wanted.tokens
    assert "".join(
        choice.text for piece in pieces for choice in piece.choices
    ) == whole.text.removeprefix(TEXT)


def test_what_gates_did_is_under_metrics_and_in_the_log(served):
    model, address, log = served
    before = metrics(address)
    ids = list(b"What gates did")
    wanted = by_ours(model, [ids])
    answer = client(address).completions.create(
        model="tiny",
        prompt=ids,
        max_tokens=len(wanted[0].tokens),
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert answer.choices[0].token_ids == wanted[0].tokens
    tokens, counts = fired(model, [ids], wanted)
    after = metrics(address)
    assert [after["tokens", k] - before.get(("tokens", k), 0) for k in range(3)] == [tokens] * 3
    assert [after["fired", k] - before.get(("fired", k), 0) for k in range(3)] == counts
    until = time.monotonic() + 40  # vLLM logs every ten seconds
    while time.monotonic() < until and not re.search(
        r"Gates decided on \d+ tokens and fired on \d+\.\d%", log.read_text()
    ):
        time.sleep(1)
    assert re.search(
        r"Gates decided on \d+ tokens and fired on \d+\.\d%, \d+\.\d%, \d+\.\d% \(per block\)",
        log.read_text(),
    )


def metrics(address):
    text = urllib.request.urlopen(f"{address}/metrics").read().decode()
    found = re.findall(
        r'^amor:gate_(tokens|fired)_total\{block="(\d)",engine="0",model_name="tiny"\} ([\d.e+]+)$',
        text,
        re.M,
    )
    return {(what, int(block)): float(value) for what, block, value in found}


def test_the_python_of_the_how_to_runs(served, entropy_model, tmp_path, monkeypatch, capsys):
    """Blocks marked `py` need vLLM; those marked `python` are run by tests/test_examples.py."""
    _, address, _ = served
    ask, count = re.findall(
        r"```py\n(.*?)```", (Path(__file__).parents[2] / "docs/how-to/vllm.md").read_text(), re.S
    )
    exec(ask.replace("http://localhost:8000", address).replace("mine-hf", "tiny"), {})
    assert len(capsys.readouterr().out) > 10
    (tmp_path / "mine-hf").symlink_to(entropy_model[1])
    monkeypatch.chdir(tmp_path)
    small = 'dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=1 << 27'
    exec(count.replace('dtype="float32"', small), {})
    assert "Counted(tokens=" in capsys.readouterr().out
    cleanup_dist_env_and_memory()


def test_lm_eval_gives_the_scores_of_our_adapter(entropy_model, tmp_path):
    import lm_eval
    from lm_eval.tasks import TaskManager

    model, folder = entropy_model
    write_task(tmp_path)
    command = [
        BIN / "lm_eval",
        "run",
        "--model",
        "vllm",
        "--include_path",
        tmp_path,
        "--tasks",
        "which",
        "--log_samples",
    ]
    command += ["--batch_size", "4", "--output_path", tmp_path / "out", "--model_args"]
    command += [
        f"pretrained={folder},dtype=float32,max_model_len=256,max_num_seqs=4,"
        f"enforce_eager=True,kv_cache_memory_bytes={1 << 27}"
    ]
    done = subprocess.run(
        [str(word) for word in command], env=OUTSIDE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = samples(next((tmp_path / "out").rglob("samples_which_*.jsonl")))
    _, tokenizer = amor.load(folder)
    judge = Judge(model, tokenizer, "test", Store(tmp_path / "store"))
    found = lm_eval.simple_evaluate(
        AmorLM(judge), tasks=["which"], task_manager=TaskManager(include_path=str(tmp_path))
    )
    ours = {one["doc_id"]: one for one in found["samples"]["which"]}
    assert len(ours) == len(theirs) == 12
    for place, one in ours.items():
        nats, best = answers(one)
        their_nats, their_best = answers(theirs[place])
        assert (nats - their_nats).abs().max() < CLOSE, "of whole continuations"
        assert best == their_best
        assert one["acc"] == theirs[place]["acc"]


def answers(sample):
    """Log-likelihoods of the continuations, and whether each is the likeliest; the harness writes
    them as words into its file."""
    pairs = sample["filtered_resps"]
    return torch.tensor([float(nats) for nats, _ in pairs]), [str(best) for _, best in pairs]


def write_task(folder):
    """Twelve questions with three answers each, of which one is right."""
    ends = ("and it will be stronger", "but not so", "in every way we know")
    rows = [
        {"ask": f"Number {n}: {TEXT[n:]}", "ends": [f" {end}" for end in ends], "right": n % 3}
        for n in range(12)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        "task: which",
        "dataset_path: json",
        "dataset_kwargs:",
        "  data_files:",
        f"    test: {folder / 'rows.jsonl'}",
    ]
    lines += [
        "output_type: multiple_choice",
        "test_split: test",
        'doc_to_text: "{{ask}}"',
        'doc_to_choice: "{{ends}}"',
    ]
    lines += ["doc_to_target: right", 'target_delimiter: ""', "metric_list:", "  - metric: acc"]
    (folder / "which.yaml").write_text("\n".join(lines) + "\n")


def samples(path):
    return {one["doc_id"]: one for one in map(json.loads, path.read_text().splitlines())}
