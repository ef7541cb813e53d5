"""The Llama-3.1 tokenizer, from the file in the package `llama-models`, as a
`tokenizers.Tokenizer`.

The file lists byte strings in the order of their ranks: a merge is any two tokens whose join is a
token, and the lowest rank goes first. `tokenizers` wants the pairs, so every way to cut a token in
two tokens is listed, at the place of the token. No BOS is added: documents are packed with
end-of-text between them, and a model must be read as it was trained.
"""

import base64
import hashlib
import importlib.util
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from amor.data.tokenizer import byte_letters
from amor.errors import AmorError, install_hint

BASE, SPECIAL = 128_000, 256
SHA256 = "82e9d31979e92ab929cd544440f129d9ecd797b69e327f80f17e1c50d5551b55"
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def special_tokens() -> list[str]:
    """The 256 special tokens in the order of their ids, 128,000 to 128,255."""
    head = [
        "begin_of_text",
        "end_of_text",
        "reserved_special_token_0",
        "reserved_special_token_1",
        "finetune_right_pad_id",
    ]
    turns = [
        "step_id",
        "start_header_id",
        "end_header_id",
        "eom_id",
        "eot_id",
        "python_tag",
        "image",
    ]
    named = head + turns
    reserved = [f"reserved_special_token_{2 + i}" for i in range(SPECIAL - len(named))]
    return [f"<|{name}|>" for name in named + reserved]


def llama_file() -> Path:
    """tokenizer.model of the package, which is not imported: its own imports are heavy."""
    spec = importlib.util.find_spec("llama_models")
    folders = list(spec.submodule_search_locations or []) if spec else []
    if not folders:
        raise AmorError(
            f"tokenizer llama-3.1 needs the package llama-models: {install_hint('llama')}"
        )
    path = Path(folders[0]) / "llama3" / "tokenizer.model"
    if not path.is_file():
        raise AmorError(
            f"the package llama-models has no {path}; install another version: "
            f"{install_hint('llama')}"
        )
    return path


def read_ranks(path: Path) -> dict[bytes, int]:
    """Token bytes -> rank, from lines of `base64 rank`; another file than Llama 3's is an error."""
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != SHA256:
        raise AmorError(
            f"{path} is not the Llama-3 tokenizer (another sha256); install llama-models again"
        )
    lines = (line.split() for line in data.splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every pair of tokens whose join is a token, in the order of the joined token's rank."""
    pairs: list[tuple[bytes, bytes]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = [(token[:i], token[i:]) for i in range(1, len(token))]
        whole = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        pairs += sorted(whole, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return pairs


def llama_tokenizer() -> Tokenizer:
    """The tokenizer of Llama 3.1 from the file of the package llama-models."""
    ranks = read_ranks(llama_file())
    letters = byte_letters()
    spelled = {token: "".join(letters[b] for b in token) for token in ranks}
    pairs = [(spelled[a], spelled[b]) for a, b in merges(ranks)]
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    # ignore_merges: a word that is a token is that token, as in tiktoken, even where merges would
    # not reach it
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=True))
    cut = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated", invert=False)
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, bytewise])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True, normalized=False) for word in special_tokens()]
    )
    assert tokenizer.get_vocab_size() == BASE + SPECIAL
    return tokenizer
