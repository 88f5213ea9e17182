"""Conversion of a network to a file in each format, and of a file to a network."""

import inspect
import re
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flyte_ddp.engine.torch_compat import pytree
from flyte_ddp.errors import InputError
from flyte_ddp.export.settings import TensorSpec
from flyte_ddp.model_files.model_metadata import HEADER
from flyte_ddp.model_files.weights import first_names, load_weights
from flyte_ddp.recipe import Recipe

MOST_ONNX_BYTES = 2**30  # larger weights go to a file beside the ONNX file, because protobuf's limit is 2 GiB
FEW, MORE = 2, 3  # numbers of samples; comparing both shows which dimensions depend on the number


class Call(NamedTuple):
    """A call of a network with this many samples: its arguments and what the network returned."""

    samples: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: Any


def record_call(recipe: Recipe, model: nn.Module, tree: Any, samples: int) -> Call:
    """Run the recipe's forward on a batch without gradients, and return the first call of the network in that forward.

    Before, call model.eval(), and set recipe.share for the batch, as fetch_batch() does. The tensors of the returned
    Call are contiguous.

    Args:
        recipe: the recipe. Errors of its forward are raised as they are.
        model: the recipe's network.
        tree: the batch.
        samples: the number of samples in the batch, for the returned Call.

    Raises:
        InputError: The recipe's forward does not call the network.
    """
    calls: list[Call] = []

    def note(_: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        calls.append(Call(samples, args, kwargs, outputs))

    with model.register_forward_hook(note, with_kwargs=True), torch.no_grad():
        recipe.forward(model, tree)
    if not calls:
        raise InputError(
            f"{type(recipe).__name__}.forward must call the network as model(...), for export: if it calls methods or "
            "layers of the network instead, move these calls to the network's own forward"
        )
    call: Call = pytree.tree_map_only(Tensor, lambda leaf: leaf.detach().contiguous(), calls[0])
    return call


def trace(model: nn.Module, few: Call, more: Call) -> torch.export.ExportedProgram:
    """Return torch.export's program of the network, traced from the call with more samples.

    A dimension of an input is fixed if its sizes in both calls are the same. If the sizes are the calls' numbers of
    samples, the dimension is "batch", which all inputs share. Any other dimension is dynamic by itself.

    Args:
        model: the network, in the mode that the program is to have.
        few: a call of the network with few samples.
        more: a call of the network with more samples, and with arguments nested like those of `few`.

    Raises:
        Exception: torch.export cannot trace the network. Its errors have many types.
    """
    batch = torch.export.Dim("batch")

    def dynamic(one: Any, other: Any) -> Any:
        if not isinstance(one, Tensor):
            return None
        return {
            index: batch if (here, there) == (few.samples, more.samples) else torch.export.Dim.DYNAMIC
            for index, (here, there) in enumerate(zip(one.shape, other.shape, strict=True))
            if here != there
        }

    args = pytree.tree_map(dynamic, few.args, more.args)
    kwargs = pytree.tree_map(dynamic, few.kwargs, more.kwargs)
    # By name where there are keyword arguments, those of *args as a tuple
    own, rest = _positional_names(model)
    by_name = {**dict(zip(own, args, strict=False)), **({rest: args[len(own) :]} if rest else {}), **kwargs}
    shapes = by_name if kwargs else args
    # Gradients stay on, because the fast paths of inference use operations that other formats do not support
    return torch.export.export(model, more.args, more.kwargs or None, dynamic_shapes=shapes)


def save_weights(path: Path, model: nn.Module, header: str) -> None:
    """Save a network's state dict to a safetensors file. Tied tensors are saved once, under the first of their names.

    Args:
        path: the file.
        model: the network, which is not changed.
        header: the model's metadata as JSON, for the file's header.
    """
    from safetensors.torch import save_file

    weights = model.state_dict()
    firsts = {*first_names(weights).values()}
    # safetensors refuses tensors that share memory, so these are copies
    copies = {key: value.detach().clone().contiguous() for key, value in weights.items() if key in firsts}
    save_file(copies, path, metadata={HEADER: header})


def save_pretrained(path: Path, model: Any) -> None:
    """Write a folder by the network's own method save_pretrained, which networks of transformers and peft have.

    Args:
        path: the folder.
        model: the network. Errors of its method are raised as they are.

    Raises:
        InputError: The network has no such method.
    """
    if not callable(getattr(model, "save_pretrained", None)):
        raise InputError(
            f"only networks of transformers and peft have save_pretrained, got {type(model).__name__}: leave "
            "pretrained out of formats"
        )
    model.save_pretrained(path)


def save_program(name: str, path: Path, model: nn.Module, program: torch.export.ExportedProgram, few: Call) -> None:
    """Save a traced network as a pt2 or an ONNX file.

    If tqdm is installed, the function replaces tqdm's lock for the rest of this process.

    Args:
        name: the format: "pt2" or "onnx".
        path: the new file. ONNX weights of more than MOST_ONNX_BYTES (1 GiB) go to a second file beside it.
        model: the network that the program was traced from.
        program: the program that trace() has returned.
        few: a call of the network, from which describe_tensors() gets the names of inputs and outputs for an ONNX
            file. The format pt2 does not need this call.

    Raises:
        Exception: torch cannot convert the program, or the file cannot be written. Torch's errors have many types.
    """
    with suppress(ImportError):  # torch shows progress with tqdm if it is installed
        from tqdm import tqdm

        tqdm.set_lock(threading.RLock())  # the default is a system semaphore, which would outlive this process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own code
        if name == "pt2":
            torch.export.save(program, path)
            return
        inputs, outputs = ([one.name for one in specs] for specs in describe_tensors(model, few, few))
        written = torch.onnx.export(program, input_names=inputs, output_names=outputs, dynamo=True, verbose=False)
        assert written is not None
        size = sum(value.nbytes for value in model.state_dict().values())
        written.save(path, external_data=size > MOST_ONNX_BYTES)


def open_network(name: str, path: Path, model: nn.Module) -> nn.Module:
    """Open an exported file, and return a network that can be called like the recipe's own, for evaluation.

    What is returned depends on the format:

    - "safetensors": `model` itself, with the file's weights, in evaluation mode.
    - "pretrained": a network in evaluation mode, with the base network of `model` if the folder has adapters.
    - "pt2": a network in the mode in which it was traced. It refuses train() and eval().
    - "onnx": a network that runs on the CPU, on tensors on the CPU. Its first call also calls `model`, to learn how
      outputs are nested.

    Args:
        name: the format.
        path: the file; for "pretrained", the folder.
        model: an untrained network of the recipe, which the caller must not use afterwards.

    Raises:
        Exception: The file cannot be opened, or does not fit `model`. Each library has errors of its own.
    """
    if name == "safetensors":
        return load_weights(model, path).eval()
    if name == "pretrained":
        return _from_pretrained(path, model)
    if name == "pt2":
        loaded = torch.export.load(path).module()
        assert isinstance(loaded, nn.Module)
        return loaded
    return OnnxNetwork(path, model)


def _from_pretrained(path: Path, model: Any) -> nn.Module:
    """Load a folder that save_pretrained() has written, and return its network in evaluation mode.

    If the folder has adapters of peft, the function puts them into the base network of `model`, and so changes `model`.
    Otherwise the class of `model` loads the folder by from_pretrained(), and `model` stays as it is.

    Args:
        path: the folder.
        model: the recipe's untrained network.
    """
    if (path / "adapter_config.json").exists():
        from peft import PeftModel

        loaded: nn.Module = PeftModel.from_pretrained(model.unload(), path)
    else:
        loaded = type(model).from_pretrained(path)
    return loaded.eval()


class OnnxNetwork(nn.Module):
    """A network that ONNX Runtime runs on the CPU.

    The file says neither how outputs are nested nor which of them are no tensors, such as None. The untrained model's
    outputs show both.
    """

    def __init__(self, path: Path, model: nn.Module):
        super().__init__()
        import onnxruntime

        self.session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.names = [one.name for one in self.session.get_inputs()]
        self.model = model.eval()
        self.nested: tuple[list[Any], Any] | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.nested = self.nested or pytree.tree_flatten(self.model(*args, **kwargs))
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        arrays = {name: leaf.contiguous().numpy() for name, leaf in zip(self.names, tensors, strict=True)}
        outputs = map(torch.from_numpy, self.session.run(None, arrays))
        leaves, structure = self.nested
        return pytree.tree_unflatten(
            [next(outputs) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
        )


def describe_tensors(model: nn.Module, few: Call, more: Call) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the name, shape and dtype of each input tensor and each output tensor of the network, in order.

    An input is named like its parameter of the network's forward. An input in *args is named by its position among all
    positional inputs: "input_1" is the second one, or "input_input_1" if a parameter has that name. A single output is
    "output". The name of a tensor in a list or dict ends with its index or key, as in "output_0". Values other than
    tensors are left out.

    A dimension of a shape is its size if the size is the same in both calls, "batch" if the sizes are FEW (2) and MORE
    (3), the numbers of samples, and "any" otherwise.

    Args:
        model: the network.
        few: a call with FEW samples.
        more: a call with MORE samples; or `few` again, if only the names matter.

    Returns:
        The inputs, and the outputs.
    """
    names, _ = _positional_names(model)
    rest = [f"input_{index}" for index in range(len(names), len(few.args))]
    while {*rest} & {*names, *few.kwargs}:
        rest = [f"input_{name}" for name in rest]
    names += rest

    def inputs(call: Call) -> dict[str, Any]:
        return {**dict(zip(names, call.args, strict=False)), **call.kwargs}

    outputs = ({"output": call.outputs} for call in (few, more))
    return _specs(inputs(few), inputs(more)), _specs(*outputs)


def _positional_names(model: nn.Module) -> tuple[list[str], str]:
    """Return the names of forward's positional parameters, and the name of its *args; empty without one."""
    parameters = inspect.signature(model.forward).parameters.values()
    own = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return own, next((one.name for one in parameters if one.kind is one.VAR_POSITIONAL), "")


def _specs(few: Any, more: Any) -> tuple[TensorSpec, ...]:
    specs = []
    for (path, one), other in zip(pytree.tree_flatten_with_path(few)[0], pytree.tree_leaves(more), strict=True):
        if isinstance(one, Tensor):
            sizes = zip(one.shape, other.shape, strict=True)
            shape = tuple(str(here) if here == there else _varying(here, there) for here, there in sizes)
            name = re.sub(r"\W+", "_", pytree.keystr(path)).strip("_")
            specs.append(TensorSpec(name, shape, str(one.dtype).removeprefix("torch.")))
    return tuple(specs)


class Name(str):
    """A name that stands for itself within the representation of a list, a dict and so on."""

    __slots__ = ()
    __repr__ = str.__str__


def format_call(model: nn.Module, call: Call) -> str:
    """Return the arguments of a call as source code, with the inputs' names for tensors: "images, mask=None"."""
    inputs, _ = describe_tensors(model, call, call)
    names = (Name(one.name) for one in inputs)
    args, kwargs = pytree.tree_map_only(Tensor, lambda leaf: next(names), (call.args, call.kwargs))
    return ", ".join([*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())])


def _varying(few: int, more: int) -> str:
    return "batch" if (few, more) == (FEW, MORE) else "any"
