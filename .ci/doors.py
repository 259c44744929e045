"""Does llama.cpp itself agree? Run by the check `doors`, in its environment: python .ci/doors.py MODEL.gguf STORY PROMPT.

Random weights over the whole context with every option that GGUF has a place for, the ids of nasty texts and of 1,000
stories, and a trained model's greedy story. Keys and values are cached in 32 bits, so that the arithmetic is the same.
"""
import sys, tempfile
from pathlib import Path
import numpy as np
import torch
from llama_cpp import Llama
from tinyllm.config import ModelConfig
from tinyllm.gguf_file import read_gguf, write_gguf
from tinyllm.model import Transformer, init_weights
from tinyllm.stories import builtin_story

V, T, NEW = 320, 256, 200 # tokens of the story, as many as the check asks for
HEADS = [dict(n_kv_heads=n, tie_embeddings=tied) for n in (8, 4, 1) for tied in (True, False)]
OPTIONS = HEADS + [dict(attention_bias=True, head_size=24), dict(pad_vocab_to=64, rope_theta=5e5, norm_eps=1e-6),
    dict(rope_scaling="linear", rope_factor=2.), dict(rope_scaling="yarn", rope_factor=4., rope_original_len=64),
    dict(rope_scaling="yarn", rope_factor=2., rope_original_len=128, rope_beta_fast=8.),
    dict(rope_scaling="llama3", rope_factor=2., rope_original_len=128)]
NASTY = ["", " ", "  two leading", "two trailing  ", "a  b   c", "\n", "\r\n", "a\tb", "▁", "a▁b", "▁ ▁", "<s>", " <s>",
    "</s> x <unk><pad>", "<0x41>", "x<s>y", "é", "ﬁ…２３", "e\u0301", "\u00a0\u200b\ufeff", "日本語", "aaaaaaaa", "\0", "a\0b"]


def llama(path, **kw):
    "The file in llama.cpp"
    return Llama(str(path), n_ctx=T, logits_all=True, type_k=0, type_v=0, n_threads=1, verbose=False, **kw)


def random_model(**change):
    "Weights far from those of a fresh model"
    shape = dict(vocab_size=V, dim=64, n_layers=2, n_heads=8, seq_len=T, hidden_dim=96, init_std=.15)
    model = Transformer(ModelConfig(**shape | change)).eval()
    init_weights(model, seed=3)
    noise = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters(): p.add_(torch.randn(p.shape, generator=noise)/20)
    return model


def main(path, story, prompt):
    torch.set_num_threads(1)
    _, tokenizer = read_gguf(path)
    worst = 0
    for change in OPTIONS:
        model = random_model(**change | dict(vocab_size=tokenizer.vocab_size))
        with tempfile.TemporaryDirectory() as d:
            write_gguf(Path(d, "m.gguf"), model, tokenizer)
            theirs = llama(Path(d, "m.gguf"))
            ids = torch.randint(tokenizer.vocab_size, (1, T), generator=torch.Generator().manual_seed(2))
            theirs.eval(ids[0].tolist())
            with torch.no_grad(): off = np.abs(model(ids)[0].numpy() - np.array(theirs.scores[:T])).max()
        assert off < 1e-4, f"{change}: logits differ by {off}"
        worst = max(worst, off)
    theirs = llama(path)
    texts = NASTY + [builtin_story(i)[0] for i in range(1000)]
    for text in texts:
        ours = tokenizer.encode(text, bos=True)
        got = theirs.tokenize(text.encode(), add_bos=True, special=False)
        assert got == ours, f"{text!r}: {got}, not {ours}"
    ids = tokenizer.encode(prompt, bos=True)
    begun, never = len(ids), [tokenizer.unk_id, tokenizer.pad_id]
    while len(ids) < begun + NEW:
        theirs.eval(ids[theirs.n_tokens:])
        scores = np.array(theirs.scores[theirs.n_tokens-1])
        scores[never] = -np.inf
        if scores.argmax() in (tokenizer.bos_id, tokenizer.eos_id): break
        ids.append(int(scores.argmax()))
    told = tokenizer.decode(ids)
    assert told.strip() == story.strip(), f"llama.cpp tells {told!r}, tinyllm {story!r}"
    print(f"{len(OPTIONS)} models within {worst:.1e}, {len(texts)} texts with the same ids, {len(ids)-begun} tokens of one story")


if __name__ == "__main__": main(sys.argv[1], Path(sys.argv[2]).read_text(encoding="utf-8"), sys.argv[3])
