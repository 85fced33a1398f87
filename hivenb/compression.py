"""Codecs by name, and everything documented snippets import for compression.

``from hivenb.compression import Float16Compression`` works for all of hivemind's codecs and for
``PowerSGDGradientAverager``; the lossy ones are corrected (see `hivenb.engine.exchange.codecs`). They are loaded on
first use: importing this module imports neither torch nor hivemind, as the widgets and the command line need
only names.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hivenb.errors import MissingDependencyError, OptionsError

if TYPE_CHECKING:
    from hivemind.compression import (
        CompressionBase,
        NoCompression,
        PerTensorCompression,
        RoleAdaptiveCompression,
        SizeAdaptiveCompression,
    )
    from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

    from hivenb.engine.exchange.codecs import (
        BlockwiseQuantization,
        Float16Compression,
        Quantile8BitQuantization,
        ScaledFloat16Compression,
        Uniform8BitQuantization,
    )

_ENGINE, _HIVEMIND = "hivenb.engine.exchange.codecs", "hivemind.compression"
_HOME_OF = {
    "BlockwiseQuantization": _ENGINE,
    "CompressionBase": _HIVEMIND,
    "Float16Compression": _ENGINE,
    "NoCompression": _HIVEMIND,
    "PerTensorCompression": _HIVEMIND,
    "PowerSGDGradientAverager": "hivemind.optim.power_sgd_averager",
    "Quantile8BitQuantization": _ENGINE,
    "RoleAdaptiveCompression": _HIVEMIND,
    "ScaledFloat16Compression": _ENGINE,
    "SizeAdaptiveCompression": _HIVEMIND,
    "Uniform8BitQuantization": _ENGINE,
}

__all__ = [
    "CODECS",
    "SIZE_ADAPTIVE_THRESHOLD",
    "BlockwiseQuantization",
    "CodecInfo",
    "CompressionBase",
    "Float16Compression",
    "NoCompression",
    "PerTensorCompression",
    "PowerSGDGradientAverager",
    "Quantile8BitQuantization",
    "RoleAdaptiveCompression",
    "ScaledFloat16Compression",
    "SizeAdaptiveCompression",
    "Uniform8BitQuantization",
    "codec",
    "codec_code",
    "codec_key",
    "codec_name",
    "missing_package",
    "public_home",
]

#: The codec "size_adaptive" sends tensors with at least this many parameters in 8 bits, as documented.
SIZE_ADAPTIVE_THRESHOLD = 2**16 + 1


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'hivenb.compression' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


@dataclass(frozen=True)
class CodecInfo:
    """What a person should know about a codec before they choose it.

    :param name: the name to use in code
    :param label: the same in words
    :param help: what it costs and gains, one sentence
    :param bytes_per_parameter: bytes that one float32 parameter of a large tensor takes on the wire
    :param package: a package that it needs beyond hivenb's own
    """

    name: str
    label: str
    help: str
    bytes_per_parameter: float
    package: str | None = None


CODECS: Mapping[str, CodecInfo] = MappingProxyType(
    {
        info.name: info
        for info in (
            CodecInfo("none", "none", "Sends every number exactly, with the most traffic.", 4.0),
            CodecInfo(
                "float16",
                "16 bits",
                "Halves the traffic; numbers keep three digits, up to 65504 in size.",
                2.0,
            ),
            CodecInfo(
                "scaled_float16",
                "16 bits, scaled",
                "Halves the traffic; scaling each tensor first keeps the digits of very small numbers.",
                2.0,
            ),
            CodecInfo(
                "uniform8bit",
                "8 bits, even steps",
                "Quarters the traffic: 256 steps around the mean, quick, coarse for rare large numbers.",
                1.0,
            ),
            CodecInfo(
                "quantile8bit",
                "8 bits, by rank",
                "Quarters the traffic: 256 steps where the numbers are, finer but slower to compute.",
                1.0,
            ),
            CodecInfo(
                "blockwise8bit",
                "8 bits, by block",
                "Quarters the traffic: a scale for each 4096 numbers, robust, needs bitsandbytes.",
                1.0,
                package="bitsandbytes",
            ),
            CodecInfo(
                "size_adaptive",
                "8 or 16 bits",
                "Sends large tensors in 8 bits and small ones, which matter more, in 16 bits.",
                1.0,
            ),
        )
    }
)

_CLASS_OF = {
    "none": "NoCompression",
    "float16": "Float16Compression",
    "scaled_float16": "ScaledFloat16Compression",
    "uniform8bit": "Uniform8BitQuantization",
    "quantile8bit": "Quantile8BitQuantization",
    "blockwise8bit": "BlockwiseQuantization",
}
_NAME_OF = {class_name: name for name, class_name in _CLASS_OF.items()}
_ROLES = ("activation", "parameter", "gradient", "optimizer")


def public_home(name: str) -> str | None:
    """The module that really holds a class which this one re-exports, or None."""
    return _HOME_OF.get(name)


def missing_package(name: str) -> str | None:
    """The package that this named codec needs and that is not installed, or None."""
    package = CODECS[name].package
    return package if package is not None and find_spec(package) is None else None


def codec(name_or_object: str | CompressionBase | None) -> CompressionBase:
    """Make hivemind's object for a codec.

    :param name_or_object: a name in `CODECS`, None for "none", or any hivemind codec
    :returns: an object for hivemind; its own lossy codecs, also inside adaptive ones, become the corrected
      ones
    :raises OptionsError: for an unknown name, or something that is no codec
    :raises MissingDependencyError: when the named codec needs a package that is not installed
    """
    from hivemind.compression import CompressionBase

    engine = import_module(_ENGINE)
    if isinstance(name_or_object, CompressionBase):
        return engine.corrected(name_or_object)
    name = check_codec_name(name_or_object)
    package = missing_package(name)
    if package is not None:
        raise MissingDependencyError(
            f"The codec {name!r} needs the package {package}, which is not installed: "
            f"run `pip install {package}`, or use 'uniform8bit' or 'quantile8bit' instead."
        )
    if name == "size_adaptive":
        return engine.SizeAdaptiveCompression(SIZE_ADAPTIVE_THRESHOLD, codec("float16"), codec("uniform8bit"))
    return getattr(import_module(__name__), _CLASS_OF[name])()


def check_codec_name(name: object) -> str:
    """The name as it is in `CODECS` ("none" for None).

    :raises OptionsError: when it is not there; the message lists the valid ones
    """
    if name is None:
        return "none"
    if isinstance(name, str) and name in CODECS:
        return name
    hint = " (call the class: it takes an instance)" if isinstance(name, type) else ""
    raise OptionsError(f"{name!r} is no codec{hint}: use one of {', '.join(CODECS)}, or a hivemind compression object.")


def codec_name(compression: str | CompressionBase | None) -> str | None:
    """The name in `CODECS` of a codec that does exactly what the named one does; None when it has no name.

    :param compression: a name (returned as it is, when valid), None for "none", or any hivemind codec
    :raises OptionsError: for an unknown name, or something that is no codec
    """
    if compression is None or isinstance(compression, str):
        return check_codec_name(compression)
    key = codec_key(compression)
    if isinstance(key, tuple) and len(key) == 2 and key[0] in _NAME_OF and not key[1]:
        return _NAME_OF[key[0]]
    size_adaptive = (
        "SizeAdaptiveCompression",
        SIZE_ADAPTIVE_THRESHOLD,
        codec_key("float16"),
        codec_key("uniform8bit"),
    )
    return "size_adaptive" if key == size_adaptive else None


def codec_key(compression: str | CompressionBase | None) -> Hashable:
    """A value that is equal for codecs which do the same: by class and parameters, upstream or corrected.

    :param compression: a name, None for "none", or any hivemind codec
    :raises OptionsError: for an unknown name, or something that is no codec
    """
    if compression is None or isinstance(compression, str):
        name = check_codec_name(compression)
        if name == "size_adaptive":
            compression = codec(name)
        else:
            return (_CLASS_OF[name], ())
    _require_codec(compression)
    parts = _adaptive_parts(compression)
    if parts is not None:
        return parts
    return (_known_class(compression) or type(compression), _frozen(vars(compression)))


def _adaptive_parts(compression: Any) -> tuple[Hashable, ...] | None:
    """The parameters of hivemind's own adaptive codecs as a comparable value; None for any other codec."""
    kind = _known_class(compression)
    if kind == "SizeAdaptiveCompression":
        return (
            kind,
            compression.threshold,
            codec_key(compression.less),
            codec_key(compression.greater_equal),
        )
    if kind == "RoleAdaptiveCompression":
        roles = compression.role_compressions.items()
        return (kind, tuple(sorted((role.name, codec_key(part)) for role, part in roles)))
    if kind == "PerTensorCompression":
        return (kind, _frozen(compression.tensor_compressions))
    return None


