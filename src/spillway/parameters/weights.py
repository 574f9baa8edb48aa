"""Weights of safetensors files, read straight into the pinned memory that streamed parameters are in.

NOTE [ Loaded once ]

A model on ``meta`` has no memory. Each of its tensors gets a :class:`~spillway.runtime.arena.Pinned` of its own, as a
CPU tensor, and the file's bytes are copied there from its mapping. :func:`spillway.attach` finds the memory by the
tensor's storage (:func:`home_of`), and takes it as the parameter's home. So a streamed weight is copied once. With
``on_disk``, the mapping itself is the home: NOTE [ Weights in their files ] in ``homes.py``.

Torch lets no tensor on ``meta`` get memory. So modules get new parameters, as with ``load_state_dict(assign=True)``.
They get them at the end, when all are read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module, Parameter

from spillway._torch import disable_function, storage_key
from spillway.errors import UnsupportedError, UsageError
from spillway.parameters.homes import FileHome, Home, WeightFile
from spillway.runtime.arena import Arena, Pinned
from spillway.runtime.bytes import over
from spillway.runtime.device import DeviceRuntime
from spillway.session import Session

Files = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

_SHOWN = 8
_loaded: WeakKeyDictionary[torch.UntypedStorage, Pinned | WeightFile] = WeakKeyDictionary()


def home_of(parameter: torch.Tensor, arena: Arena) -> Home | None:
    """The memory or the file that a parameter was loaded into or from. See NOTE [ Loaded once ]."""
    storage = parameter.untyped_storage()
    found = _loaded.get(storage)
    if isinstance(found, WeightFile):
        return None if parameter.requires_grad else FileHome(storage, found)
    return found if found is not None and found.arena is arena else None


def load_weights(
    model: Module,
    files: Files,
    *,
    device: torch.device | str | None = None,
    session: Session | None = None,
    on_disk: bool = False,
) -> None:
    """Load a model from safetensors files, into pinned CPU memory, for ``attach(model, stream=...)``.

    Build the model on ``meta``, where it takes no memory. Its parameters and buffers are then tensors of the CPU. Those
    that :func:`spillway.attach` streams stay in the memory that they were read into. All others are moved to the device
    by ``attach``. So no weight is ever in CPU memory twice.

    Freeze weights, add adapters, and make optimizers afterwards: a parameter that was on ``meta`` is a new object.

    Tensors have the names of ``model.state_dict()``. All tensors on ``meta`` must be in the files: a shared one by one
    of its names. Others may be, and are written in place. Values are converted to the type of the parameter.

    Args:
        model: the model, on ``meta`` or in parts.
        files: a safetensors file, several, or a folder as on Hugging Face: with a ``*.safetensors.index.json`` and its
            files, or with one file.
        device: the device that will compute. ``None``: the current accelerator, or the CPU without one.
        session: the session that :func:`spillway.attach` gets. ``None``: the default one.
        on_disk: leave weights in their files, which are mapped, for frozen weights that CPU memory is too small for.
            Each use reads them again; the system keeps in memory what has space there. Weights whose type is not that
            of the file are read into pinned memory. Do not change the files in place meanwhile.

    Raises:
        UsageError: if the files cannot be read, or their names, shapes or kinds of numbers are not those of the model.
            The model is then unchanged.
        UnsupportedError: if safetensors is not installed; for sharded and quantized tensors.
        TierFullError: if the session has too little CPU memory. The model is then unchanged.

    Example:
        >>> with torch.device("meta"):  # doctest: +SKIP
        ...     model = Model(config).to(torch.bfloat16)
        >>> spillway.load_weights(model, "checkpoints/llama-8b")  # doctest: +SKIP
        >>> attached = spillway.attach(model, stream="layers.*", device="cuda")  # doctest: +SKIP
    """
    if not isinstance(model, Module):
        raise UsageError(f"model: got {model!r:.200}, expected a torch.nn.Module")
    if session is not None and not isinstance(session, Session):
        raise UsageError(f"session: got {session!r}, expected a spillway.Session or None")
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    # With its index: "cuda" is no device of a tensor.
    where = torch.empty(0, device=device).device
    runtime = (Session.default() if session is None else session).runtime(where)
    if not isinstance(runtime, DeviceRuntime):
        raise UnsupportedError("load_weights: got a capture that is under way, expected none. Load before the capture")
    # Tensors are plain ones of the CPU also in ``with torch.device("meta")``.
    with ExitStack() as opened, torch.inference_mode(mode=False), torch.no_grad(), disable_function():
        stored = _stored_in(_paths_of(files), opened)
        places = _places_of(model, stored)
        made: dict[int, torch.Tensor] = {}
        for each in places:
            if each.tensor.is_meta and each.memory not in made:
                made[each.memory] = _read(each, stored, runtime, on_disk=on_disk)
        for each in places:
            if each.tensor.is_meta:
                setattr(each.module, each.key, made[each.memory])
            elif each.source is not None:
                each.tensor.copy_(stored[each.source].opened.get_tensor(each.source))


class _Stored(NamedTuple):
    """The file of a stored tensor."""

    opened: Any
    file: WeightFile


class _Place(NamedTuple):
    """A tensor of a module."""

    module: Module
    key: str
    tensor: torch.Tensor
    memory: int
    """Equal for the places of a shared tensor."""
    source: str | None
    """Its name in the files. A shared tensor has one."""


def _read(place: _Place, stored: Mapping[str, _Stored], runtime: DeviceRuntime, *, on_disk: bool) -> torch.Tensor:
    """The tensor of a place, in pinned memory or in its file."""
    assert place.source is not None
    old, source = place.tensor, stored[place.source]
    content: torch.Tensor = source.opened.get_tensor(place.source)
    is_like = (content.dtype, content.stride()) == (old.dtype, old.stride())
    if on_disk and is_like and content.data_ptr() % content.itemsize == 0:
        _loaded[content.untyped_storage()] = source.file
    else:
        content = _pinned(content, old, runtime)
    if isinstance(old, Parameter):
        content = Parameter(content, requires_grad=old.requires_grad)
    # Marks of libraries, and the one of ``torch.nn.Buffer``.
    vars(content).update(vars(old))
    return content


def _pinned(content: torch.Tensor, form: torch.Tensor, runtime: DeviceRuntime) -> torch.Tensor:
    """A copy in pinned memory, with the dtype and the strides of ``form``."""
    pinned = Pinned(runtime.arena, form.nbytes)
    pinned.synchronize()
    runtime.backend.host_access(pinned.bytes, write=True)
    storage = pinned.alias().untyped_storage()
    _loaded[storage] = pinned
    copied = over(storage, form.dtype, 0, form.shape, form.stride())
    copied.copy_(content)
    return copied


def _places_of(model: Module, stored: Mapping[str, _Stored]) -> list[_Place]:
    """All places of tensors that are on ``meta`` or in the files. Raises ``UsageError`` if the files do not fit."""
    persistent = model.state_dict(keep_vars=True).keys()
    found = {
        f"{path}.{key}" if path else key: (module, key, tensor)
        for path, module in model.named_modules(remove_duplicate=False)
        for named in (module.named_parameters, module.named_buffers)
        for key, tensor in named(recurse=False, remove_duplicate=False)
    }
    # As for ``load_state_dict``, the last name of a shared tensor counts.
    sources = {_memory_of(tensor): name for name, (*_, tensor) in found.items() if name in stored}
    places = {name: _Place(*each, memory := _memory_of(each[2]), sources.get(memory)) for name, each in found.items()}
    firsts: dict[int, torch.Tensor] = {}
    wrong: list[str] = []
    for name, (_, _, tensor, memory, source) in places.items():
        if source is None and not tensor.is_meta:
            continue
        if type(tensor) not in (Parameter, torch.Tensor) or tensor.layout is not torch.strided:
            raise UnsupportedError(
                f"load_weights: got {name}, a {type(tensor).__name__} with {tensor.layout}, expected a plain parameter "
                f"or buffer. Load sharded and quantized weights by their own library"
            )
        if tensor.is_meta and not _is_whole(tensor, firsts.setdefault(memory, tensor)):
            raise UnsupportedError(
                f"load_weights: got {name}, which shares its memory on meta with a tensor of another form, expected "
                f"memory of its own. Share the whole tensor, as tied weights do"
            )
        if name in stored:
            wrong += _differences(name, stored[name].opened.get_slice(name), tensor)
    _refuse(
        [name for name in stored if name not in places or name not in persistent],
        "names that the model does not have, expected those of model.state_dict(). Load files of this very model, or "
        "load it by its own library",
    )
    missing = [name for name, place in places.items() if place.tensor.is_meta and place.source is None]
    _refuse(
        [name for name in missing if name in persistent],
        "no tensors for these on meta, expected all of them. Add their files, or build these modules on the CPU",
    )
    _refuse(
        [name for name in missing if name not in persistent],
        "buffers on meta that no file can have, since they are not persistent. Build the model with its buffers on the "
        "CPU: accelerate.init_empty_weights(include_buffers=False)",
    )
    _refuse(wrong, "other tensors than those of the model, expected equal shapes, and floats for floats")
    return list(places.values())


def _memory_of(tensor: torch.Tensor) -> int:
    # Accelerate makes new parameters of tied ones, with the same memory on ``meta``.
    shares = tensor.is_meta and type(tensor) in (Parameter, torch.Tensor) and tensor.layout is torch.strided
    return storage_key(tensor.untyped_storage()) if shares else id(tensor)


def _is_whole(tensor: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether a tensor has all of its memory, as the first tensor of this memory has."""
    forms = {(each.dtype, each.shape, each.stride()) for each in (tensor, first)}
    return len(forms) == 1 and tensor.nbytes == tensor.untyped_storage().nbytes()


