"""Tokens per second of a small language model with a static cache, our attention beside PyTorch's, in one process.

    PYTHONPATH=python DSPATTN_TORCH_LIBRARY=... python3 -m bench.decode.generate --out bench/results/generate_h200.json

Twelve layers, 16 heads of 128 over 4 or 16 key heads, random weights, bf16, batch 4: a prompt goes in at once, then 64
tokens one by one, greedily, each step one CUDA graph that is replayed: the cache's length is read on the device.
PyTorch's attention takes the length as a mask, as a static cache makes it, once with grouped heads and once with key
heads repeated, as transformers does; ratios are to the faster of the two. Prompts are causal attention for all.
"""

import argparse
import dataclasses
import time

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from bench.common import results, timing


@dataclasses.dataclass(frozen=True)
class Shape:
    layers: int = 12
    heads: int = 16
    kv_heads: int = 4
    d: int = 128
    vocabulary: int = 32000

    @property
    def width(self):
        return self.heads * self.d


def dense(q, k, v, length, positions):
    """SDPA: a prompt at the cache's beginning, or one query with a mask of the keys up to its position."""
    n = q.shape[2]
    if n > 1:
        return F.scaled_dot_product_attention(q, k[:, :, :n], v[:, :, :n], is_causal=True, enable_gqa=True)
    mask = torch.arange(k.shape[2], device=q.device) <= positions[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def dense_repeated(q, k, v, length, positions):
    """The same with every query head's keys side by side: SDPA has more kernels for a mask then."""
    if q.shape[2] == 1:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    return dense(q, k, v, length, positions)


def pruned(pattern, selection):
    import dspattn  # the operators are loaded with it

    def attend(q, k, v, length, positions):
        if q.shape[2] == 1:
            lengths = length.to(torch.int32).expand(q.shape[0])
            return dspattn.attention(
                q, k, v, key_lengths=lengths, enable_gqa=True, pattern=pattern, selection=selection
            )
        n = q.shape[2]  # a prompt, at the cache's beginning
        return dspattn.attention(q, k[:, :, :n], v[:, :, :n], is_causal=True, enable_gqa=True, pattern=pattern)

    return attend


class Layer(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.qkv = nn.Linear(shape.width, shape.width + 2 * shape.kv_heads * shape.d, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(shape.width) for _ in range(2))

    def forward(self, x, cache, length, positions, attend):
        shape = self.shape
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (-1, shape.d)).transpose(1, 2)
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        cache[0].index_copy_(2, positions, k)
        cache[1].index_copy_(2, positions, v)
        x = x + self.out(attend(q, cache[0], cache[1], length, positions).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)

    def forward(self, tokens, caches, length, attend):
        """Logits of the last token. `length`: of the cache with these tokens, one number on the device."""
        positions = length - tokens.shape[1] + torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens)
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, length, positions, attend)
        return self.norm(x[:, -1]) @ self.embedding.weight.T


class Generation:
    """A prompt, and steps that replay one graph (on a CPU: run again)."""

    def __init__(self, model, attend, prompt, new_tokens):
        batch, n = prompt.shape
        self.model, self.attend, self.prompt = model, attend, prompt
        of_cache = (batch, model.shape.kv_heads, n + new_tokens, model.shape.d)
        weight = model.embedding.weight
        self.caches = [[weight.new_zeros(of_cache) for _ in "kv"] for _ in model.layers]
        self.length = torch.zeros(1, dtype=torch.long, device=prompt.device)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=prompt.device)
        self.graph = None

    @torch.no_grad()
    def start(self):
        self.length.fill_(self.prompt.shape[1])
        self.token.copy_(self.model(self.prompt, self.caches, self.length, self.attend).argmax(-1, keepdim=True))

    @torch.no_grad()
    def _step(self):
        self.length += 1
        self.token.copy_(self.model(self.token, self.caches, self.length, self.attend).argmax(-1, keepdim=True))

    def step(self):
        if not self.prompt.is_cuda:
            return self._step()
        if self.graph is None:
            saved = self.length.clone(), self.token.clone()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._step()  # chooses kernels, allocates
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._step()
            self.length.copy_(saved[0])
            self.token.copy_(saved[1])
        return self.graph.replay()

    def tokens(self, count):
        """The first `count` tokens that follow the prompt: [batch, count]."""
        self.start()
        found = [self.token.clone()]
        for _ in range(count - 1):
            self.step()
            found.append(self.token.clone())
        return torch.cat(found, 1)


