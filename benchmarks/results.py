"""Tables of benchmarks: printed, and kept in RESULTS.md beside this file, one section a benchmark."""

import importlib.metadata
import os
import pathlib
import platform
import re
import statistics
import time

RESULTS = pathlib.Path(__file__).with_name("RESULTS.md")


def versions(*distributions):
    """What was measured on what, in one line."""
    installed = [f"{name} {importlib.metadata.version(name)}" for name in distributions]
    return f"{', '.join(installed)}; Python {platform.python_version()}, {os.cpu_count()} CPU cores"


def median_seconds(runs, rounds):
    """Median seconds of each function, after one call of each, all alternating: a dict by the same names."""
    for run in runs.values():
        run()
    seconds = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def peak_megabytes():
    """The most memory of this process so far (the `resource` module counts that of the one that started it too)."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def table(columns, rows):
    """A Markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def record(title, text):
    """Prints a section and replaces the one of the same title in RESULTS.md."""
    section = f"## {title}\n\n{text.strip()}\n"
    print(section)
    old = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else "# Benchmark results\n"
    head, *sections = re.split(r"(?m)^(?=## )", old)
    kept = [other.strip() + "\n" for other in sections if not other.startswith(f"## {title}\n")]
    RESULTS.write_text("\n".join([head.strip() + "\n", *kept, section]), encoding="utf-8")
