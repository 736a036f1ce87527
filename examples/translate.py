"""Learns to translate from a tab-separated file of sentence pairs, and ships it as a SavedModel.

    python examples/translate.py train PAIRS.tsv           # source TAB target a line; results into runs/translate
    python examples/translate.py evaluate TEST.tsv         # BLEU, chrF and TER, greedily and with a beam of 4
    python examples/translate.py translate SENTENCE...     # with the SavedModel, without keras_transformer
    python examples/translate.py export                    # writes the SavedModel again, of another beam width, say

Pairs to try it on: `examples/libreoffice_pairs.py`. Size of the model, vocabulary, batches and epochs are chosen by the
number of pairs; the options change them. Killed, `train` goes on where it was when it is run again with the same
options. It needs what `pip install '.[examples]'` installs.
"""

import argparse
import csv
import pathlib
import random
import sys

MAX_LENGTH = 64  # tokens of a sentence, start or end among them
SIZES = {  # by the number of pairs, at least: the model, pieces of both languages, positions a batch and side, epochs
    0: {"preset": "tiny", "vocabulary": 4000, "tokens": 1024, "epochs": 16},
    100_000: {"preset": "small", "vocabulary": 8000, "tokens": 2048, "epochs": 10},
    1_000_000: {"preset": "base", "vocabulary": 32000, "tokens": 8192, "epochs": 5},
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/translate"), help="of all results")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train, evaluate, plot and export")
    training.add_argument("pairs", type=pathlib.Path)
    training.add_argument("--valid", type=pathlib.Path, help="pairs to validate on; else some of PAIRS")
    training.add_argument("--test", type=pathlib.Path, help="pairs to test on; else some of PAIRS")
    training.add_argument("--preset", choices=["tiny", "small", "base", "big"], help="the size of the model")
    training.add_argument("--dropout", type=float)
    training.add_argument("--vocabulary", type=int, help="pieces of both languages together")
    training.add_argument("--tokens", type=int, help="positions a batch and side")
    training.add_argument("--epochs", type=int)
    training.add_argument("--policy", default="float32", help="mixed_bfloat16 is faster where the processor has it")
    training.add_argument("--seed", type=int, default=1)
    commands.add_parser("evaluate", help="score on other pairs").add_argument("pairs", type=pathlib.Path)
    commands.add_parser("translate", help="translate sentences").add_argument("sentences", nargs="+")
    exporting = commands.add_parser("export", help="write the SavedModel again")
    exporting.add_argument("--width", type=int, default=4, help="beams")
    exporting.add_argument("--n", type=int, default=1, help="translations of each sentence")
    arguments = vars(parser.parse_args())
    {"train": train, "evaluate": evaluate, "translate": translate, "export": export}[arguments.pop("command")](
        **arguments
    )


def train(folder, pairs, valid, test, policy, seed, **options):
    import keras
    import matplotlib  # noqa: F401, now, rather than after the training
    import sacrebleu  # noqa: F401

    import keras_transformer as kt

    keras.utils.set_random_seed(seed)
    keras.config.set_dtype_policy(policy)
    folder.mkdir(parents=True, exist_ok=True)
    pairs, valid, test = parts(pairs, valid, test)
    defaults = next(defaults for least, defaults in reversed(SIZES.items()) if len(pairs) >= least)
    options = {name: option for name, option in options.items() if option is not None}
    sizes = {**defaults, **options}
    print(f"{len(pairs)} pairs to train on, {len(valid)} to validate and {len(test)} to test; {sizes}")

    tokenizer = kt.Tokenizer.train(
        (text for pair in pairs for text in pair), sizes["vocabulary"], kind="bpe", name="tokenizer"
    )
    batches = kt.pair_batches(
        pairs, tokenizer, tokenizer, sizes["tokens"], max_length=MAX_LENGTH, shuffle=len(pairs), seed=seed
    )
    valid_batches = kt.pair_batches(valid, tokenizer, tokenizer, max_length=MAX_LENGTH)
    print(f"{len(batches)} batches an epoch, {batches.padding:.1%} padding")
    model = compiled_model(tokenizer.vocab_size, sizes, sizes["epochs"] * len(batches), policy)
    model.summary()
    greedy = kt.Translator(model, tokenizer, tokenizer, max_length=MAX_LENGTH, width=1)
    sample = valid[:200]
    scores = kt.GenerationScores(greedy, [source for source, _ in sample], [target for _, target in sample])
    resume = kt.Resume(folder, batches, every=1000)
    log = folder / "log.csv"
    if not resume.path.exists():  # what is there is of another run
        log.unlink(missing_ok=True)
    model.fit(
        batches,
        epochs=sizes["epochs"],
        validation_data=valid_batches,
        shuffle=False,  # the batches are shuffled already
        callbacks=[scores, keras.callbacks.CSVLogger(log, append=True), resume],
    )
    translator = kt.Translator(model, tokenizer, tokenizer, max_length=MAX_LENGTH)
    translator.save(folder / "translate.keras")
    translator.export(folder / "saved_model")
    plot_curve(log, folder / "learning_curve.png")
    show_scores(translator, test)


