"""Transformer layers for Keras 3: compose them with the functional API, train with `fit`, ship as a SavedModel."""

from keras_transformer.adapters import add_lora, merge_lora
from keras_transformer.attention import blockwise_attention, dot_product_attention
from keras_transformer.averaging import average_checkpoints
from keras_transformer.blocks import DecoderBlock, EncoderBlock
from keras_transformer.callbacks import GenerationScores
from keras_transformer.data import labeled_batches, masked_batches, pair_batches, text_batches
from keras_transformer.decoding import beam, greedy, sample
from keras_transformer.embeddings import TokenEmbedding
from keras_transformer.feed_forward import FeedForward
from keras_transformer.generator import Generator
from keras_transformer.masks import lower_triangular_mask
from keras_transformer.models import PRESETS, build_language_model, build_transformer, loss_model
from keras_transformer.multi_head import MultiHeadCrossAttention, MultiHeadSelfAttention
from keras_transformer.pooling import Pooling
from keras_transformer.positions import LearnedPositions, PositionalEncoding, SegmentIds
from keras_transformer.pretrained import load_pretrained, load_torch_transformer
from keras_transformer.readers import build_classifier, build_masked_language_model, build_regressor
from keras_transformer.relative import AlibiBias, RelativeBias, RotaryPositions
from keras_transformer.resume import Resume
from keras_transformer.scopes import AttentionMaps, DecodingScope
from keras_transformer.sources import mix, read_lines, read_parallel, read_records, read_tsv
from keras_transformer.text import TextGenerator, Translator
from keras_transformer.tokenizer import Tokenizer
from keras_transformer.training import Perplexity, TokenAccuracy, TokenCrossentropy, TokenLoss, WarmupInverseSqrt
from keras_transformer.transfer import transfer_weights
from keras_transformer.wordpiece import WordPiece

__all__ = [
    "AlibiBias",
    "AttentionMaps",
    "DecoderBlock",
    "DecodingScope",
    "EncoderBlock",
    "FeedForward",
    "GenerationScores",
    "Generator",
    "LearnedPositions",
    "MultiHeadCrossAttention",
    "MultiHeadSelfAttention",
    "PRESETS",
    "Perplexity",
    "Pooling",
    "PositionalEncoding",
    "RelativeBias",
    "Resume",
    "RotaryPositions",
    "SegmentIds",
    "TextGenerator",
    "TokenAccuracy",
    "TokenCrossentropy",
    "TokenEmbedding",
    "TokenLoss",
    "Tokenizer",
    "Translator",
    "WarmupInverseSqrt",
    "WordPiece",
    "add_lora",
    "average_checkpoints",
    "beam",
    "blockwise_attention",
    "build_classifier",
    "build_language_model",
    "build_masked_language_model",
    "build_regressor",
    "build_transformer",
    "dot_product_attention",
    "greedy",
    "labeled_batches",
    "load_pretrained",
    "load_torch_transformer",
    "loss_model",
    "lower_triangular_mask",
    "masked_batches",
    "merge_lora",
    "mix",
    "pair_batches",
    "read_lines",
    "read_parallel",
    "read_records",
    "read_tsv",
    "sample",
    "text_batches",
    "transfer_weights",
]
