"""What equal training comes to: ours, PyTorch's nn.Transformer and keras-hub blocks after as many equal batches.

    python benchmarks/quality.py FOLDER     # of train.tsv, valid.tsv, test.tsv: source TAB target; an hour on 2 cores

2+2 layers, width 128, 4 heads, inner width 512, pre-norm with a final normalization on both sides, ReLU, sinusoids, one
table of 8000 pieces for both languages and the logits, which starts N(0, 1/128), the other weights as each package
starts them; dropout 0.1 where each package puts it. For all: float32, batches of 2048 positions, cross-entropy with
smoothing 0.1, Adam (0.9, 0.98, 1e-9), 5 % warm-up to 2e-3 and a cosine to 0. All are scored by the same code: held-out
loss without smoothing over valid.tsv, and BLEU of a beam of 4 on the first sentences of test.tsv. Models are trained
one after another; the seconds hold the tracing, and what else the machine does falls on one of them.
"""

import argparse
import functools
import os
import pathlib
import statistics
import time
import warnings

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import keras_hub
import numpy as np
import sacrebleu
import tensorflow as tf
import torch
from keras import ops
from results import record, table, versions
from train_step import inputs
from training import stream

import keras_transformer as kt
from keras_transformer.filters import forbid
from keras_transformer.parts import FunctionalModel

SIZES = kt.PRESETS["tiny"]
WIDTH, LAYERS, HEADS = SIZES["d_model"], SIZES["num_layers"], SIZES["num_heads"]
INNER, DROPOUT = SIZES["intermediate_dim"], SIZES["dropout"]
EPSILON = 1e-5  # of layer normalization: PyTorch's and keras-hub's own
VOCABULARY, TOKENS, MAX_LENGTH, BEAM = 8000, 2048, 64, 4
PEAK, SMOOTHING, ADAM = 2e-3, 0.1, {"beta_1": 0.9, "beta_2": 0.98, "epsilon": 1e-9}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--updates", type=int, default=800)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--sentences", type=int, default=500)
    arguments = parser.parse_args()
    pairs, valid, test = (list(kt.read_tsv(arguments.folder / f"{name}.tsv")) for name in ("train", "valid", "test"))
    sources, references = zip(*test[: arguments.sentences])
    tokenizer = kt.Tokenizer.train((text for pair in pairs for text in pair), VOCABULARY, kind="bpe")
    valid = list(kt.pair_batches(valid, tokenizer, tokenizer, TOKENS, MAX_LENGTH).as_numpy_iterator())
    figures = {name: [] for name in arguments.models}
    for seed in arguments.seeds:
        batches = batches_of(pairs, tokenizer, seed, arguments.updates)
        for name in arguments.models:
            keras.backend.clear_session()
            train, translate = MODELS[name]
            model, seconds = train(tokenizer.vocab_size, batches, seed)
            bleu = sacrebleu.corpus_bleu(translate(model, tokenizer, sources), [references]).score
            figures[name].append((held_out_loss(model, valid), bleu, seconds))
            print(f"seed {seed}, {name}: loss {figures[name][-1][0]:.4f}, BLEU {bleu:.2f}, {seconds:.0f} s", flush=True)
    rows = [[name, *map(spread, zip(*runs), (3, 2, 0))] for name, runs in figures.items()]
    done = f"{arguments.updates} updates, {len(sources)} sentences; mean (lowest..highest) of seeds {arguments.seeds}."
    measured = versions("keras", "tensorflow", "torch", "keras-hub", "sacrebleu")
    columns = ["model", "held-out loss, nats a token", "BLEU", "seconds of training"]
    record("Quality", f"{measured}. {__doc__.split(chr(10) * 2)[2]}\n\n{done}\n\n{table(columns, rows)}")


def spread(values, digits):
    return f"{statistics.mean(values):.{digits}f} ({min(values):.{digits}f}..{max(values):.{digits}f})"


def batches_of(pairs, tokenizer, seed, number):
    """As many batches, from as many epochs as it takes."""
    batches = kt.pair_batches(pairs, tokenizer, tokenizer, TOKENS, MAX_LENGTH, shuffle=len(pairs), seed=seed)
    return list(batches.repeat().take(number).as_numpy_iterator())


