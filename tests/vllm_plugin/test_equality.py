"""What vLLM writes with our models is what our own engine writes: tokens,
log-probabilities and decisions of gates."""

from types import SimpleNamespace

import pytest
import torch
from serving import (
    CLOSE,
    NEW,
    PARAMETERS,
    by_ours,
    by_vllm,
    engine,
    exported,
    fired,
    gates_matter,
    prompts,
    said_of,
    same,
    small_model,
    told_by,
)
from vllm import SamplingParams
from vllm.utils.torch_utils import set_default_torch_dtype

from amor import registry
from amor.models.block import gate_of
from amor.vllm.gate import Decider

PLAIN = (
    "mamba2",
    "transformer",
    "mamba2-serial",
    "mamba2-fused",
    "gated-deltanet",
    "gated-deltanet-serial",
    "kda",
)
ABLATED = ("amor-mamba2-classic", "amor-mamba2-prenorm", "amor-mamba2-mlp", "amor-mamba2-nogate")
OURS = (
    "amor-mamba2",
    "amor-mamba2-final",
    "amor-mamba2-once",
    "amor-mamba2-gain",
    "amor-gated-deltanet",
    "amor-kda",
    "amor-gated-deltanet-gain",
)
CASES = [pytest.param(name, {}, id=name) for name in (*PLAIN, *ABLATED, *OURS)]
CASES += [
    pytest.param("amor-mamba2", {"blocks.gate": gate}, id=f"gate-{gate}")
    for gate in registry.kinds("gates")
    if gate not in ("entropy", "always", "oracle")  # the first two stand above, the last is refused
]
CASES += [pytest.param("amor-mamba2", {"mixers.mamba2.groups": 2}, id="groups")]
CASES += [pytest.param("amor-mamba2", {"tied": False}, id="untied")]
CASES += [pytest.param("amor-mamba2", {"blocks.final": "none"}, id="no-final-norm")]


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_vllm_says_what_our_engine_says(name, changes, tmp_path):
    """Four prompts at once, one longer than three steps and one of a single token, in chunks."""
    model = small_model(name, **changes)
    asked = prompts(model)
    wanted = by_ours(model, asked)
    if model.config.blocks.count and model.config.blocks.gate not in ("always", "never"):
        gates_matter(model, asked, wanted)
    with engine(exported(model, tmp_path)) as llm:
        same(by_vllm(llm, asked), wanted)
        tokens, counts = fired(model, asked, wanted)
        assert told_by(llm) == ([tokens] * len(counts), counts)


def test_a_prompt_is_read_alike_in_chunks_of_any_size(entropy_model):
    model, folder = entropy_model
    asked = prompts(model, (130, 66), seed=4)
    wanted = by_ours(model, asked)
    gates_matter(model, asked, wanted)
    for most in (9, 512):
        with engine(folder, max_num_batched_tokens=most) as llm:
            same(by_vllm(llm, asked), wanted)


def test_requests_that_are_put_off_say_the_same(entropy_model):
    """Pages for three prompts, not for what is written after them: one request
    is thrown out and read again."""
    model, folder = entropy_model
    with engine(folder) as llm:
        page = llm.llm_engine.vllm_config.cache_config.block_size
        group = len(
            llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        )
    assert 2 * page + NEW < 512, "the texts below would not fit"
    asked = prompts(model, (page - 3, page - 4, page - 5), seed=5)
    wanted = by_ours(model, asked)
    gates_matter(model, asked, wanted)
    # page 0 is nobody's; a request has one page a group, and one more when it
    # grows beyond its first page of keys
    with engine(
        folder,
        num_gpu_blocks_override=1 + 3 * group + 2,
        max_model_len=2 * page,
        disable_log_stats=False,
    ) as llm:
        same(by_vllm(llm, asked), wanted)
        put_off = sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")
        assert put_off > 0
        assert told_by(llm)[0][0] > fired(model, asked, wanted)[0], (
            "what is read again is counted again"
        )


