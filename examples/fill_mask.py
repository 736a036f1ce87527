"""Learns to fill in hidden words from plain text, as BERT does: the start for a classifier that has few labels.

    python examples/fill_mask.py train TEXTS.txt                 # a text a line; results into runs/fill_mask
    python examples/fill_mask.py train TEXTS.tsv --column 1      # a column of a tab-separated file
    python examples/fill_mask.py fill "the people of the United [MASK] of America"

`examples/classify.py --pretrained runs/fill_mask/model.keras` goes on from there. Killed, `train` goes on where it was
when it is run again with the same options. It needs what `pip install '.[examples]'` installs.
"""

import argparse
import pathlib
import random
import re
import sys

MASK = "[MASK]"
MAX_LENGTH = 128  # pieces of a text, start and end among them; longer ones are cut


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/fill_mask"), help="of all results")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train, evaluate, plot and save")
    training.add_argument("texts", type=pathlib.Path)
    training.add_argument("--column", type=int, help="of a tab-separated file, from 0")
    training.add_argument("--preset", choices=["tiny", "small", "base"], default="tiny", help="the size of the model")
    training.add_argument("--vocabulary", type=int, default=16000, help="pieces, at most")
    training.add_argument("--epochs", type=int, default=10)
    training.add_argument("--seed", type=int, default=1)
    commands.add_parser("fill", help="fill in").add_argument("sentences", nargs="+")
    arguments = vars(parser.parse_args())
    {"train": train, "fill": fill}[arguments.pop("command")](**arguments)


def train(folder, texts, column, preset, vocabulary, epochs, seed):
    import keras

    import keras_transformer as kt

    keras.utils.set_random_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    texts, held_out = split(read(texts, column))
    print(f"{len(texts)} texts to train on, {len(held_out)} held out")
    tokenizer = kt.Tokenizer.train(texts, vocabulary, kind="bpe", name="tokenizer", user_defined_symbols=[MASK])
    options = {"max_length": MAX_LENGTH, "seed": seed}
    batches = kt.masked_batches(texts, tokenizer, shuffle=len(texts), **options)
    valid_batches = kt.masked_batches(held_out, tokenizer, **options).cache()  # the same are hidden in each epoch

    def with_labels(tokens, labels):
        return {"tokens": tokens, "labels": labels}, labels

    model = kt.build_masked_language_model(
        tokenizer.vocab_size, norm_first=True, activation="gelu", name="reader", **kt.PRESETS[preset]
    )
    model.summary()
    trained = kt.loss_model(model)  # of the same weights: no logits of the tokens that are not hidden
    steps = epochs * len(batches)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps=steps - steps // 20, warmup_target=2e-3, warmup_steps=steps // 20
    )
    trained.compile(
        keras.optimizers.AdamW(rate, weight_decay=0.01, beta_2=0.98, clipnorm=1.0),
        kt.TokenCrossentropy(),
        metrics=[kt.TokenLoss()],
        jit_compile=False,  # XLA compiles for each length, and is no faster on a CPU
    )
    history = trained.fit(
        batches.map(with_labels),
        epochs=epochs,
        validation_data=valid_batches.map(with_labels),
        shuffle=False,  # the batches are shuffled already
        callbacks=[kt.Resume(folder, batches)],  # a run that was killed goes on
    )
    strings = keras.Input((), dtype="string", name="text")
    filler = keras.Model(strings, model(tokenizer(strings, start=True, end=True)), name="filler")
    filler.save(folder / "model.keras")
    plot_history(history, folder / "learning_curve.png")
    show(model, valid_batches, tokenizer)
    show_filled(filler, held_out[:8], seed)


def show(model, batches, tokenizer):
    """Prints how often hidden pieces are found, beside what always guessing the most frequent one finds."""
    import collections

    import keras_transformer as kt

    counts = collections.Counter(int(label) for _, labels in batches for label in labels.numpy()[labels.numpy() != 0])
    (piece, often), total = counts.most_common(1)[0], counts.total()
    model.compile(loss=kt.TokenCrossentropy(), metrics=[kt.TokenAccuracy(), kt.Perplexity()], jit_compile=False)
    scores = model.evaluate(batches, verbose=0, return_dict=True)
    print(f"\nof {total} hidden pieces of held-out texts {scores['token_accuracy']:.1%} are found, ", end="")
    print(f"perplexity {scores['perplexity']:.1f}; always {written(tokenizer, piece)!r}: {often / total:.1%}")


def show_filled(filler, texts, seed):
    """Prints held-out texts with a word hidden, and what is put in its place."""
    chance = random.Random(seed)
    print("\nheld-out texts, one word of each hidden, the three best pieces for it:")
    for text in texts:
        words = text.split()[:20]
        place = chance.randrange(len(words))
        hidden, words[place] = words[place], MASK
        (best,) = best_pieces(filler, " ".join(words))
        print(f"  {' '.join(words)}\n    {', '.join(best)} ({hidden})")


def fill(folder, sentences):
    """The three best pieces for each mask."""
    import keras

    import keras_transformer  # noqa: F401, registers the layers

    path = folder / "model.keras"
    if not path.exists():
        sys.exit(f"{path} is not there: run `python examples/fill_mask.py train TEXTS` first.")
    filler = keras.models.load_model(path)
    for sentence in sentences:
        print(sentence, *("\n  " + ", ".join(best) for best in best_pieces(filler, sentence)), sep="")


def best_pieces(filler, text, n=3):
    """For each `[MASK]` of a text the `n` pieces that fit best, with their probabilities.

    A piece holds the space before a word, as those that were hidden in training.
    """
    import keras
    import tensorflow as tf

    tokenizer = filler.get_layer("tokenizer")
    strings = tf.constant([re.sub(r" *\[MASK\]", MASK, text)])
    masks = tokenizer(strings, start=True, end=True)[0] == tokenizer.mask_id
    found, ids = tf.math.top_k(keras.ops.softmax(filler(strings)[0][masks]), n)
    return [
        [f"{written(tokenizer, piece)} {share:.2f}" for piece, share in zip(pieces, shares)]
        for pieces, shares in zip(ids.numpy(), found.numpy())
    ]


def written(tokenizer, piece):
    """A piece with a plain space."""
    return tokenizer.pieces([piece]).numpy()[0].decode().replace("\N{LOWER ONE EIGHTH BLOCK}", " ").strip()


def read(path, column):
    """The texts of a file, those of no words left out."""
    import keras_transformer as kt

    try:
        texts = kt.read_lines(path) if column is None else kt.read_tsv(path, columns=column)
        texts = [text for text in texts if text.strip()]
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    return texts if len(texts) > 1 else sys.exit(f"{path}: there must be two texts or more; got {len(texts)}.")


def split(texts):
    """Texts to train on, and 2 % and at most 1000 that are held out."""
    texts = random.Random(0).sample(texts, len(texts))
    number = min(1000, max(1, len(texts) // 50))
    return texts[number:], texts[:number]


def plot_history(history, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    epochs = [epoch + 1 for epoch in history.epoch]
    axes.plot(epochs, history.history["token_loss"], marker="o", label="training (with dropout)")
    axes.plot(epochs, history.history["val_token_loss"], marker="o", label="held out")
    axes.set(xlabel="epoch", ylabel="nats a hidden piece", title="Filling in")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
