"""Attention over long sequences: a block at a time, all at once, and Keras's layer.

    python benchmarks/attention.py                  # 12 minutes on 2 cores, 10 GB
    python benchmarks/attention.py --lengths 512 8192

One row, 8 heads of 32 in a self-attention layer of width 256, forward and backward in float32, as a TensorFlow graph
without XLA. Each figure is from a process of its own: seconds are the median of the steps in ten seconds, peak memory
is what the process took above what it had before. Keras and "exact" hold the scores of all queries and keys, so they
end at 8192.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

from results import peak_megabytes, record, table, versions

WIDTH, HEADS, MOST_SCORES = 256, 8, 8192
KINDS = ("auto", "exact", "keras.layers")
LENGTHS = [512, 1024, 2048, 4096, 8192, 16384, 32768]
WINDOWED, WINDOWS = 16384, [256, 512, 1024, 2048, 4096]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    lengths = parser.parse_args().lengths
    rows = []
    for length in lengths:
        for causal, dropout in ((True, 0.0), (True, 0.1), (False, 0.0), (False, 0.1)):
            runs = {kind: alone(kind, length, causal, dropout) for kind in KINDS if fits(kind, length)}
            rows.append(["causal" if causal else "full", dropout, length, *cells(runs)])
            print(rows[-1], flush=True)
    rows.sort(key=lambda row: (row[0], row[1]))
    columns = ["", "dropout", "positions", *(f"{kind}, {what}" for kind in KINDS for what in ("s", "MB"))]
    text = f"{versions('keras', 'tensorflow')}. {__doc__.split(chr(10) * 2)[2]}\n\n{table(columns, rows)}\n"
    windows = {window: alone("auto", WINDOWED, True, 0.0, window) for window in WINDOWS}
    spread = [[size, f"{seconds / WINDOWED * 1e6:.0f}", f"{peak:,.0f}"] for size, (seconds, peak) in windows.items()]
    columns = ["window", "microseconds a position", "MB"]
    text += f"\nCausal windows over {WINDOWED} positions:\n\n{table(columns, spread)}\n\n![](attention.png)"
    record("Attention", text)
    plot([row for row in rows if row[:2] == ["causal", 0.0]], windows)


def fits(kind, length):
    return kind == "auto" or length <= MOST_SCORES


def cells(runs):
    for kind in KINDS:
        seconds, peak = runs.get(kind, (None, None))
        yield from ("", "") if seconds is None else (f"{seconds:.3f}", f"{peak:,.0f}")


def alone(*arguments):
    command = [sys.executable, __file__, "measure", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])


def measure(kind, length, causal, dropout, window=None):
    """(median seconds of a step, peak MB)."""
    import keras
    import tensorflow as tf

    import keras_transformer as kt

    if kind == "keras.layers":
        attention = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=dropout)

        def layer(x):
            return attention(x, x, use_causal_mask=causal, training=True)
    else:
        attention = kt.MultiHeadSelfAttention(HEADS, causal=causal, dropout=dropout, window=window, kernel=kind)

        def layer(x):
            return attention(x, training=True)

    x = tf.random.normal([1, length, WIDTH])
    layer(x[:, :8])

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x)
        return tape.gradient(y, [x, *(v.value for v in attention.trainable_variables)], tf.ones_like(y))[0]

    before, seconds, start = peak_megabytes(), [], time.perf_counter()
    step(x).numpy()  # traces
    while not seconds or len(seconds) < 15 and time.perf_counter() - start < 10:
        began = time.perf_counter()
        step(x).numpy()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), peak_megabytes() - before


def plot(rows, windows):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for i, (axis, what, unit) in enumerate(zip(axes, ("time", "peak memory"), ("seconds", "MB"))):
        for j, kind in enumerate(KINDS):
            points = [(row[2], float(row[3 + 2 * j + i].replace(",", ""))) for row in rows if row[3 + 2 * j]]
            axis.loglog(*zip(*points), "o-", label=kind, base=2)
        axis.set(title=f"{what}, causal, forward and backward", xlabel="positions", ylabel=unit)
        axis.legend()
    axes[2].plot(list(windows), [seconds / WINDOWED * 1e6 for seconds, _ in windows.values()], "o-")
    axes[2].set(title=f"a causal window, {WINDOWED} positions", xlabel="window", ylabel="microseconds a position")
    axes[2].set(xlim=0, ylim=0)
    figure.savefig(pathlib.Path(__file__).with_suffix(".png"), dpi=90)


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(*json.loads(sys.argv[2]))))
    else:
        main()
