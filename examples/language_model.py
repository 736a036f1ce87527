"""Learns to write like a text, and ships it as a SavedModel: a small GPT.

    python examples/language_model.py train TEXT.txt --valid VALID.txt --test TEST.txt    # into runs/language_model
    python examples/language_model.py evaluate TEXT.txt
    python examples/language_model.py write "The people of"        # with the SavedModel, without keras_transformer

Each line is a text of its own; long ones are cut. Killed, `train` goes on where it was when it is run again with the
same options. It needs what `pip install '.[examples]'` installs.
"""

import argparse
import math
import pathlib
import random
import sys

MAX_LENGTH = 256  # pieces of a row
WRITTEN = 64  # pieces that are written


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=pathlib.Path, default=pathlib.Path("runs/language_model"), help="of all results"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train, evaluate, plot and export")
    training.add_argument("texts", type=pathlib.Path)
    training.add_argument("--valid", type=pathlib.Path, help="texts to validate on; else some of TEXTS")
    training.add_argument("--test", type=pathlib.Path, help="texts to test on; else those to validate on")
    training.add_argument("--preset", choices=["tiny", "small", "base", "llama"], default="tiny", help="the model")
    training.add_argument("--vocabulary", type=int, default=4000, help="pieces")
    training.add_argument("--dropout", type=float, default=0.1)
    training.add_argument("--epochs", type=int, default=3)
    training.add_argument("--seed", type=int, default=1)
    commands.add_parser("evaluate", help="score on other texts").add_argument("texts", type=pathlib.Path)
    commands.add_parser("write", help="go on from the start of a text").add_argument("starts", nargs="+")
    arguments = vars(parser.parse_args())
    {"train": train, "evaluate": evaluate, "write": write}[arguments.pop("command")](**arguments)


def train(folder, texts, valid, test, preset, vocabulary, dropout, epochs, seed):
    import keras

    import keras_transformer as kt

    keras.utils.set_random_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    texts = read(texts)
    valid, texts = (read(valid), texts) if valid else split(texts)
    print(f"{len(texts)} texts to train on, {len(valid)} to validate")
    tokenizer = kt.Tokenizer.train(texts, vocabulary, kind="bpe", name="tokenizer")
    batches = kt.text_batches(texts, tokenizer, 4096, MAX_LENGTH, shuffle=20000, seed=seed)
    valid_batches = kt.text_batches(valid, tokenizer, 4096, MAX_LENGTH)
    options = {"norm_first": True, **kt.PRESETS[preset], "dropout": dropout}
    model = kt.build_language_model(tokenizer.vocab_size, **options)
    model.summary()
    steps = epochs * len(batches)
    warmup = steps // 20
    rate = keras.optimizers.schedules.CosineDecay(0.0, steps - warmup, warmup_target=2e-3, warmup_steps=warmup)
    model.compile(
        keras.optimizers.AdamW(rate, weight_decay=0.1, beta_2=0.98, clipnorm=1.0),
        kt.TokenCrossentropy(),
        metrics=[kt.Perplexity(), kt.TokenAccuracy()],
        jit_compile=False,  # XLA compiles for each length, and is no faster on a CPU
    )
    history = model.fit(
        batches,
        epochs=epochs,
        validation_data=valid_batches,
        shuffle=False,  # the batches are shuffled already
        callbacks=[kt.Resume(folder, batches, every=500)],  # a run that was killed goes on
    )
    writer = kt.TextGenerator(model, tokenizer, max_length=WRITTEN, options={"temperature": 0.8, "top_p": 0.95})
    writer.save(folder / "writer.keras")
    writer.export(folder / "saved_model")
    plot_history(history, folder / "learning_curve.png")
    show_scores(writer, read(test) if test else valid)


def evaluate(folder, texts):
    import keras

    import keras_transformer  # noqa: F401, registers the layers

    show_scores(keras.models.load_model(trained(folder / "writer.keras")), read(texts))


def show_scores(writer, texts):
    """Prints the perplexity of texts, by piece and by word, the bits for a byte, and how some of them would go on."""
    import keras_transformer as kt

    batches = kt.text_batches(texts, writer.tokenizer, 4096, MAX_LENGTH)
    writer.model.compile(loss=kt.TokenCrossentropy(), metrics=[kt.TokenLoss()], jit_compile=False)
    nats = writer.model.evaluate(batches, verbose=0, return_dict=True)["token_loss"]
    pieces = sum(int((labels.numpy() != 0).sum()) for _, labels in batches)
    words, size = sum(len(text.split()) for text in texts), sum(len(text.encode()) for text in texts)
    print(f"\n{len(texts)} texts, {pieces} pieces, {words} words: perplexity {math.exp(nats):.1f} a piece, ", end="")
    print(f"{math.exp(nats * pieces / words):.1f} a word; {nats * pieces / size / math.log(2):.3f} bits a byte")
    starts = [" ".join(text.split()[:6]) for text in texts[:3]]
    print("\nhow texts that it has not seen might go on:")
    for start, text in zip(starts, writer(starts, seed=1)):
        print(f"\n  {start}\n    {text}")


def write(folder, starts):
    """What a server does: TensorFlow, tensorflow-text for the tokenizer's ops, and the SavedModel."""
    import tensorflow as tf
    import tensorflow_text  # noqa: F401

    serve = tf.saved_model.load(str(trained(folder / "saved_model"))).signatures["serving_default"]
    for texts in serve(text=tf.constant(starts))["text"].numpy():
        print("\n".join(text.decode() for text in texts))


def trained(path):
    """The path of something that `train` writes; without it the program ends."""
    if not path.exists():
        sys.exit(f"{path} is not there: run `python examples/language_model.py train TEXT.txt` first.")
    return path


def read(path):
    """The lines of a file, those of no words left out."""
    import keras_transformer as kt

    try:
        texts = [text for text in kt.read_lines(path) if text.strip()]
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    return texts or sys.exit(f"{path}: there must be a line with a word; there is none.")


def split(texts):
    """2 % of the texts, and at most 1000, and the others."""
    texts = random.Random(0).sample(texts, len(texts))
    number = min(1000, max(1, len(texts) // 50))
    return texts[:number], texts[number:] or sys.exit("Too few texts: one to train on and one to validate are needed.")


def plot_history(history, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    epochs = [epoch + 1 for epoch in history.epoch]
    axes.plot(epochs, history.history["perplexity"], marker="o", label="training (with dropout)")
    axes.plot(epochs, history.history["val_perplexity"], marker="o", label="validation")
    axes.set(xlabel="epoch", ylabel="perplexity of a piece", title="Next pieces")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
