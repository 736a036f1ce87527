"""Records what `torch.nn.Transformer` computes, for `test_models.py`: run it with torch installed.

`torch_transformer.npz` holds the inputs and, under `post/` and `pre/`, the state dict and the output in evaluation
mode. Padding masks are True for real tokens, the opposite of torch's.
"""

from pathlib import Path

import numpy as np
import torch

SIZES = {"d_model": 16, "nhead": 2, "num_encoder_layers": 2, "num_decoder_layers": 2, "dim_feedforward": 32}


def main():
    torch.manual_seed(0)
    torch.backends.mha.set_fastpath_enabled(False)  # its nested tensors drop padding from the output
    source, target = torch.randn(2, 5, 16), torch.randn(2, 4, 16)
    source_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], dtype=torch.bool)
    target_mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)
    later = torch.ones(4, 4, dtype=torch.bool).triu(1)
    arrays = {"source": source, "target": target, "source_mask": source_mask, "target_mask": target_mask}
    for name, norm_first in (("post", False), ("pre", True)):
        model = torch.nn.Transformer(
            **SIZES, dropout=0.0, activation="relu", batch_first=True, norm_first=norm_first
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # biases start at 0 and normalizations at 1 otherwise
                parameter.add_(0.1 * torch.randn_like(parameter))
            arrays[f"{name}/output"] = model(
                source,
                target,
                tgt_mask=later,
                src_key_padding_mask=~source_mask,
                tgt_key_padding_mask=~target_mask,
                memory_key_padding_mask=~source_mask,
            )
        arrays.update({f"{name}/{key}": value for key, value in model.state_dict().items()})
    path = Path(__file__).with_name("torch_transformer.npz")
    np.savez_compressed(path, **{key: value.numpy() for key, value in arrays.items()})


if __name__ == "__main__":
    main()