def schedule(updates):
    warmup = max(1, updates // 20)
    return keras.optimizers.schedules.CosineDecay(0.0, updates - warmup, warmup_target=PEAK, warmup_steps=warmup)


def held_out_loss(model, batches):
    model.compile(loss=kt.TokenCrossentropy(), metrics=[kt.TokenLoss()], jit_compile=False)
    return model.evaluate(stream(batches), verbose=0, return_dict=True)["token_loss"]


def translate_cached(model, tokenizer, sources):
    return kt.Translator(model, tokenizer, tokenizer, MAX_LENGTH, width=BEAM)(sources)


def translate_uncached(model, tokenizer, sources):
    """The same search, for a model without our cache: all that is written goes through the decoder at each step."""
    embedding, node, _ = model.outputs[0]._keras_history
    vectors = embedding._inbound_nodes[node].input_tensors[0]  # logits are computed at one position only
    parts = FunctionalModel(keras.Model(model.input, vectors))  # encodes the source once

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def search(source):
        context = parts.encode({"source": source})

        def step(tokens, index, cache):
            memory, written = (context, 0) if cache is None else cache
            written = ops.where(ops.arange(MAX_LENGTH) == index[:, None], tokens, written)
            new = ops.take_along_axis(parts.decode(written, memory), index[:, None, None], axis=1)
            return embedding(new, reverse=True), (memory, written)

        start = ops.full((ops.shape(source)[0], 1), tokenizer.start_id, dtype="int32")
        return kt.beam(step, start, MAX_LENGTH, BEAM, filters=[forbid([tokenizer.start_id])])["ids"][:, 0]

    parted = (sources[i : i + 64] for i in range(0, len(sources), 64))
    ids = (tokenizer.tokenize(texts, end=True).to_tensor(tokenizer.pad_id) for texts in parted)
    return [text for source in ids for text in tokenizer.decode(search(source))]


# the models; what trains one takes (vocabulary, batches, seed) and gives (trained Keras model, seconds)


def by_fit(build, vocabulary, batches, seed):
    keras.utils.set_random_seed(seed)
    model, adam = build(vocabulary), keras.optimizers.Adam(schedule(len(batches)), **ADAM)
    model.compile(adam, kt.TokenCrossentropy(label_smoothing=SMOOTHING), jit_compile=False)
    start = time.perf_counter()
    model.fit(stream(batches), verbose=0, shuffle=False)
    return model, time.perf_counter() - start


def ours(vocabulary):
    """With dropout also where PyTorch has it: on attention weights and inside the feed-forward layers."""
    inside = {"attention": {"dropout": DROPOUT}, "feed_forward": {"dropout": DROPOUT}}
    return kt.build_transformer(vocabulary, norm_first=True, epsilon=EPSILON, **SIZES, **inside)


def keras_hub_blocks(vocabulary):
    layers = keras_hub.layers
    source, target = inputs()
    normal = keras.initializers.RandomNormal(stddev=WIDTH**-0.5)
    embedding = layers.ReversibleEmbedding(vocabulary, WIDTH, embeddings_initializer=normal)
    options = {"dropout": DROPOUT, "layer_norm_epsilon": EPSILON, "normalize_first": True}

    def embed(ids):
        x = embedding(ids) * WIDTH**0.5
        return keras.layers.Dropout(DROPOUT)(x + layers.SinePositionEncoding()(x))

    x, y = embed(source), embed(target)
    masks = {"decoder_padding_mask": target != 0, "encoder_padding_mask": source != 0}
    for _ in range(LAYERS):
        x = layers.TransformerEncoder(INNER, HEADS, **options)(x, padding_mask=masks["encoder_padding_mask"])
    x = keras.layers.LayerNormalization(epsilon=EPSILON)(x)
    for _ in range(LAYERS):
        y = layers.TransformerDecoder(INNER, HEADS, **options)(y, x, **masks)
    y = keras.layers.LayerNormalization(epsilon=EPSILON)(y)
    return keras.Model({"source": source, "target": target}, embedding(y, reverse=True))


def train_torch(vocabulary, batches, seed):
    """Gives a model of ours with the weights that PyTorch learned."""
    torch.manual_seed(seed)
    model, rate = Translation(vocabulary), schedule(len(batches))
    adam = torch.optim.Adam(model.parameters(), betas=(ADAM["beta_1"], ADAM["beta_2"]), eps=ADAM["epsilon"])
    smoothed = torch.nn.CrossEntropyLoss(ignore_index=0, label_smoothing=SMOOTHING)
    start = time.perf_counter()
    for i, (batch, labels) in enumerate(batches):
        adam.param_groups[0]["lr"] = float(rate(i))
        loss = smoothed(model(batch).flatten(0, 1), torch.tensor(labels, dtype=torch.long).flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    seconds = time.perf_counter() - start
    copy = ours(vocabulary)
    state = model.state_dict()
    copy.get_layer("embedding").set_weights([state["table.weight"].numpy()])
    for side in kt.load_torch_transformer(model.transformer.state_dict(), HEADS, norm_first=True, epsilon=EPSILON):
        copy.get_layer(side.name).set_weights(side.get_weights())
    with torch.no_grad():
        logits = model.eval()(batches[0][0]).numpy()
    gap = np.abs(logits - np.asarray(copy(batches[0][0]))).max() / max(1, np.abs(logits).max())
    if not gap <= 1e-4:
        raise ValueError(f"Logits of the copy must equal PyTorch's to 1e-4 of the largest; got {gap}.")
    return copy, seconds


class Translation(torch.nn.Module):
    """`nn.Transformer` with what it lacks: one scaled table for tokens and logits, sinusoids, masks."""

    def __init__(self, vocabulary):
        super().__init__()
        self.table = torch.nn.Embedding(vocabulary, WIDTH)
        torch.nn.init.normal_(self.table.weight, std=WIDTH**-0.5)
        self.dropout = torch.nn.Dropout(DROPOUT)
        options = {"layer_norm_eps": EPSILON, "batch_first": True, "norm_first": True}
        with warnings.catch_warnings():  # pre-norm layers have no nested tensors
            warnings.filterwarnings("ignore", "enable_nested_tensor", UserWarning)
            self.transformer = torch.nn.Transformer(WIDTH, HEADS, LAYERS, LAYERS, INNER, DROPOUT, **options)
        self.sinusoids = torch.tensor(np.array(kt.positions.sinusoid(np.arange(MAX_LENGTH), WIDTH)))

    def embed(self, ids):
        return self.dropout(self.table(ids) * WIDTH**0.5 + self.sinusoids[: ids.shape[1]])

    def forward(self, inputs):
        source, target = (torch.tensor(inputs[name], dtype=torch.long) for name in ("source", "target"))
        masks = {"src_key_padding_mask": source == 0, "memory_key_padding_mask": source == 0}
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        masks = {**masks, "tgt_key_padding_mask": target == 0, "tgt_mask": later}
        return self.transformer(self.embed(source), self.embed(target), **masks) @ self.table.weight.T


MODELS = {  # how each is trained, and how its translations are searched
    "ours": (functools.partial(by_fit, ours), translate_cached),
    "torch": (train_torch, translate_cached),
    "keras-hub": (functools.partial(by_fit, keras_hub_blocks), translate_uncached),
}


if __name__ == "__main__":
    main()
