"""Codec names, hivemind's objects and code text say the same thing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from hivemind import compression as upstream
from hivemind.compression import CompressionInfo
from hivemind.optim.power_sgd_averager import PowerSGDGradientAverager

from hivenb import compression
from hivenb.compression import CODECS, codec, codec_code, codec_key, codec_name, missing_package
from hivenb.errors import MissingDependencyError, OptionsError

AVAILABLE = [name for name in CODECS if missing_package(name) is None]


@pytest.mark.process
def test_import_needs_neither_torch_nor_hivemind() -> None:
    code = (
        "import sys, hivenb.compression as c; c.codec_name('float16'); c.codec_code('float16'); "
        "print([m for m in ('torch', 'hivemind', 'numpy') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_everything_that_snippets_import_is_there() -> None:
    for name in compression.__all__:
        assert getattr(compression, name) is not None
    assert compression.PowerSGDGradientAverager is PowerSGDGradientAverager
    assert issubclass(compression.Float16Compression, upstream.Float16Compression)
    assert issubclass(compression.Uniform8BitQuantization, upstream.Uniform8BitQuantization)
    assert compression.SizeAdaptiveCompression is upstream.SizeAdaptiveCompression
    with pytest.raises(AttributeError, match="Float16Compression"):
        getattr(compression, "Float32" + "Compression")


@pytest.mark.parametrize("name", CODECS)
def test_each_codec_is_described(name: str) -> None:
    info = CODECS[name]
    assert info.name == name
    assert info.label
    assert info.help.endswith(".")
    assert 0 < info.bytes_per_parameter <= 4


@pytest.mark.parametrize("name", AVAILABLE)
def test_bytes_per_parameter_are_those_on_the_wire(name: str) -> None:
    tensor = torch.randn(200_000)
    message = codec(name).compress(tensor, CompressionInfo.from_tensor(tensor))
    assert len(message.buffer) / tensor.numel() == pytest.approx(CODECS[name].bytes_per_parameter, rel=0.01)


@pytest.mark.parametrize("name", AVAILABLE)
def test_name_and_object_go_both_ways(name: str) -> None:
    made = codec(name)
    assert isinstance(made, upstream.CompressionBase)
    assert codec_name(made) == name
    assert codec_name(name) == name
    assert codec_key(made) == codec_key(name) == codec_key(codec(name))
    assert len({codec_key(other) for other in AVAILABLE}) == len(AVAILABLE)


def test_none_is_no_compression() -> None:
    assert type(codec(None)) is upstream.NoCompression
    assert codec_name(None) == "none"
    assert codec_code(None) == ({"NoCompression"}, "NoCompression()")


def test_plain_hivemind_objects_have_the_same_names_and_are_corrected() -> None:
    assert codec_name(upstream.Float16Compression()) == "float16"
    assert codec_name(upstream.Uniform8BitQuantization()) == "uniform8bit"
    assert type(codec(upstream.Uniform8BitQuantization())) is compression.Uniform8BitQuantization
    documented = upstream.SizeAdaptiveCompression(
        threshold=2**16 + 1,
        less=upstream.Float16Compression(),
        greater_equal=upstream.Uniform8BitQuantization(),
    )
    assert codec_name(documented) == "size_adaptive"
    made: Any = codec(documented)
    assert type(made.greater_equal) is compression.Uniform8BitQuantization


def test_size_adaptive_is_the_documented_one() -> None:
    made: Any = codec("size_adaptive")
    assert made.threshold == 65537
    assert type(made.less) is compression.Float16Compression
    assert type(made.greater_equal) is compression.Uniform8BitQuantization


class Mine(upstream.Float16Compression):
    pass


def test_other_codecs_have_no_name() -> None:
    other_threshold = upstream.SizeAdaptiveCompression(10, codec("float16"), codec("uniform8bit"))
    wide = upstream.Uniform8BitQuantization()
    wide.RANGE_IN_SIGMAS = 8
    for unnamed in (other_threshold, wide, Mine(), upstream.RoleAdaptiveCompression()):
        assert codec_name(unnamed) is None
        assert isinstance(codec(unnamed), type(unnamed))
    assert codec_key(Mine()) == codec_key(Mine()) != codec_key("float16")
    assert codec_key(wide) != codec_key("uniform8bit")


@pytest.mark.parametrize("wrong", ["float32", "", 16, upstream.Float16Compression])
def test_unknown_codecs_list_the_valid_ones(wrong: Any) -> None:
    for function in (codec, codec_name, codec_key, codec_code):
        with pytest.raises(OptionsError) as caught:
            function(wrong)
        assert repr(wrong) in str(caught.value)
        assert all(name in str(caught.value) for name in CODECS)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "find_spec", lambda name: None)
    assert missing_package("blockwise8bit") == "bitsandbytes"
    with pytest.raises(MissingDependencyError, match="pip install bitsandbytes"):
        codec("blockwise8bit")
    assert missing_package("uniform8bit") is None


NESTED: list[upstream.CompressionBase] = [
    upstream.SizeAdaptiveCompression(7, upstream.NoCompression(), codec("size_adaptive")),
    upstream.RoleAdaptiveCompression(gradient=codec("float16"), default=codec("uniform8bit")),
    upstream.RoleAdaptiveCompression(),
    upstream.PerTensorCompression({"weight": codec("float16"), 3: upstream.NoCompression()}),
    upstream.PerTensorCompression([codec("float16"), codec("quantile8bit")]),
]


@pytest.mark.parametrize("given", [*AVAILABLE, *NESTED], ids=str)
def test_code_makes_the_same_codec(given: Any) -> None:
    imports, expression = codec_code(given)
    namespace: dict[str, Any] = {}
    exec(f"from hivenb.compression import {', '.join(sorted(imports))}", namespace)
    made = eval(expression, namespace)
    assert codec_key(made) == codec_key(given)
    assert all(name in expression for name in imports)


def test_code_for_a_codec_of_the_users_own_is_refused() -> None:
    wide = upstream.Uniform8BitQuantization()
    wide.RANGE_IN_SIGMAS = 8
    for unknown in (Mine(), wide, upstream.SizeAdaptiveCompression(7, Mine(), Mine())):
        with pytest.raises(OptionsError, match="no code"):
            codec_code(unknown)
