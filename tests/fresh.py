"""Code that tests run in a process of its own."""

import json
import os
import subprocess
import sys
import textwrap

# defines peak(): megabytes of the process; the `resource` module counts those of the one that started it too
PEAK = """
import re
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024
"""


def run_in_fresh_process(code, *arguments, timeout=300, **environment):
    """Runs Python code by itself; the last line that it prints, read as JSON."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
