"""Result files: what a measurement says about how, when and where it was made, and how it is written."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "bench" / "results"


def output_of(*command):
    """What a command prints; nothing where it fails or is not there."""
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def command():
    """The command line of this process, from the repository's root."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else [sys.argv[0]]
    return shlex.join(["python3", *program, *sys.argv[1:]])


def commit():
    """The revision of the sources, "-dirty" where any but results differ from it; DSPATTN_COMMIT outside a checkout."""
    if named := os.environ.get("DSPATTN_COMMIT"):
        return named
    revision = output_of("git", "rev-parse", "HEAD")
    changed = output_of("git", "status", "--porcelain", "--untracked-files=no", ":!bench/results")
    return revision + ("-dirty" if changed else "") if revision else "unknown"


def now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def first_line(text, default="unknown"):
    return text.splitlines()[0] if text else default


def gpu():
    """Facts of a run on the first GPU."""
    import torch

    from bench.common import timing

    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    compiler = output_of("nvcc", "--version").splitlines()
    return {
        "command": command(),
        "commit": commit(),
        "device": {
            "name": torch.cuda.get_device_name(),
            "sm_clock_mhz": timing.CLOCK.mhz(),
            "driver": first_line(driver),
            "cores": os.cpu_count(),
        },
        "versions": {
            "cuda": torch.version.cuda,
            "torch": torch.__version__,
            "cudnn": str(torch.backends.cudnn.version()),
            "compiler": compiler[-1] if compiler else "unknown",
        },
    }


def cpu():
    """Facts of a run on the CPU."""
    import torch

    facts = {}
    for line in output_of("lscpu").splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    flags = facts.get("Flags", "").split()
    return {
        "command": command(),
        "commit": commit(),
        "device": {
            "name": facts.get("Model name", platform.machine()),
            "cores": len(os.sched_getaffinity(0)),
            "threads": torch.get_num_threads(),
            "instruction_sets": [flag for flag in ("avx2", "avx512f", "asimd", "sve") if flag in flags],
        },
        "versions": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "compiler": first_line(output_of("c++", "--version")),
        },
    }


def read(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def write(path, facts, rows):
    """The whole file anew, after every row if need be: what was measured survives whatever follows."""
    beside = Path(f"{path}.new")
    beside.write_text(json.dumps({**facts, "date": facts.get("date") or now(), "rows": rows}, indent=1) + "\n", "utf-8")
    beside.replace(path)