def _differences(name: str, stored: Any, tensor: torch.Tensor) -> Iterator[str]:
    kind, shape = stored.get_dtype(), tuple(stored.get_shape())
    is_float = kind.startswith(("F", "BF"))
    if (
        shape != tuple(tensor.shape)
        or is_float != tensor.is_floating_point()
        or (kind[0] == "C") != tensor.is_complex()
    ):
        yield f"{name}: {kind} {shape} in the file, {tensor.dtype} {tuple(tensor.shape)} in the model"


def _refuse(names: Sequence[str], what: str) -> None:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise UsageError(f"load_weights: got {what}: {', '.join(names[:_SHOWN])}{more}")


def _stored_in(paths: Iterable[Path], opened: ExitStack) -> dict[str, _Stored]:
    """The open file of each stored tensor."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise UnsupportedError(
            "load_weights: got no safetensors, expected that library. Install it: pip install safetensors"
        ) from None
    found: dict[str, _Stored] = {}
    for path in paths:
        try:
            stored = _Stored(opened.enter_context(safe_open(path, framework="pt")), WeightFile(path))
        except (SafetensorError, OSError) as error:
            raise UsageError(f"load_weights: got {path}, expected a safetensors file: {error}") from error
        for name in stored.opened.keys():  # noqa: SIM118
            if name in found:
                other = found[name].file.path
                raise UsageError(f"load_weights: got {name} in {other} and in {path}, expected it in one file")
            found[name] = stored
    return found


def _paths_of(files: Files) -> list[Path]:
    """The files that are meant."""
    if not isinstance(files, (str, os.PathLike)):
        if not isinstance(files, Iterable):
            raise UsageError(f"files: got {files!r:.200}, expected a folder, a safetensors file, or several files")
        return [path for each in files for path in _paths_of(each)]
    path = Path(files)
    if not path.is_dir():
        return [path]
    indices, found = (sorted(path.glob(f"*.safetensors{end}")) for end in (".index.json", ""))
    if len(indices) == 1:
        try:
            names = json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(f"load_weights: got {indices[0]}, expected an index with a weight_map: {error}") from error
        return [path / name for name in dict.fromkeys(names)]
    if indices or len(found) != 1:
        raise UsageError(
            f"load_weights: got {path} with {len(indices)} indices and {len(found)} safetensors files, expected one "
            f"index or one file. Give the files"
        )
    return found
