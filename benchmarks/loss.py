"""The loss over a large vocabulary: from all logits at once, and a block of tokens at a time (`loss_model`'s).

    python benchmarks/loss.py     # a minute or two on 2 cores

Vectors of width 256 of 4096 tokens, 32000 pieces, label smoothing 0.1: loss and gradients of vectors and kernel, as a
TensorFlow graph, no XLA. Peak memory is that of a process of its own above what it took before; seconds are medians.
"""

import json
import subprocess
import sys

from results import median_seconds, peak_megabytes, record, table, versions

TOKENS, WIDTH, VOCABULARY, ROUNDS = 4096, 256, 32000, 9


def main():
    rows = []
    for dtype in ("float32", "bfloat16"):
        for kind in ("all logits", "blocks"):
            command = [sys.executable, __file__, "measure", kind, dtype]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds, megabytes = json.loads(done.stdout.splitlines()[-1])
            rows.append([dtype, kind, f"{seconds:.2f}", f"{megabytes:,.0f}"])
    text = f"{versions('keras', 'tensorflow')}. {__doc__.split(chr(10) * 2)[2]}\n\n"
    record("Loss over a large vocabulary", text + table(["dtype", "logits", "seconds", "peak MB"], rows))


def measure(kind, dtype):
    """(median seconds, peak MB)."""
    import tensorflow as tf

    from keras_transformer.crossentropy import linear_crossentropy, token_losses

    vectors = tf.cast(tf.random.normal([TOKENS, WIDTH]), dtype)
    kernel = tf.cast(tf.random.normal([WIDTH, VOCABULARY], stddev=WIDTH**-0.5), dtype)
    labels = tf.random.uniform([TOKENS], 0, VOCABULARY, tf.int32)

    @tf.function
    def step(vectors, kernel):
        if kind == "blocks":
            losses = linear_crossentropy(vectors, kernel, labels, labels >= 0, 0.1)
        else:
            losses, _ = token_losses(labels[None], (vectors @ kernel)[None], 0.1, pad_id=-1)
        loss = tf.reduce_mean(losses)
        return loss, *tf.gradients(loss, [vectors, kernel])

    before = peak_megabytes()
    seconds = median_seconds({kind: lambda: [tensor.numpy() for tensor in step(vectors, kernel)]}, ROUNDS)[kind]
    return seconds, peak_megabytes() - before


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        print(json.dumps(measure(*sys.argv[2:])))
    else:
        main()
