"""Admission: which heads go which way, with the table of method names, and what a refusal says."""

from types import SimpleNamespace

import pytest
import torch

from tpbed.selector.admission import AdmissionError, admit, admits_quant_method, is_dense_head
from tpbed.selector.errors import SelectionError
from tpbed.selector.fp8 import Fp8Head
from tpbed.selector.head import DenseHead
from tpbed.selector.shard import VocabShard

FP8 = torch.float8_e4m3fn
SIZES = ("input_size_per_partition", "output_size_per_partition")
MARLIN = ("weight_scale", "weight_global_scale", "workspace", *SIZES)
NATIVE = ("weight_scale_interleaved", "alpha", "input_scale_inv", *SIZES)


def method(name, apply=lambda layer, x, bias=None: x):
    return type(name, (), {"apply": staticmethod(apply)} if apply else {})()


def head(dtype=None, quant_method=None, attributes=()):
    weight = {} if dtype is None else {"weight": torch.zeros(4, 4).to(dtype)}
    return SimpleNamespace(**weight, quant_method=quant_method, **dict.fromkeys(attributes, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_three_dense_dtypes_are_dense(dtype):
    assert is_dense_head(head(dtype))
    assert admit(head(dtype)) == ("dense", f"weight is {dtype}")


@pytest.mark.parametrize("dtype", [torch.float64, FP8, torch.float8_e5m2, torch.int8, torch.uint8, torch.int32])
def test_no_other_dtype_is_dense_even_if_it_is_floating_point(dtype):
    assert not is_dense_head(head(dtype))


@pytest.mark.parametrize("name", ["UnquantizedEmbeddingMethod", "UnquantizedLinearMethod", "PackWeightMethod"])
def test_methods_that_leave_the_weight_unquantized_mean_dense(name):
    assert admit(head(torch.bfloat16, method(name)))[0] == "dense"
    assert not admits_quant_method(head(torch.uint8, method(name)))


ADMITTED = [
    ("ModelOptFp4LinearMethod", torch.int32, MARLIN),
    ("ModelOptFp4LinearMethod", torch.uint8, NATIVE),
    ("ModelOptNvFp4A16LinearMethod", torch.int32, MARLIN),
    ("ModelOptFp8LinearMethod", FP8, ("weight_scale", "input_scale")),
    ("CompressedTensorsLinearMethod", torch.int8, ()),
    ("Fp8LinearMethod", FP8, ()),
]


@pytest.mark.parametrize(("name", "dtype", "attributes"), ADMITTED)
def test_a_method_that_finds_its_layout_is_admitted(name, dtype, attributes):
    path, because = admit(head(dtype, method(name), attributes))
    assert path == "quantized"
    assert name in because


@pytest.mark.parametrize(("name", "dtype", "attributes"), ADMITTED[:4])
def test_each_attribute_of_a_layout_is_required_and_named_when_missing(name, dtype, attributes):
    for missing in attributes:
        kept = [a for a in attributes if a != missing]
        ruling = admits_quant_method(head(dtype, method(name), kept))
        assert not ruling
        assert missing in ruling.because
        there_but_none = head(dtype, method(name), kept)
        setattr(there_but_none, missing, None)
        assert not admits_quant_method(there_but_none)


@pytest.mark.parametrize(
    ("name", "dtype", "attributes"),
    [
        ("ModelOptFp4LinearMethod", torch.uint8, MARLIN),  # the layout of the other dtype
        ("ModelOptFp4LinearMethod", torch.int32, NATIVE),
        ("ModelOptNvFp4A16LinearMethod", torch.uint8, NATIVE),
        ("ModelOptFp8LinearMethod", torch.uint8, ("weight_scale", "input_scale")),
    ],
)
def test_a_layout_of_another_dtype_is_refused(name, dtype, attributes):
    with pytest.raises(AdmissionError, match=name):
        admit(head(dtype, method(name), attributes))


@pytest.mark.parametrize("name", ["ModelOptFp4LinearMethod", "ModelOptFp8LinearMethod", "ModelOptNvFp4A16LinearMethod"])
def test_a_stale_method_beside_a_shared_dense_weight_means_dense(name):
    assert admit(head(torch.bfloat16, method(name)))[0] == "dense"


def test_an_admitted_method_wins_over_a_dense_weight():
    assert admit(head(torch.bfloat16, method("GgufLinearMethod")))[0] == "quantized"


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (head(None, method("GGUFLinearMethod")), "head has no weight"),
        (head(torch.uint8), "head has no quant_method"),
        (head(torch.uint8, method("Broken", apply=None)), "Broken has no apply"),
        (head(FP8, method("UnquantizedLinearMethod")), "leaves the weight unquantized"),
        (SimpleNamespace(), "head has no quant_method"),
    ],
)
def test_a_refusal_says_what_speaks_against_both_ways_and_what_to_do(refused, why):
    with pytest.raises(AdmissionError, match=why) as raised:
        admit(refused)
    text = str(raised.value)
    assert "quant_method" in text
    assert "dense" in text
    assert ": load the parameters" in text
    assert isinstance(raised.value, SelectionError)


def test_our_own_heads_are_admitted_on_their_own_ways():
    shard = VocabShard.even(0, 1, 64)
    assert admit(DenseHead.from_full(torch.ones(64, 4), shard))[0] == "dense"
    assert admit(Fp8Head.from_full(torch.ones(64, 4), shard))[0] == "quantized"