def measure(model, attend, prompt, new_tokens, repeats):
    """Tokens per second of the steps, and milliseconds of the prompt: medians."""
    generation = Generation(model, attend, prompt, new_tokens)
    generation.tokens(4)
    prompts, steps = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        generation.start()
        torch.cuda.synchronize()
        between = time.perf_counter()
        for _ in range(new_tokens - 1):
            generation.step()
        torch.cuda.synchronize()
        prompts.append(between - began)
        steps.append((time.perf_counter() - between) / (new_tokens - 1))
    seconds = sorted(steps)[repeats // 2]
    return {
        "tokens_per_s": round(prompt.shape[0] / seconds, 1),
        "step_us": round(1e6 * seconds, 1),
        "prompt_ms": round(1e3 * sorted(prompts)[repeats // 2], 2),
    }


def attempt(model, attend, prompt, new_tokens, repeats):
    """What was measured, or the reason why nothing was: a way that fails leaves the others their turn."""
    try:
        return measure(model, attend, prompt, new_tokens, repeats)
    except RuntimeError as error:
        return {"skipped": str(error).splitlines()[0][:200]}


def compared(shape, batch, n, found):
    """Rows of one prompt's length, each with its tokens a second over the fastest of PyTorch's."""
    best = max((row.get("tokens_per_s", 0) for name, row in found.items() if name.startswith("sdpa")), default=0)
    rows = []
    for name, row in found.items():
        head = {**dataclasses.asdict(shape), "batch": batch, "prompt": n, "way": name}
        where = f"{shape.heads}/{shape.kv_heads} heads, prompt {n:5} {name:14}"
        if "skipped" in row:
            print(f"{where} skipped: {row['skipped']}", flush=True)
            rows.append({**head, **row})
            continue
        rows.append({**head, **row, "ratio": round(row["tokens_per_s"] / best, 3) if best else None})
        print(f"{where} {row['tokens_per_s']:8.1f} tokens/s {row['step_us']:8.1f} us a step "
              f"{row['prompt_ms']:7.2f} ms prompt {rows[-1]['ratio']}x", flush=True)  # fmt: skip
    return rows


def table(rows):
    """What docs/decode.md shows: tokens a second of PyTorch's, and how many times as many the others."""
    ways = ("2:4 own", "1:2 own", "2:4 shared", "1:2 shared")
    lines = [
        "| key heads | prompt | PyTorch's, tokens/s | " + " | ".join(ways) + " |",
        "|---|---|---|" + "---|" * len(ways),
    ]
    for kv_heads, prompt in dict.fromkeys((row["kv_heads"], row["prompt"]) for row in rows):
        here = {row["way"]: row for row in rows if (row["kv_heads"], row["prompt"]) == (kv_heads, prompt)}
        best = max(row.get("tokens_per_s", 0) for way, row in here.items() if way.startswith("sdpa"))
        cells = [f"{here[way]['ratio']:.2f}" if here.get(way, {}).get("ratio") else "" for way in ways]
        lines.append(f"| {kv_heads} | {prompt} | {best:,.0f} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="JSON file to write")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--table", help="JSON file whose table to print, measuring nothing")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(results.read(arguments.table)["rows"]))
        return
    facts = results.gpu()
    timing.warm_up(2.0)
    torch.manual_seed(0)
    ways = {"sdpa": dense, "sdpa repeated": dense_repeated} | {
        f"{pattern} {selection}": pruned(pattern, selection)
        for pattern in ("2:4", "1:2")
        for selection in ("own", "shared")
    }
    rows = []
    for shape in (Shape(), Shape(kv_heads=16)):
        with torch.device("cuda"):  # drawn there: a CPU takes longer than all measurements
            model = Model(shape).to(torch.bfloat16).requires_grad_(False)
        for n in (512, 8192):
            prompt = torch.randint(shape.vocabulary, (arguments.batch, n), device="cuda")
            found = {}
            for name, attend in ways.items():
                if shape.kv_heads == shape.heads and name.split()[-1] in ("repeated", "shared"):
                    continue  # nothing to repeat, nobody to choose with
                found[name] = attempt(model, attend, prompt, arguments.new_tokens, arguments.repeats)
            rows += compared(shape, arguments.batch, n, found)
            if arguments.out:
                results.write(arguments.out, facts, rows)


if __name__ == "__main__":
    main()