@pytest.mark.parametrize("name", ["amor-mamba2", "amor-gated-deltanet"])
def test_an_aborted_request_leaves_nothing_behind(name, tmp_path):
    """Those beside it and those after it, which get its pages and states again and
    again, say what they say alone."""
    model = small_model(name)
    beside, gone, *after = prompts(model, (70, 90, 80, 1, 75, 2, 66), seed=6)
    wanted = by_ours(model, [beside, *after])
    with engine(exported(model, tmp_path), max_num_seqs=2, num_gpu_blocks_override=12) as llm:
        core = llm.llm_engine
        for request, ids in (("beside", beside), ("gone", gone)):
            core.add_request(request, {"prompt_token_ids": ids}, PARAMETERS)
        for _ in range(4):
            assert not any(out.finished for out in core.step())
        core.abort_request(["gone"])
        for place, ids in enumerate(after):
            core.add_request(f"after{place}", {"prompt_token_ids": ids}, PARAMETERS)
        done = {}
        while core.has_unfinished_requests():
            done |= {
                out.request_id.split("-")[0]: said_of(out) for out in core.step() if out.finished
            }
        assert done.keys() - {"gone"} == {
            "beside",
            *(f"after{place}" for place in range(len(after))),
        }
        same([done["beside"], *(done[f"after{place}"] for place in range(len(after)))], wanted)


@pytest.mark.parametrize("name", ["amor-mamba2", "amor-mamba2-once"])
def test_a_compiled_model_says_the_same(name, tmp_path):
    """As `vllm serve` runs it by default: through torch.compile, the
    decision of a gate as one operator."""
    model = small_model(name)
    asked = prompts(model)
    with engine(exported(model, tmp_path), enforce_eager=False) as llm:
        assert llm.llm_engine.vllm_config.compilation_config.mode != 0
        same(by_vllm(llm, asked), by_ours(model, asked))


@pytest.mark.parametrize(
    ("name", "changes"),
    [("amor-mamba2", {}), ("amor-mamba2", {"blocks.gate": "margin"}), ("amor-kda-gain", {})],
)
def test_two_ranks_say_what_one_says(name, changes, tmp_path):
    """Each holds a part of the vocabulary, of unequal size, and decides alike."""
    model = small_model(name, **changes)
    asked = prompts(model)
    wanted = by_ours(model, asked)
    gates_matter(model, asked, wanted)
    with engine(exported(model, tmp_path), tensor_parallel_size=2) as llm:
        same(by_vllm(llm, asked), wanted)
        tokens, counts = fired(model, asked, wanted)
        assert told_by(llm) == ([tokens] * len(counts), counts)


def test_a_transformer_keeps_its_prefixes(tmp_path):
    """Prefix caching is off where vLLM's states fail with it on a CPU,
    and on where there are none."""
    model = small_model("transformer")
    asked = prompts(model, (300,))
    wanted = by_ours(model, asked)
    short = SamplingParams(
        temperature=0, max_tokens=NEW, logprobs=0, ignore_eos=True
    )  # prompt_logprobs would look nothing up
    with engine(exported(model, tmp_path)) as llm:
        assert llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
        for known in (False, True):
            out = llm.generate([{"prompt_token_ids": asked[0]}], short, use_tqdm=False)[0]
            assert (out.num_cached_tokens > 0) == known
            said = said_of(out)
            assert said.tokens == wanted[0].tokens
            assert (said.logprobs - wanted[0].logprobs).abs().max() < CLOSE


def test_prefix_caching_is_off_where_it_would_fail(entropy_model):
    _, folder = entropy_model
    with engine(folder, enable_prefix_caching=True) as llm:
        assert not llm.llm_engine.vllm_config.cache_config.enable_prefix_caching


def test_a_gate_keeps_its_digits_where_weights_are_rounded(entropy_model):
    """vLLM makes a model in the numbers of its weights. (Products of 16 bits do not run on
    every CPU: no engine here.)"""
    model, _ = entropy_model
    parts = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={}), cache_config=None
    )
    with set_default_torch_dtype(torch.bfloat16):
        decider = Decider(gate_of(model.config, 0, None), None, parts, "gate", "pages")
    decider.gate.load_state_dict(model.blocks[0].gate.state_dict())
    assert decider.gate.mu.dtype == torch.float32
    assert torch.equal(decider.gate.threshold, model.blocks[0].gate.threshold)
