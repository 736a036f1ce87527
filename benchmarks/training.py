"""Training on real pairs: ours, keras.layers parts and keras-hub blocks, fed with fixed padding and with our batches.

    python benchmarks/training.py PAIRS.tsv     # source TAB target a line; some ten minutes on 2 cores

4+4 layers, width 256, 8 heads, inner width 1024, 8000 pieces of both languages, dropout 0.1 where each package puts it,
Adam, the same loss for all, no XLA. Buckets and packed rows are `pair_batches`'s, 2048 positions a batch, at most 64
tokens a side; fixed padding is what the public translation example of keras-hub does, 64 rows of 40 tokens. All train
by `fit` on batches made before; some steps of each alternate, so that what else the machine does falls on all of them.
"""

import argparse
import itertools
import time

import keras
import tensorflow as tf
from results import record, table, versions
from train_step import VOCABULARY, keras_hub_blocks, keras_parts, ours

import keras_transformer as kt

STEPS = 10  # of one model, before the next one's turn


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", help="a file of source TAB target lines")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--policies", nargs="+", default=["float32", "mixed_bfloat16"])
    arguments = parser.parse_args()
    pairs = list(itertools.islice(kt.read_tsv(arguments.pairs), 100_000))
    feeds = batches_of(pairs, STEPS * (arguments.rounds + 1))
    rows = []
    for policy in arguments.policies:
        keras.config.set_dtype_policy(policy)
        speeds = tokens_a_second(feeds, arguments.rounds)
        own = speeds["keras_transformer", "buckets"]
        rows += [[policy, *names, f"{speed:,.0f}", f"{own / speed:.2f}"] for names, speed in speeds.items()]
    padding = ", ".join(f"{name} {100 * share:.1f} %" for name, (_, share) in feeds.items())
    text = f"{versions('keras', 'tensorflow', 'keras-hub')}. {__doc__.split(chr(10) * 2)[2]}\n\nPadding: {padding}.\n\n"
    columns = ["policy", "model", "batches", "target tokens a second", "ours with buckets / it"]
    record("Training on real pairs", text + table(columns, rows))


def batches_of(pairs, number):
    """For each way to feed a model: (the first batches of an epoch, the share of padding in the whole epoch)."""
    tokenizer = kt.Tokenizer.train((text for pair in pairs for text in pair), VOCABULARY, kind="bpe")

    def fed(max_length=64, tokens_per_batch=2048, **options):
        batches = kt.pair_batches(
            pairs, tokenizer, tokenizer, tokens_per_batch, max_length, shuffle=len(pairs), **options
        )
        return list(batches.take(number).as_numpy_iterator()), batches.padding

    return {"buckets": fed(), "packed": fed(packed=True), "fixed padding": fed(40, 64 * 40, buckets=[40])}


def tokens_a_second(feeds, rounds):
    """Target tokens that are not padding, a second of `fit`: by (model, batches)."""
    models = {
        ("keras_transformer", "buckets"): ours(),
        ("keras_transformer", "packed"): ours(packed=True),
        ("keras.layers parts", "fixed padding"): keras_parts(),
        ("keras-hub blocks", "fixed padding"): keras_hub_blocks(),
        ("keras.layers parts", "buckets"): keras_parts(),
        ("keras-hub blocks", "buckets"): keras_hub_blocks(),
    }
    tokens, seconds = dict.fromkeys(models, 0), dict.fromkeys(models, 0.0)
    for model in models.values():
        model.compile(keras.optimizers.Adam(1e-4), kt.TokenCrossentropy(), jit_compile=False)
    for i in range(rounds + 1):
        for names, model in models.items():
            batches = feeds[names[1]][0][i * STEPS : (i + 1) * STEPS]
            data = stream(batches)
            start = time.perf_counter()
            model.fit(data, verbose=0, shuffle=False)
            if i:  # the first round traces
                seconds[names] += time.perf_counter() - start
                tokens[names] += sum(int((labels != 0).sum()) for _, labels in batches)
    return {names: tokens[names] / seconds[names] for names in models}


def stream(batches):
    """Batches of different lengths as a dataset for `fit`."""
    ids = tf.TensorSpec([None, None], tf.int32)
    signature = {"source": ids, "target": ids}, ids
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=signature)
    return data.apply(tf.data.experimental.assert_cardinality(len(batches))).prefetch(2)


if __name__ == "__main__":
    main()
