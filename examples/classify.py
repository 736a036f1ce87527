"""Learns to which class a text belongs, from a tab-separated file, and ships it as a SavedModel.

    python examples/classify.py train TRAIN.tsv --valid VALID.tsv --test TEST.tsv     # class TAB text a line
    python examples/classify.py train TRAIN.tsv --labels 500 --pretrained runs/fill_mask/model.keras
    python examples/classify.py evaluate TEST.tsv
    python examples/classify.py classify TEXT...       # with the SavedModel, without keras_transformer

With `--pretrained` the encoder starts with what `examples/fill_mask.py` learned from texts alone. Results go into
runs/classify. It needs what `pip install '.[examples]'` installs.
"""

import argparse
import collections
import pathlib
import random
import sys

MAX_LENGTH = 160  # pieces of a text, start and end among them; longer ones are cut in training


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/classify"), help="of all results")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train, evaluate, plot and export")
    training.add_argument("examples", type=pathlib.Path)
    training.add_argument("--valid", type=pathlib.Path, help="examples to validate on; else some of EXAMPLES")
    training.add_argument("--test", type=pathlib.Path, help="examples to test on; else some of EXAMPLES")
    training.add_argument("--pretrained", type=pathlib.Path, help="a model of examples/fill_mask.py")
    training.add_argument("--labels", type=int, help="train on this many examples only")
    training.add_argument("--vocabulary", type=int, default=16000, help="pieces at most, of a model from nothing")
    training.add_argument("--epochs", type=int, help="the most; by default as many as 4,000 batches make, at most 20")
    training.add_argument("--dropout", type=float, default=0.1)
    training.add_argument("--hide", type=float, default=0.3, help="the share of pieces that are masked in training")
    training.add_argument("--rate", type=float, help="the highest learning rate; by default 1e-3, 5e-4 if pretrained")
    training.add_argument("--seed", type=int, default=1)
    commands.add_parser("evaluate", help="score on other examples").add_argument("examples", type=pathlib.Path)
    commands.add_parser("classify", help="classify texts").add_argument("texts", nargs="+")
    arguments = vars(parser.parse_args())
    {"train": train, "evaluate": evaluate, "classify": classify}[arguments.pop("command")](**arguments)


