"""What keeps a file from being the weights of a network."""

import pytest
import torch
from torch import nn

from flyte_ddp.errors import InputError
from flyte_ddp.weights import load_weights

OWN = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).state_dict()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (
            {**OWN, "1.bias": torch.zeros(5)},
            "must fit the network, and {path} has 1.bias of (5,) instead of (2,): give",
        ),
        ({"1.bias": OWN["1.bias"]}, "{path} lacks 0.bias, 0.weight, 1.weight: give"),
        (
            {f"more{number}": torch.zeros(1) for number in range(9)} | OWN,
            "{path} has, which the network has not, more0, more1, more2, more3, more4, more5 and 3 more: give",
        ),
        ([1, 2], "must be a state_dict, a tensor for each name, and {path} holds something else (list): give"),
        ({"epoch": 3}, "{path} holds something else (dict): give"),
        (nn.Linear(2, 2), "{path} cannot be read safely (UnpicklingError): give"),
        (b"", "{path} cannot be read safely (EOFError): give"),
        (b"no weights", "{path} cannot be read safely (UnpicklingError): give"),
        (None, "{path} cannot be read safely (No such file or directory): give"),
    ],
)
@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
def test_a_file_that_is_not_of_the_network_is_one_error_that_names_it(tmp_path, content, words, suffix):
    path = tmp_path / f"model{suffix}"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(InputError) as refused:
        load_weights(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), path)
    said = str(refused.value)
    assert "\n" not in said
    assert said.startswith("model_state must ")
    assert words.format(path=path) in said if suffix == ".pt" else f"{path} cannot be read safely" in said
