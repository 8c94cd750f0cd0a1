"""``python -m dspattn.make_report``: the page of :func:`dspattn.report` for one of the pretrained models.

python -m dspattn.make_report --model smollm2 --text article.txt --out report.html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .errors import DspattnError
from .pretrained import PretrainedError, load_minilm, load_smollm2
from .reporting import report

MODELS = {"minilm": (load_minilm, "MiniLM"), "smollm2": (load_smollm2, "SmolLM2-135M")}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m dspattn.make_report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), default="minilm")
    parser.add_argument("--text", help="a file, or the text itself (default: a text that comes with the package)")
    parser.add_argument("--out", type=Path, default=Path("out/report.html"), help="(default: out/report.html)")
    parser.add_argument("--patterns", nargs="+", default=["2:4", "1:2"], metavar="N:M")
    parser.add_argument("--groupings", nargs="+", default=["interleaved", "consecutive"])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--cache", help="folder of the models (default: $DSPATTN_CACHE or ~/.cache/dspattn)")
    options = parser.parse_args(arguments)
    load, name = MODELS[options.model]
    try:
        if options.text is None:
            from .demo import load_texts

            text = load_texts().running
        else:
            text = Path(options.text).read_text(encoding="utf-8") if Path(options.text).is_file() else options.text
        model, tokenizer = load(folder=options.cache)
        path = report(
            model,
            tokenizer,
            text,
            options.out,
            patterns=options.patterns,
            groupings=options.groupings,
            max_tokens=options.max_tokens,
            title=f"Attention of {name}, dense and pruned",
        )
    except (DspattnError, PretrainedError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
