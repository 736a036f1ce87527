"""How far positions reach past the lengths of training: copying and reversing.

    python benchmarks/extrapolation.py     # half an hour on 2 cores

A decoder of 3 layers, width 64, reads `start task symbols separator` and writes the symbols again, or from last to
first (the two tasks are mixed). It is trained on up to 64 random symbols out of 32 and tested on up to 256, with the
right symbols before each that it has to predict: the figures are the share of symbols that it gets right. The models
differ in their positions only: sinusoids, learned (a table for the longest test, of which training sees a part),
rotary, ALiBi.
"""

import argparse
import os
import pathlib

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from results import record, table, versions

import keras_transformer as kt

START, END, TASKS, SEPARATOR, FIRST, SYMBOLS = 2, 3, (4, 5), 6, 7, 32
TRAINED, LENGTHS, BATCH = 64, [8, 16, 32, 48, 64, 80, 96, 128, 192, 256], 32
POSITIONS = {
    "sinusoid": {"positions": "sinusoid"},
    "learned": {"positions": "learned", "max_length": 2 * LENGTHS[-1] + 3},
    "rotary": {"attention": {"position": "rotary"}},
    "ALiBi": {"attention": {"position": "alibi"}},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=6000)
    parser.add_argument("--models", nargs="+", choices=POSITIONS, default=list(POSITIONS))
    arguments = parser.parse_args()
    figures = {}
    for name in arguments.models:
        keras.utils.set_random_seed(1)
        model = trained(POSITIONS[name], arguments.updates)
        for task, word in enumerate(("copy", "reverse")):
            figures[word, name] = [accuracy(model, length, task) for length in LENGTHS]
            print(word, name, figures[word, name], flush=True)
    rows = [[*who, *(f"{share:.0%}" for share in shares)] for who, shares in sorted(figures.items())]
    text = f"{versions('keras', 'tensorflow')}. {__doc__.split(chr(10) * 2)[2]}\n\n{arguments.updates} updates of "
    text += f"{BATCH} rows.\n\n{table(['task', 'positions', *map(str, LENGTHS)], rows)}"
    record("Past the lengths of training", text)
    plot(figures)


def trained(positions, updates):
    size = {"d_model": 64, "num_layers": 3, "num_heads": 4, "intermediate_dim": 256, "dropout": 0.0}
    model = kt.build_language_model(FIRST + SYMBOLS, **size, norm_first=True, **positions)
    rate = keras.optimizers.schedules.CosineDecay(0.0, updates - 200, warmup_target=2e-3, warmup_steps=200)
    adam = keras.optimizers.Adam(rate, beta_2=0.98, global_clipnorm=1.0)
    model.compile(adam, kt.TokenCrossentropy(), metrics=[kt.TokenAccuracy()], jit_compile=False)
    model.fit(batches(), steps_per_epoch=updates // 10, epochs=10, verbose=2)
    return model


def batches():
    """Random rows of up to `TRAINED` symbols, the same for every model."""
    rng = np.random.default_rng(1)
    while True:
        rows = [row(rng, rng.integers(1, TRAINED + 1), rng.integers(2)) for _ in range(BATCH)]
        yield as_batch(rows, 2 * TRAINED + 3)


def row(rng, length, task):
    """(tokens, labels): labels are padding but where the answer stands."""
    symbols = FIRST + rng.integers(SYMBOLS, size=length)
    answer = symbols[:: 1 - 2 * task]
    tokens = [START, TASKS[task], *symbols, SEPARATOR, *answer]
    return tokens, [0] * (length + 2) + [*answer, END]


def as_batch(rows, length):
    tokens, labels = (np.array([ids + [0] * (length - len(ids)) for ids in part], "int32") for part in zip(*rows))
    return tokens, labels


def accuracy(model, length, task, number=64):
    rng = np.random.default_rng([length, task])
    tokens, labels = as_batch([row(rng, length, task) for _ in range(number)], 2 * length + 3)
    right = model.predict(tokens, batch_size=16, verbose=0).argmax(-1) == labels
    return float(right[labels >= FIRST].mean())


def plot(figures):
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.5), layout="constrained", sharey=True)
    for (task, name), shares in figures.items():
        axis = axes[int(task == "reverse")]
        axis.plot(LENGTHS, shares, "o-", label=name)
        axis.set(title=task, xlabel="symbols", ylabel="share right", ylim=(0, 1.02))
    for axis in axes:
        axis.axvline(TRAINED, color="gray", linestyle=":")
        axis.legend()
    figure.savefig(pathlib.Path(__file__).parents[1] / "docs" / "extrapolation.png", dpi=90)


if __name__ == "__main__":
    main()