def compiled_model(vocab_size, sizes, steps, policy):
    """A Transformer of some `sizes` that is about to be trained for so many steps."""
    import keras

    import keras_transformer as kt

    preset = kt.PRESETS[sizes["preset"]]
    preset = {**preset, "dropout": sizes.get("dropout", preset["dropout"])}
    model = kt.build_transformer(vocab_size, norm_first=True, **preset)
    warmup = steps // 20
    highest = 2e-3 * (128 / preset["d_model"]) ** 0.5
    rate = keras.optimizers.schedules.CosineDecay(0.0, steps - warmup, warmup_target=highest, warmup_steps=warmup)
    optimizer = keras.optimizers.Adam(rate, beta_2=0.98, epsilon=1e-9)
    model.compile(
        optimizer if policy != "mixed_float16" else keras.optimizers.LossScaleOptimizer(optimizer),
        kt.TokenCrossentropy(label_smoothing=0.1),
        metrics=[kt.TokenLoss(), kt.TokenAccuracy()],
        jit_compile=False,  # XLA compiles for each length, and is no faster on a CPU
    )
    return model


def evaluate(folder, pairs):
    show_scores(load(folder), read_pairs(pairs))


def export(folder, width, n):
    searching(load(folder), width, n).export(folder / "saved_model")


def translate(folder, sentences):
    """What a server does: TensorFlow, tensorflow-text for the tokenizers' ops, and the SavedModel."""
    import tensorflow as tf
    import tensorflow_text  # noqa: F401

    path = trained(folder / "saved_model")
    found = tf.saved_model.load(str(path)).signatures["serving_default"](text=tf.constant(sentences))
    for texts in found["text"].numpy():
        print("\t".join(text.decode() for text in texts))


def load(folder):
    """The translator that `train` saved."""
    import keras

    import keras_transformer  # noqa: F401, registers the layers

    return keras.models.load_model(trained(folder / "translate.keras"))


def trained(path):
    """The path of something that `train` writes; without it the program ends."""
    if not path.exists():
        sys.exit(f"{path} is not there: run `python examples/translate.py train PAIRS.tsv` first.")
    return path


def searching(translator, width, n=1):
    """The same translator with another number of beams and of translations."""
    import keras_transformer as kt

    return kt.Translator(
        translator.model,
        translator.source_tokenizer,
        translator.target_tokenizer,
        max_length=translator.max_length,
        max_source_length=translator.max_source_length,
        width=width,
        n=n,
    )


def show_scores(translator, pairs):
    """Prints BLEU, chrF and TER of all pairs, and ten translations, from the best to the worst."""
    import sacrebleu

    sources, references = zip(*pairs)
    for width in (1, 4):
        translations = searching(translator, width)(sources)
        print(f"\n{'greedy' if width == 1 else f'beam of {width}'}, {len(pairs)} sentences:")
        for score in (sacrebleu.corpus_bleu, sacrebleu.corpus_chrf, sacrebleu.corpus_ter):
            print(f"  {score(translations, [references])}")
    chrf = [sacrebleu.sentence_chrf(text, [reference]).score for text, reference in zip(translations, references)]
    places = sorted(range(len(pairs)), key=lambda place: -chrf[place])
    print("\nfrom the best to the worst (source, translation, reference):")
    for place in (places[i] for i in sorted({round(i * (len(places) - 1) / 9) for i in range(10)})):
        print(f"\n  {sources[place]}\n  {translations[place]}\n  ({references[place]})")


def plot_curve(log, path):
    """Losses and scores of each epoch, also of those before an interruption."""
    import matplotlib.pyplot as plt

    with log.open(encoding="utf-8") as lines:
        rows = {int(row["epoch"]) + 1: row for row in csv.DictReader(lines)}
    epochs, rows = zip(*rows.items())  # the last row of each: an epoch that was killed at its end is there twice
    figure, (losses, scores) = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
    for axes, names in ((losses, ("token_loss", "val_token_loss")), (scores, ("val_bleu", "val_chrf"))):
        for name in names:
            axes.plot(epochs, [float(row[name]) for row in rows], marker="o", label=name)
        axes.set(xlabel="epoch")
        axes.legend()
    losses.set(ylabel="nats a token")
    scores.set(ylabel="greedy, 200 sentences")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parts(pairs, valid, test):
    """Pairs to train on, to validate and to test; what is not given is held out, 1 % each and at most 1000."""
    pairs = read_pairs(pairs)
    random.Random(0).shuffle(pairs)
    held_out = []
    for path in (valid, test):
        if path:
            held_out.append(read_pairs(path))
        else:
            number = min(1000, max(1, len(pairs) // 100))
            pairs, taken = pairs[:-number], pairs[-number:]
            held_out.append(taken)
    if not pairs:
        sys.exit(
            "Too few pairs: one to train on is needed, and unless files are given one to validate and one to test."
        )
    return pairs, *held_out


def read_pairs(path):
    """The (source, target) pairs of a file."""
    import keras_transformer as kt

    try:
        pairs = list(kt.read_tsv(path))
    except (FileNotFoundError, ValueError) as error:
        sys.exit(str(error))
    return pairs or sys.exit(f"{path}: there must be a pair; the file is empty.")


if __name__ == "__main__":
    main()
