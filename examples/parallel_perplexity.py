"""The perplexity of one long text, cut over processes: the same number whatever their count.

    torchrun --nproc-per-node 2 examples/parallel_perplexity.py --tokens 4096
    torchrun --nproc-per-node 4 examples/parallel_perplexity.py --tokens 4096 --method all_to_all --text book.txt

The model is SmolLM2-135M (``python -m dspattn.pretrained`` fetches it). It is not changed: it runs inside
``dspattn.parallel.context`` on this process's rows, with their positions. ``--train`` also takes the gradients of the
mean loss, added up over processes, and prints their norm.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
import torch.distributed as dist

from dspattn import parallel
from dspattn.demo import load_texts
from dspattn.pretrained import load_smollm2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="how much of the text")
    parser.add_argument("--text", type=Path, help="a text file (default: the demo's passages)")
    parser.add_argument("--attention", default="dspattn_2_4", help="a name of dspattn")
    parser.add_argument("--method", default="ring", choices=["ring", "all_to_all"])
    parser.add_argument("--train", action="store_true", help="gradients, too")
    options = parser.parse_args()

    dist.init_process_group("gloo")
    model, tokenizer = load_smollm2(options.attention, progress=dist.get_rank() == 0)
    text = options.text.read_text() if options.text else load_texts().running
    tokens = torch.tensor([tokenizer(text)["input_ids"][: options.tokens]])

    pieces = parallel.shard(tokens, 1)
    labels = parallel.shard_labels(tokens, 1)
    positions = parallel.position_ids(tokens.shape[1])[None]
    count = tokens.shape[1] - 1
    with torch.set_grad_enabled(options.train), parallel.context(method=options.method):
        logits = model(pieces, position_ids=positions, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(logits[0], labels[0], reduction="none", ignore_index=-100)
        if options.train:
            (losses.sum() / count).backward()
    total = losses.detach().double().sum()
    dist.all_reduce(total)
    norm = 0.0
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            norm += float(parameter.grad.double().square().sum())
    if dist.get_rank() == 0:
        line = f"{dist.get_world_size()} processes, {tokens.shape[1]} tokens, {options.attention}, {options.method}:"
        line += f" perplexity {math.exp(float(total) / count):.6f}"
        print(line + (f", norm of the gradients {math.sqrt(norm):.6f}" if options.train else ""))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
