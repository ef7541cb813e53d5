"""What the laws in vLLM share: small models in folders, engines that are closed again,
and what our own engine says."""

import gc
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from laws import small
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

import amor
import amor.hf
from amor.data.tokenizer import bytes_tokenizer
from amor.decode.engine import Engine
from amor.judge.gates import force_all
from amor.models.gated import PassOptions
from amor.vllm.stats import counted

CLOSE = 1e-4  # nats between a log-probability of ours and of vLLM
NEW = 12  # tokens written
# heads of the sizes that vLLM's attention on a CPU has; a vocabulary that two ranks cannot halve
SHAPE = {
    "vocab": 263,
    "context": 1024,
    "blocks.head_size": 32,
    "mixers.attention.head_size": 32,
    "mixers.mamba2.head_size": 32,
}
SHAPE["mixers.fused"] = {"head_size": 32, "state_size": 24, "share": 1}


def small_model(name, **changes):
    return small(name, **SHAPE | changes)


def exported(model, folder):
    """The folder that vLLM opens, as a user makes it."""
    amor.save(model, folder / "ours", bytes_tokenizer())
    return amor.hf.export(folder / "ours", folder / "theirs")


@contextmanager
def engine(folder, **settings):
    """A vLLM engine whose steps hold at most 64 tokens, so that longer
    prompts are read in chunks."""
    usual = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "enforce_eager": True,
    }
    llm = LLM(str(folder), **usual | {"kv_cache_memory_bytes": 1 << 27} | settings)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def prompts(model, lengths=(57, 3, 200, 1), seed=3):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, model.config.vocab, (n,), generator=generator).tolist() for n in lengths
    ]


@dataclass
class Said:
    """After one prompt: tokens written, their log-probabilities, those
    of the prompt's own tokens."""

    tokens: list[int]
    logprobs: torch.Tensor
    prompt: torch.Tensor


PARAMETERS = SamplingParams(
    temperature=0, max_tokens=NEW, logprobs=0, prompt_logprobs=0, ignore_eos=True, detokenize=False
)


def by_vllm(llm, asked, parameters=PARAMETERS):
    outs = llm.generate([{"prompt_token_ids": ids} for ids in asked], parameters, use_tqdm=False)
    return [said_of(out) for out in outs]


def said_of(out):
    written, told = list(out.outputs[0].token_ids), out.prompt_logprobs or [None]
    logprobs = [
        step[token].logprob for step, token in zip(out.outputs[0].logprobs, written, strict=True)
    ]
    prompt = [
        step[token].logprob for step, token in zip(told[1:], out.prompt_token_ids[1:], strict=False)
    ]
    return Said(written, torch.tensor(logprobs), torch.tensor(prompt))


@torch.no_grad()
def by_ours(model, asked, gates=None, new=NEW):
    decode = Engine(model, gates=gates)
    return [_written(decode, ids, new) for ids in asked]


def _written(decode, ids, new):
    session, tokens, logprobs = decode.prefill([ids]), [], []
    for _ in range(new):
        said = session.next.logits[0].log_softmax(-1)
        tokens.append(int(said.argmax()))
        logprobs.append(said[tokens[-1]])
        session.step(tokens[-1:])
    read = decode.model(torch.tensor([ids]), options=PassOptions(gates=decode.gates))
    prompt = (
        decode.model.logits(read.hidden)[0, :-1]
        .log_softmax(-1)
        .gather(1, torch.tensor(ids[1:], dtype=torch.long)[:, None])
    )
    return Said(tokens, torch.stack(logprobs), prompt[:, 0])


def same(found, wanted):
    for place, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.tokens == b.tokens, f"prompt {place}: other tokens"
        for name in ("logprobs", "prompt"):
            mine, theirs = getattr(a, name), getattr(b, name)
            assert mine.shape == theirs.shape
            apart = (mine - theirs).abs().max().item() if len(mine) else 0.0
            assert apart <= CLOSE, f"prompt {place}: {name} differ by {apart:.1e}"


@torch.no_grad()
def fired(model, asked, said):
    """How many tokens of these texts were read, and how many of them fired, a block
    each: by the model's forward."""
    texts = [ids + one.tokens[:-1] for ids, one in zip(asked, said, strict=True)]
    traces = [model(torch.tensor([text])).gates for text in texts]
    return sum(map(len, texts)), [
        sum(int(t[k].fire.sum()) for t in traces) for k in range(model.config.blocks.count)
    ]


def gates_matter(model, asked, said):
    """Gates fire now and then, and what they open moves log-probabilities: else equality
    would show nothing of them."""
    tokens, counts = fired(model, asked, said)
    assert all(0.1 * tokens < count < 0.7 * tokens for count in counts), counts
    closed = by_ours(model, asked, force_all(model, False))
    moved = max(
        (a.prompt - b.prompt).abs().max().item() for a, b in zip(said, closed) if len(a.prompt)
    )
    assert moved > 0.1


def told_by(llm):
    """What the plug-in counted: tokens of each block, and firings."""
    found = counted(llm.llm_engine.vllm_config)
    return [one.tokens for one in found], [one.fired for one in found]
