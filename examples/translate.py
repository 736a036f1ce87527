"""Learns to translate from a tab-separated file of sentence pairs, and ships it as a SavedModel.

    python examples/translate.py train PAIRS.tsv     # source TAB target a line; results into runs/translate
    python examples/translate.py translate SENTENCE...

The last pairs of the file, 1 % and at most 1000, are held out and scored with BLEU and chrF (sacrebleu).
"""

import argparse
import pathlib
import sys

MAX_LENGTH = 64  # tokens of a sentence, start or end among them


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/translate"), help="of all results")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train, evaluate and export")
    training.add_argument("pairs", type=pathlib.Path)
    training.add_argument("--epochs", type=int, default=12)
    training.add_argument("--vocabulary", type=int, default=4000, help="pieces of both languages together")
    training.add_argument("--seed", type=int, default=1)
    commands.add_parser("translate", help="translate sentences").add_argument("sentences", nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "translate":
        translate(arguments.folder, arguments.sentences)
    else:
        train(arguments.folder, arguments.pairs, arguments.epochs, arguments.vocabulary, arguments.seed)


def train(folder, path, epochs, vocabulary, seed):
    import keras
    import sacrebleu

    import keras_transformer as kt

    keras.utils.set_random_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    pairs = read_pairs(path)
    num_test = min(1000, max(1, len(pairs) // 100))
    pairs, test = pairs[:-num_test], pairs[-num_test:]
    print(f"{len(pairs)} pairs to train on, {len(test)} held out")

    tokenizer = kt.Tokenizer.train((text for pair in pairs for text in pair), vocabulary, kind="bpe", name="tokenizer")
    batches = kt.pair_batches(
        pairs, tokenizer, tokenizer, tokens_per_batch=2048, max_length=MAX_LENGTH, shuffle=100_000, seed=seed
    )
    test_batches = kt.pair_batches(test, tokenizer, tokenizer, max_length=MAX_LENGTH)
    model = kt.build_transformer(tokenizer.vocab_size, norm_first=True, **kt.PRESETS["tiny"])
    model.summary()
    steps = epochs * int(batches.cardinality())
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps=steps - steps // 20, warmup_target=2e-3, warmup_steps=steps // 20
    )
    model.compile(
        keras.optimizers.Adam(rate, beta_2=0.98, epsilon=1e-9),
        kt.TokenCrossentropy(label_smoothing=0.1),
        metrics=[kt.Perplexity(), kt.TokenAccuracy()],
        jit_compile=False,
    )
    model.fit(
        batches,
        epochs=epochs,
        validation_data=test_batches,
        shuffle=False,
        callbacks=[keras.callbacks.BackupAndRestore(folder / "backup")],
    )

    translator = kt.Translator(model, tokenizer, tokenizer, max_length=MAX_LENGTH)
    translations = translator([source for source, _ in test])
    references = [target for _, target in test]
    for (source, target), translation in list(zip(test, translations))[:10]:
        print(f"\n  {source}\n  {translation}\n  ({target})")
    print()
    print(sacrebleu.corpus_bleu(translations, [references]))
    print(sacrebleu.corpus_chrf(translations, [references]))
    translator.save(folder / "translate.keras")
    translator.export(folder / "saved_model")


def translate(folder, sentences):
    """What a server does: TensorFlow, tensorflow-text for the tokenizers' ops, and the SavedModel."""
    import tensorflow as tf
    import tensorflow_text  # noqa: F401

    path = folder / "saved_model"
    if not path.exists():
        sys.exit(f"{path} is not there: run `python examples/translate.py train PAIRS.tsv` first.")
    found = tf.saved_model.load(str(path)).signatures["serving_default"](text=tf.constant(sentences))
    for text in found["text"].numpy()[:, 0]:
        print(text.decode())


def read_pairs(path):
    """The file's (source, target) pairs; a line without exactly one tab is an error."""
    pairs = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            fields = line.rstrip("\n").split("\t")
            if len(fields) != 2:
                sys.exit(f"{path}, line {number}: a line must be source, tab, target; got {len(fields)} field(s).")
            pairs.append(tuple(fields))
    if len(pairs) < 2:
        sys.exit(f"{path}: at least two pairs are needed, one to train on and one to hold out; got {len(pairs)}.")
    return pairs


if __name__ == "__main__":
    main()