def train(folder, examples, valid, test, pretrained, labels, vocabulary, epochs, dropout, hide, rate, seed):
    import keras
    import tensorflow as tf

    import keras_transformer as kt

    keras.utils.set_random_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    examples, valid, test = parts(examples, valid, test)
    classes = sorted({name for name, _ in examples})
    examples = random.Random(seed).sample(examples, min(labels or len(examples), len(examples)))
    print(f"{len(examples)} texts to train on, {len(valid)} to validate and {len(test)} to test; classes: {classes}")
    if pretrained:
        reader = keras.models.load_model(pretrained)
        tokenizer, reader = reader.get_layer("tokenizer"), reader.get_layer("reader")
    else:
        tokenizer, reader = kt.Tokenizer.train((text for _, text in examples), vocabulary, kind="bpe"), None
    model = classifier(tokenizer.vocab_size, len(classes), dropout, reader)

    def batches(examples, shuffle=0):
        if unknown := sorted({name for name, _ in examples} - set(classes)):
            sys.exit(f"The classes to validate on must be those to train on; got {unknown} too.")
        numbered = [(text, classes.index(name)) for name, text in examples]
        return kt.labeled_batches(numbered, tokenizer, 2048, MAX_LENGTH, shuffle=shuffle, seed=seed)

    def hidden(tokens, numbers):
        """Some pieces masked, others each time, so that the model learns from all words of a text, not from a few."""
        is_chosen = (tf.random.uniform(tf.shape(tokens)) < hide) & (tokens > tokenizer.end_id)
        return tf.where(is_chosen, tokenizer.mask_id, tokens), numbers

    train_batches = batches(examples, shuffle=len(examples)).map(hidden)
    epochs = epochs or max(1, min(20, 4000 // len(train_batches)))
    steps = epochs * len(train_batches)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps - steps // 10, warmup_target=rate or (5e-4 if pretrained else 1e-3), warmup_steps=steps // 10
    )
    model.compile(
        keras.optimizers.AdamW(rate, weight_decay=0.05, clipnorm=1.0),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,  # XLA compiles for each length, and is no faster on a CPU
    )
    best = keras.callbacks.EarlyStopping("val_accuracy", patience=epochs, restore_best_weights=True)
    history = model.fit(
        train_batches, epochs=epochs, validation_data=batches(valid), shuffle=False, callbacks=[best], verbose=2
    )
    save(tokenizer, model, classes, folder)
    plot_history(history, folder / "learning_curve.png")
    evaluate_on(folder, test)


def classifier(vocab_size, num_classes, dropout, reader):
    """A classifier of the size of `reader`, with its weights; without one, a small classifier."""
    import keras_transformer as kt

    options = {"norm_first": True, "activation": "gelu", **kt.PRESETS["tiny"], "dropout": dropout}
    if reader:
        block = reader.get_layer("encoder").get_layer("encoder_block_1")
        number = sum(layer.name.startswith("encoder_block_") for layer in reader.get_layer("encoder").layers)
        options.update(d_model=reader.get_layer("embedding").output_dim, num_layers=number)
        options.update(num_heads=block.num_heads, intermediate_dim=block.intermediate_dim)
    model = kt.build_classifier(vocab_size, num_classes, **options)
    if reader:
        copied = kt.transfer_weights(reader, model, missing=("logits",), unused=("head", "head_norm"))
        print(f"{len(copied)} of {len(model.weights)} weights are pretrained")
    model.summary()
    return model


def save(tokenizer, model, classes, folder):
    """From strings to the probabilities of the classes: as a `.keras` file and as a SavedModel."""
    import keras

    texts = keras.Input((), dtype="string", name="text")
    probabilities = keras.layers.Softmax(dtype="float32", name="probabilities")(
        model(tokenizer(texts, start=True, end=True))
    )
    names = keras.layers.StringLookup(vocabulary=classes, num_oov_indices=0, invert=True, name="class")
    outputs = {"class": names(keras.ops.argmax(probabilities, axis=-1)), "probabilities": probabilities}
    whole = keras.Model(texts, outputs)
    whole.save(folder / "model.keras")
    whole.export(folder / "saved_model", verbose=False)


def evaluate(folder, examples):
    evaluate_on(folder, read(examples))


def evaluate_on(folder, examples):
    """Prints the share of texts that the SavedModel puts into their class, and plots which it takes for which."""
    names, texts = zip(*examples)
    found, _ = answers(folder, texts)
    right = sum(name == answer for name, answer in zip(names, found))
    most = collections.Counter(names).most_common(1)[0]
    print(f"\naccuracy {right / len(names):.1%} of {len(names)} texts; always {most[0]!r}: {most[1] / len(names):.1%}")
    for name in sorted(set(names)):
        own = [answer == name for known, answer in zip(names, found) if known == name]
        print(f"  {name}: {sum(own) / len(own):.1%} of {len(own)}")
    plot_confusion(names, found, folder / "confusion.png")


def classify(folder, texts):
    """What a server does: TensorFlow, tensorflow-text for the tokenizer's ops, and the SavedModel."""
    for text, name, shares in zip(texts, *answers(folder, texts)):
        print(f"{name} ({max(shares):.2f})\t{text}")


def answers(folder, texts):
    """(classes, probabilities) of texts, by the SavedModel."""
    import tensorflow as tf
    import tensorflow_text  # noqa: F401

    path = folder / "saved_model"
    if not path.exists():
        sys.exit(f"{path} is not there: run `python examples/classify.py train EXAMPLES.tsv` first.")
    serve = tf.saved_model.load(str(path)).signatures["serving_default"]
    names, shares = [], []
    for start in range(0, len(texts), 64):
        found = serve(text=tf.constant(texts[start : start + 64]))
        names += [name.decode() for name in found["class"].numpy()]
        shares += found["probabilities"].numpy().tolist()
    return names, shares


def parts(examples, valid, test):
    """Examples to train on, to validate and to test; what is not given is held out, 10 % each and at most 1000."""
    examples = read(examples)
    random.Random(0).shuffle(examples)
    number, held_out = min(1000, max(1, len(examples) // 10)), []
    for path in (valid, test):
        if path:
            held_out.append(read(path))
        else:
            examples, taken = examples[:-number], examples[-number:]
            held_out.append(taken)
    return examples or sys.exit("Too few examples: one to train on is needed."), *held_out


def read(path):
    """The (class, text) pairs of a file."""
    import keras_transformer as kt

    try:
        examples = list(kt.read_tsv(path))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    return examples or sys.exit(f"{path}: there must be an example; the file is empty.")


def plot_history(history, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    epochs = [epoch + 1 for epoch in history.epoch]
    axes.plot(epochs, history.history["accuracy"], marker="o", label="training (with dropout)")
    axes.plot(epochs, history.history["val_accuracy"], marker="o", label="validation")
    axes.set(xlabel="epoch", ylabel="accuracy", title="Classes of texts")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_confusion(names, found, path):
    """How often each class is taken for each."""
    import matplotlib.pyplot as plt

    classes = sorted({*names, *found})
    counts = collections.Counter(zip(names, found))
    figure, axes = plt.subplots(figsize=(5, 4), layout="constrained")
    image = axes.imshow([[counts[name, other] for other in classes] for name in classes], vmin=0)
    axes.set_xticks(range(len(classes)), classes, rotation=45)
    axes.set_yticks(range(len(classes)), classes)
    axes.set(xlabel="class found", ylabel="class")
    figure.colorbar(image, label="texts")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