def codec_code(compression: str | CompressionBase | None) -> tuple[set[str], str]:
    """Python that makes this codec.

    :param compression: a name, None for "none", or any hivemind codec
    :returns: the names to import from `hivenb.compression`, and an expression
    :raises OptionsError: when there is no text for it, for example for a class of the user's own
    """
    if compression is None or isinstance(compression, str):
        compression = codec(compression) if compression == "size_adaptive" else compression
        if compression is None or isinstance(compression, str):
            class_name = _CLASS_OF[check_codec_name(compression)]
            return {class_name}, f"{class_name}()"
    kind = _known_class(compression)
    if kind is None:
        _require_codec(compression)
        raise OptionsError(f"hivenb knows no code that makes {compression!r}.")
    imports = {kind}

    def inner(part: Any) -> str:
        names, expression = codec_code(part)
        imports.update(names)
        return expression

    given: Any = compression
    if kind == "SizeAdaptiveCompression":
        arguments = f"{given.threshold}, less={inner(given.less)}, greater_equal={inner(given.greater_equal)}"
    elif kind == "RoleAdaptiveCompression":
        parts = {role.name.lower(): part for role, part in given.role_compressions.items()}
        default = codec_key(parts["unspecified"])
        differing = {role: parts[role] for role in _ROLES if codec_key(parts[role]) != default}
        differing["default"] = parts["unspecified"]
        arguments = ", ".join(f"{role}={inner(part)}" for role, part in differing.items())
    elif kind == "PerTensorCompression":
        parts = given.tensor_compressions
        if isinstance(parts, Mapping):
            arguments = "{" + ", ".join(f"{key!r}: {inner(part)}" for key, part in parts.items()) + "}"
        else:
            arguments = "[" + ", ".join(inner(part) for part in parts) + "]"
    elif vars(given):
        raise OptionsError(f"hivenb knows no code that makes {given!r} with attributes {', '.join(vars(given))}.")
    else:
        arguments = ""
    return imports, f"{kind}({arguments})"


def _require_codec(value: Any) -> None:
    from hivemind.compression import CompressionBase

    if not isinstance(value, CompressionBase):
        check_codec_name(value)


def _known_class(compression: Any) -> str | None:
    """The name of the codec's class when it is hivemind's own or its corrected subclass."""
    kind = type(compression)
    known = kind.__name__ in _HOME_OF and (kind.__module__ == _ENGINE or kind.__module__.startswith(_HIVEMIND))
    return kind.__name__ if known else None


def _frozen(value: Any) -> Hashable:
    """A comparable, hashable picture of a codec's parameters."""
    from hivemind.compression import CompressionBase

    if isinstance(value, CompressionBase):
        return codec_key(value)
    if isinstance(value, Mapping):
        return tuple(sorted(((key, _frozen(part)) for key, part in value.items()), key=lambda item: repr(item[0])))
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(part) for part in value)
    return value if isinstance(value, Hashable) else repr(value)
